# SPDX-License-Identifier: Apache-2.0
"""The model and its parts."""
