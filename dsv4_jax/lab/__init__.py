# SPDX-License-Identifier: Apache-2.0
"""Compare optimizers on small tasks, each at its own best learning rate and with several seeds.

`python -m dsv4_jax optim-lab SPEC`; `docs/optimizers.md` shows how to add an optimizer.
"""

from dsv4_jax.lab.runner import Contender, Lab, run_lab
from dsv4_jax.lab.tasks import CharLM, Task, ZipfRegression

__all__ = ["CharLM", "Contender", "Lab", "Task", "ZipfRegression", "run_lab"]
