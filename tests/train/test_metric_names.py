# SPDX-License-Identifier: Apache-2.0
"""Names of metrics: those of every step have a group or are of the contract, and old names are read as today's."""

import json

import pytest

from dsv4_jax.train.metric_names import GROUPS, current_name
from dsv4_jax.train.metrics import drop_lines_after

CONTRACT = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((name, name) for name in CONTRACT),
        ("mtp_loss", "train/mtp_loss"),
        ("load_max/mtp.0", "moe/load_max/mtp.0"),
        ("load_max/2_image", "moe/load_max/2_image"),
        ("load_entropy_image", "moe/load_entropy_image"),
        ("update_ratio/muon", "optim/update_ratio/muon"),
        ("seconds/save", "perf/seconds/save"),
        ("eval_loss_wrong_image", "eval/loss_wrong_image"),
        ("loss/z_loss", "loss/z_loss"),
        ("custom/lag", "custom/lag"),
    ],
)
def test_old_names_become_those_of_today_which_stay(old: str, new: str):
    assert current_name(old) == current_name(new) == new


def test_no_name_is_in_two_groups():
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len({*names, *GROUPS}) - len(GROUPS) and not {*names} & {*CONTRACT}


def test_lines_of_an_older_version_are_dropped_by_their_rollbacks(tmp_path):
    """The run went back once, from step 4 to 2, and was killed after step 3, before it saved."""
    courses = [("rollbacks", 0, (1, 2, 3, 4)), ("rollbacks", 1, (3,)), ("train/rollbacks", 1, (4, 5))]
    lines = [json.dumps({"step": n, name: count}) + "\n" for name, count, steps in courses for n in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert drop_lines_after(tmp_path, 3, 1).read_text() == "".join(lines[:5])
    assert drop_lines_after(tmp_path, 2, 1).read_text() == "".join(lines[:4])
