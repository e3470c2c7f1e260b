# SPDX-License-Identifier: Apache-2.0
"""Muon in its forms against AdamW, on a character model: tuned alone, three seeds, shorter runs.

python -m dsv4_jax optim-lab benchmarks/optim/charlm.py
"""

from dsv4_jax import optim
from dsv4_jax.lab import CharLM, Contender, Lab
from dsv4_jax.optim import Group

TASK = CharLM()


def groups(params, rules, table="adamw"):
    """Muon for hidden matrices, AdamW for norms and positions, and one of several rules for the table."""
    tree = optim.v4_groups(params, rules)
    return tree | {"wte": Group(table, 0.0 if table == "sinkhorn" else 0.1)}


def lab() -> Lab:
    """AdamW, hybrid and five-step Muon, head-wise, and with a Sinkhorn-balanced embedding."""
    adamw = lambda rate, params: optim.grouped(rate, optim.adamw_groups(params, TASK.roles))
    hybrid = lambda rate, params: optim.grouped(rate, groups(params, TASK.roles))
    five = lambda rate, params: optim.grouped(rate, groups(params, TASK.roles), coefficients="keller_jordan")
    heads = lambda rate, params: optim.grouped(rate, groups(params, TASK.headwise))
    table = lambda rate, params: optim.grouped(rate, groups(params, TASK.headwise, "sinkhorn"))
    return Lab(
        task=TASK,
        contenders=[
            Contender("AdamW", adamw, (8e-3, 1.6e-2, 3.2e-2)),
            Contender("Muon", hybrid, (1.6e-2, 3.2e-2, 6.4e-2), shorter=(450, 400, 300)),
            Contender("Muon, five steps", five, (1.6e-2, 3.2e-2, 6.4e-2)),
            Contender("head-wise Muon", heads, (1.6e-2, 3.2e-2, 6.4e-2)),
            Contender("head-wise Muon, Sinkhorn table", table, (1.6e-2, 3.2e-2, 6.4e-2)),
        ],
        metric="validation loss",
        steps=600,
    )
