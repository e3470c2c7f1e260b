# SPDX-License-Identifier: Apache-2.0
"""Trains a model: `python train.py CONFIG [--section.key value ...]`; `--help` lists the keys."""

from dsv4_jax.cli import train

if __name__ == "__main__":
    train()
