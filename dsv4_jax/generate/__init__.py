# SPDX-License-Identifier: Apache-2.0
"""Text from a trained model: sampling and speculative decoding."""
