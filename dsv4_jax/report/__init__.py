# SPDX-License-Identifier: Apache-2.0
"""An HTML page about training runs, from what they wrote."""

from dsv4_jax.report.page import write_report
from dsv4_jax.report.read import read_run

__all__ = ["read_run", "write_report"]
