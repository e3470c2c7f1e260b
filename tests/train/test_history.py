# SPDX-License-Identifier: Apache-2.0
"""What checkpoints hold beside arrays, also as earlier versions wrote it; and what a stop leaves to be done."""

import contextlib
import dataclasses
import json
import shutil
import signal

import jax.numpy as jnp
import pytest
from support.runs import metrics, small, timeless, train

import dsv4_jax as ds
from dsv4_jax.config import Stage
from dsv4_jax.train import manifests, run
from dsv4_jax.train.anticipation import RouteQueue
from dsv4_jax.train.history import History, Progress, Recovery, Routes
from dsv4_jax.train.spikes import Recent

pytestmark = pytest.mark.usefixtures("cheap_compilation")

# The JSON of a checkpoint as it was before its values were grouped.
FLAT = {
    "tokens": 700, "stage": 1, "position": [3, 40, 5], "identity": "a-b", "skip": 2,
    "recent": {"losses": [2.0, 1.5], "norms": [0.5, 0.25], "over": 1}, "spikes": 4, "rollbacks": 3, "furthest": 17,
    "tries": 2, "hold": 25, "routed": [6, 7], "routes": [2, 64, 2, 2],
    "events": [{"step": 5, "event": "spike", "text": "loss 9"}], "clock": [[0, 0], [6, 700]], "config": {},
}  # fmt: skip


def test_the_history_survives_json_in_either_form():
    want = History(
        Progress(700, 1, [3, 40, 5], "a-b", [[0, 0], [6, 700]]),
        Recovery(Recent([2.0, 1.5], [0.5, 0.25], 1), spikes=4, rollbacks=3, furthest=17, tries=2, hold=25, skip=2),
        Routes([6, 7], [2, 64, 2, 2]),
        [{"step": 5, "event": "spike", "text": "loss 9"}],
    )
    assert History.from_host(FLAT) == want
    grouped = json.loads(json.dumps(dataclasses.asdict(want)))
    assert History.from_host(grouped | {"config": {}}) == want
    grouped["progress"]["of_a_newer_version"] = grouped["routes"].pop("shape")
    assert History.from_host(grouped) == dataclasses.replace(want, routes=Routes([6, 7]))
    assert History.from_host({}) == History.from_host({"progress": {}}) == History()


def test_the_queue_of_routes_survives_a_checkpoint():
    queue = RouteQueue()
    assert queue.to_state() == ((), Routes()) and queue.shape == () and not queue
    for step in (4, 4, 5):
        queue.push(jnp.full((2, 3), step), step)
    assert queue.pop(4)[1] == 0 and len(queue) == 2
    again = RouteQueue.from_state(*queue.to_state())
    assert again.to_state()[1] == Routes([4, 5], [2, 3])
    assert [again.pop(step)[1] for step in (5, 8)] == [1, 3]


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("straight")
    train(small(corpus, run_dir))
    return run_dir


def test_a_checkpoint_of_an_earlier_version_resumes_bit_for_bit(straight, corpus, tmp_path):
    """Its values side by side, and of the end that it was saved at only the checkpoint of step 6."""
    shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    folder = tmp_path / "run" / "checkpoints" / "6"
    manifest = manifests.read(folder)
    host = manifest["host"]
    routes = host.pop("routes")
    flat = {
        **host.pop("progress"),
        **host.pop("recovery"),
        "routed": routes["steps"],
        "routes": routes["shape"],
        **host,
    }
    del flat["evaluation_due"]
    assert flat.keys() == FLAT.keys()
    (folder / manifests.NAME).write_bytes(manifests._render(manifest | {"host": flat}))
    assert "at step 6" in train(small(corpus, tmp_path / "run"))
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(straight))


@pytest.mark.parametrize("step", [4, 8])
def test_a_stop_at_an_evaluation_leaves_it_to_the_next_command(straight, corpus, tmp_path, monkeypatch, step):
    """At the last step too, where the run would otherwise be taken for finished."""
    stop = lambda: contextlib.nullcontext(lambda now: signal.SIGTERM if now == step else 0)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(run, "stop_signals", stop)
        train(small(corpus, tmp_path))
    assert metrics(tmp_path)[-1]["step"] == step and "eval/loss" not in metrics(tmp_path)[-1]
    said = train(small(corpus, tmp_path))
    assert f"step {step}: held-out loss" in said and "unigram entropy" in said
    assert timeless(metrics(tmp_path)) == timeless(metrics(straight))
    assert "finished" in train(small(corpus, tmp_path))


def test_steps_beyond_the_stages_are_counted_with_the_batches_that_were_read(corpus, tmp_path):
    """The stages end after 12 steps of 2 x 64 tokens; after 6 of them and a batch of 4 rows, after 9."""
    cfg = small(corpus, tmp_path).replace({"stages": (Stage(name="a", until=12 * 128),), "train.steps": 6})
    train(cfg)
    larger = cfg.replace({"data.batch_size": 4})
    with pytest.raises(ds.ConfigError, match=r"train\.steps = 10 exceeds the 9 steps of the stages"):
        train(larger.replace({"train.steps": 10}))
    assert "resumed" in train(larger.replace({"train.steps": 9}))
    assert metrics(tmp_path)[-1]["step"] == 9


def test_an_evaluation_due_at_the_end_of_a_stage_belongs_to_it(corpus, tmp_path, monkeypatch):
    """With its rows, not those of the stage that the next command enters."""
    stages = Stage(name="a", until=4 * 128), Stage(name="b", until=6 * 128, changes={"data.seq_len": 32})
    runs = {name: small(corpus, tmp_path / name, eval_every=2) for name in ("straight", "stopped")}
    runs = {name: cfg.replace({"stages": stages, "train.steps": 0}) for name, cfg in runs.items()}
    train(runs["straight"])
    stop = lambda: contextlib.nullcontext(lambda now: signal.SIGTERM if now == 4 else 0)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(run, "stop_signals", stop)
        train(runs["stopped"])
    train(runs["stopped"])
    lines = [timeless(metrics(tmp_path / name)) for name in runs]
    assert lines[0] == lines[1] and "eval/loss" in lines[0][3]
    assert (tmp_path / "straight" / "events.jsonl").read_text() == (tmp_path / "stopped" / "events.jsonl").read_text()
