# SPDX-License-Identifier: Apache-2.0
"""Name metrics: `step`, `tokens`, `loss`, `lr`, `grad_norm`, `tokens_per_s`, and all others as GROUP/NAME."""

GROUPS = {
    "train": ("mtp_loss", "balance_loss", "indexer_loss", "draft_ce", "draft_distance", "draft_confidence",
              "draft_acceptance", "objective", "skipped", "skipped_records", "spikes", "rollbacks", "lag"),
    "moe": ("load_max", "load_dead", "load_entropy", "load_max_image", "load_dead_image", "load_entropy_image",
            "bias_max", "clamped"),
    "optim": ("update_ratio",),
    "perf": ("goodput", "mfu", "seconds", "memory_in_use", "memory_peak"),
}  # fmt: skip
_GROUP = {name: group for group, names in GROUPS.items() for name in names}
# Metrics in `train/` that the loop adds to those of the step.
OF_THE_LOOP = ("lag", "rollbacks", "skipped_records", "spikes")


def current_name(name: str) -> str:
    """Return today's name of a metric in a metrics.jsonl of any version; older ones had no groups, and `eval_NAME`."""
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    head = name.partition("/")[0]
    return f"{_GROUP[head]}/{name}" if head in _GROUP else name
