# SPDX-License-Identifier: Apache-2.0
"""State, step and loop of a training run."""
