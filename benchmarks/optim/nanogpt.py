# SPDX-License-Identifier: Apache-2.0
"""AdamW on nanoGPT's recipe for CPUs, whose published validation loss on tiny Shakespeare is 1.88.

TEXT=input.txt python -m dsv4_jax optim-lab benchmarks/optim/nanogpt.py

Without TEXT it runs on the Python language reference, whose losses are others. The recipe's rate is
1e-3; the search around it shows how far that is from the best.
"""

import os

from dsv4_jax import optim
from dsv4_jax.lab import CharLM, Contender, Lab

TASK = CharLM(text=os.environ.get("TEXT", ""), layers=4, width=128, batch=12)


def lab() -> Lab:
    """AdamW and head-wise Muon, 2000 steps."""
    adamw = lambda rate, params: optim.grouped(rate, optim.adamw_groups(params, TASK.roles), b2=0.99, eps=1e-8)
    muon = lambda rate, params: optim.deepseek_v4(rate, params, TASK.headwise)
    return Lab(
        task=TASK,
        contenders=[Contender("AdamW", adamw, (1e-3, 2e-3, 4e-3)), Contender("head-wise Muon", muon, (4e-3, 8e-3))],
        metric="validation loss",
        steps=2000,
        warmup=0.05,
    )
