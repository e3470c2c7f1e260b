# SPDX-License-Identifier: Apache-2.0
"""Types of a sequence's positions.

An image is a START, then for each row of its cells an IMAGE for every cell and a NEWLINE, then an END. All else is
TEXT, padding too. The data write these numbers into `token_types` and the model reads them there.
"""

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3
