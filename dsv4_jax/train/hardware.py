# SPDX-License-Identifier: Apache-2.0
"""Measure the use of the devices: the share of their peak, and their memory."""

import jax

from dsv4_jax.config import Config
from dsv4_jax.model.counts import operations_per_token
from dsv4_jax.roofline import CHIPS

# Dense bf16 operations a second of one device, from the vendors' data sheets.
PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12} | {name: chip.operations for name, chip in CHIPS.items()}


def peak_flops(given: float) -> float:
    """Return the peak of one device in FLOP/s: `given`, or by the kind of device; 0 if unknown."""
    kind = jax.devices()[0].device_kind
    return given or next((peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)), 0.0)


def utilisation_per_rate(cfg: Config) -> float:
    """Return the model FLOP utilisation at one token a second; 0 if the peak is unknown.

    Also 0 if only a part of the model is trained, which takes fewer operations than `operations_per_token` counts.
    """
    peak = peak_flops(cfg.train.peak_flops)
    part = cfg.train.objective != "pretrain" or cfg.train.frozen or cfg.model.attention == "warmup"
    if not peak or part:
        return 0.0
    return sum(operations_per_token(cfg.model, cfg.data.seq_len)) / (peak * jax.device_count())


def device_memory() -> dict[str, float]:
    """Return bytes in use, now and at the peak so far, on the fullest device of this process; nothing on CPUs."""
    stats = [found for device in jax.local_devices() if (found := device.memory_stats())]
    names = {"perf/memory_in_use": "bytes_in_use", "perf/memory_peak": "peak_bytes_in_use"}
    return {name: max(s[key] for s in stats) for name, key in names.items() if stats and all(key in s for s in stats)}
