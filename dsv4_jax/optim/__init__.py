# SPDX-License-Identifier: Apache-2.0
"""Make optimizers as optax transformations, for any pytree of parameters, on any mesh.

Nothing here imports the model. `docs/optimizers.md` shows each optimizer on parameters of other models.
"""

from dsv4_jax.optim import schedules
from dsv4_jax.optim.groups import (
    Group,
    adamw_groups,
    deepseek_v4,
    deepseek_v41,
    describe,
    find_roles,
    grouped,
    v4_groups,
    v41_groups,
)
from dsv4_jax.optim.muon import muon, scale_by_muon, scale_by_orthogonal
from dsv4_jax.optim.newton_schulz import COEFFICIENTS, HYBRID, newton_schulz
from dsv4_jax.optim.roles import MatrixSpec, Role
from dsv4_jax.optim.sinkhorn import scale_by_sinkhorn, sinkhorn_balanced, sinkhorn_scales

__all__ = [
    "COEFFICIENTS",
    "HYBRID",
    "Group",
    "MatrixSpec",
    "Role",
    "adamw_groups",
    "deepseek_v4",
    "deepseek_v41",
    "describe",
    "find_roles",
    "grouped",
    "muon",
    "newton_schulz",
    "scale_by_muon",
    "scale_by_orthogonal",
    "scale_by_sinkhorn",
    "schedules",
    "sinkhorn_balanced",
    "sinkhorn_scales",
    "v4_groups",
    "v41_groups",
]
