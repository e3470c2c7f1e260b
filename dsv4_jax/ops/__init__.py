# SPDX-License-Identifier: Apache-2.0
"""Pure functions that the model is made of, and their reference forms."""
