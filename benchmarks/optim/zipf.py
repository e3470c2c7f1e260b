# SPDX-License-Identifier: Apache-2.0
"""Rules for embedding tables on rows that are looked up with Zipf frequencies.

python -m dsv4_jax optim-lab benchmarks/optim/zipf.py
"""

import optax

from dsv4_jax import optim
from dsv4_jax.lab import Contender, Lab, ZipfRegression


def lab() -> Lab:
    """AdamW, SGD, and the Sinkhorn-balanced update with masks from none to wide."""

    def balanced(tau, rates):
        return Contender(
            f"Sinkhorn-balanced, tau {tau:g}", lambda rate, _: optim.sinkhorn_balanced(rate, tau=tau), rates
        )

    return Lab(
        task=ZipfRegression(),
        contenders=[
            Contender("AdamW", lambda rate, _: optax.adamw(rate, 0.9, 0.95, weight_decay=0.0), (0.05, 0.1, 0.2)),
            Contender("AdamW, b2 0.999", lambda rate, _: optax.adamw(rate, weight_decay=0.0), (0.05, 0.1, 0.2)),
            Contender("SGD", lambda rate, _: optax.sgd(rate, 0.9), (250.0, 500.0, 1000.0)),
            balanced(1e-3, (0.02, 0.04, 0.08)),
            balanced(0.0, (0.02, 0.04, 0.08)),
            balanced(1e-2, (0.04, 0.08, 0.16)),
            balanced(0.1, (0.04, 0.08, 0.16)),
            balanced(0.3, (0.04, 0.08, 0.16)),
        ],
        metric="last losses",
        steps=1500,
        seeds=(42, 77, 123),
        warmup=0.0,
        end=0.0,
        clip=0.0,
    )
