# SPDX-License-Identifier: Apache-2.0
"""The weights of the golden models: a rule, not a file."""

import json
import zlib
from typing import Any

import numpy as np
from support import ROOT

GOLDEN = ROOT / "tests" / "golden"
NOT_CONFIGURATION = (
    *("weight_seed", "ids_seed", "seq_len", "grad_norms", "tensors"),
    *("image", "token_map", "engram_primes", "engram_multipliers"),
)


def read(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """The description of a golden model, its official configuration, and its stored arrays."""
    spec = json.loads((GOLDEN / f"{name}.json").read_text())
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    return spec, {k: v for k, v in spec.items() if k not in NOT_CONFIGURATION}, arrays


def weights(spec: dict[str, Any]) -> dict[str, np.ndarray]:
    """All tensors by official name, [out, in], from their names' checksums and the seed."""
    return {name: _tensor(name, shape, spec) for name, shape in spec["tensors"].items()}


def _tensor(name: str, shape: list[int], spec: dict[str, Any]) -> np.ndarray:
    r = np.random.RandomState((zlib.crc32(name.encode()) + spec["weight_seed"]) % 2**32)
    *path, last = name.split(".")
    if last == "tid2eid":
        k = spec["n_activated_experts"]
        return np.stack([r.permutation(spec["n_routed_experts"])[:k] for _ in range(shape[0])])
    x = r.standard_normal(shape)
    if (path and "norm" in path[-1]) or last in ("q_weight", "k_weight"):
        x = 1 + 0.1 * x
    elif name.endswith(("gate.bias", "gate.bias_vl")):
        x = 0.1 * x
    elif len(shape) == 1 or last == "ape" or ("embed" in name and "patch_embed" not in name):
        x = 0.5 * x
    else:
        x = x * 1.5 / np.sqrt(shape[-1])
    return x.astype(np.float32)
