# SPDX-License-Identifier: Apache-2.0
"""`python -m dsv4_jax COMMAND`."""

from dsv4_jax.cli import main

main()
