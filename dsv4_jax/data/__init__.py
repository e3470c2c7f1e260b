# SPDX-License-Identifier: Apache-2.0
"""Read text and images, tokenise them, pack them into rows, and make batches."""
