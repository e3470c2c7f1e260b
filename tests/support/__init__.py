# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders share: small models and runs, golden numbers, references."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
