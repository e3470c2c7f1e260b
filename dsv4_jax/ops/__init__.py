# SPDX-License-Identifier: Apache-2.0
"""Compute what the model is made of: pure functions, and short reference forms of the fast ones."""
