# SPDX-License-Identifier: Apache-2.0
"""The drafter: anchors and targets, its losses against plain loops, its training, and decoding with it."""

import dataclasses
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from support.golden_models import ruled_model, small_config
from support.hlo import loops

from dsv4_jax.cli import main
from dsv4_jax.config import Config, DataConfig, LossConfig, OptimConfig, TrainConfig
from dsv4_jax.mesh import act_spec, make_mesh
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.dspark import Anchors, compute_confidence, compute_slot_logits, propose
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.train import programs
from dsv4_jax.train.checkpoint import load_model
from dsv4_jax.train.objectives.draft import choose_anchors, compute_draft_losses, find_slot_targets, weigh_slots
from dsv4_jax.train.run import run
from dsv4_jax.train.state import init_state
from dsv4_jax.train.step import make_train_step

n, S = 3, 16
MODEL = small_config(
    compress_ratios=(0, 0),
    dspark_target_layer_ids=(0,),
    dspark_block_size=n,
    dspark_noise_token_id=63,
    dspark_markov_rank=4,
    dspark_n_routed_experts=4,
    dspark_n_activated_experts=2,
    window_size=5,
    hc_sinkhorn_iters=2,
    init_std=0.5,
    remat="none",
)
SEGMENTS = np.array([[1] * 6 + [2] * 8 + [0] * 2, [1] * 16])
IDS = np.random.RandomState(0).randint(0, 60, (2, S))
TARGETS = np.where((SEGMENTS[:, 1:] == SEGMENTS[:, :-1]) & (SEGMENTS[:, 1:] > 0), IDS[:, 1:], -1)
TARGETS = np.concatenate([TARGETS, np.full((2, 1), -1)], axis=1)
CONFIG = Config(
    model=MODEL,
    data=DataConfig(seq_len=S, batch_size=2),
    loss=LossConfig(mtp=0.0, draft_anchors=4),
    optim=OptimConfig(name="adamw", learning_rate=1e-2, warmup_steps=1, decay_steps=0),
    train=TrainConfig(objective="draft", steps=30),
)


def put(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return jax.reshard(x, act_spec(x.ndim))


def test_anchors_are_positions_with_a_target():
    found = np.asarray(jax.jit(lambda key: choose_anchors(put(TARGETS), key, 14))(jax.random.key(0)))
    for row, targets in zip(found, TARGETS, strict=True):
        chosen = row[row >= 0]
        assert len(set(chosen)) == len(chosen) == min(14, (targets >= 0).sum())
        assert (targets[chosen] >= 0).all() and (row[len(chosen) :] == -1).all()
    again = choose_anchors(put(TARGETS), jax.random.key(1), 3)
    assert (np.asarray(again) != found[:, :3]).any()


def test_slots_stop_at_the_first_place_without_a_target():
    found = np.asarray(find_slot_targets(put(TARGETS), put(np.array([[3, 4, -1], [0, 14, 13]])), n))
    want = [[[*TARGETS[0, 3:5], -1], [TARGETS[0, 4], -1, -1], [-1] * 3]]
    want += [[TARGETS[1, :3], [TARGETS[1, 14], -1, -1], [*TARGETS[1, 13:15], -1]]]
    np.testing.assert_array_equal(found, np.array(want))
    np.testing.assert_allclose(weigh_slots(jnp.asarray(found), 2.0)[1, 0], np.exp([0, -0.5, -1.0]), rtol=1e-6)


@pytest.fixture(scope="module")
def model():
    return ruled_model(MODEL)


@pytest.fixture(scope="module")
def losses():
    @jax.jit
    def run(model, position):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        inputs = Inputs(put(IDS), put(SEGMENTS))

        def total(params):
            found, _ = compute_draft_losses(nnx.merge(graph, params, rest), inputs, put(TARGETS), position, 2.0)
            return sum(found[f"draft_{name}"] for name in ("ce", "distance", "confidence")), found

        return jax.value_and_grad(total, has_aux=True)(params)

    return run


def test_losses_are_those_of_every_slot_by_itself(model, losses):
    """All anchors at once against one row a document, one anchor a time, one formula a line."""
    position = np.array([[3, 8, -1], [0, 14, 7]])
    (_, found), _ = losses(model, put(position))

    @jax.jit
    def parts(model, ids, at, before):
        out = model.hidden(Inputs(ids), collect=["features"])
        made = model.draft(out, at)
        logits, accepted = (
            compute_slot_logits(model, made.h_BAnD, before),
            compute_confidence(model, made.u_BAnD, before),
        )
        return logits[0, 0], accepted[0, 0], head_logits(out.h, model.head[...])[0]

    want = dict.fromkeys(("draft_ce", "draft_distance", "draft_confidence"), 0.0)
    for row, starts in enumerate(position):
        for a in starts[starts >= 0]:
            first = int((SEGMENTS[row] != SEGMENTS[row, a]).argmin())
            document = IDS[row][SEGMENTS[row] == SEGMENTS[row, a]]
            at = int(a) - first
            true = document[at + 1 : at + 1 + n]
            before = np.resize(document[at : at + n], n)
            ids = np.resize(document, S)  # what follows the document changes nothing before it
            anchor = Anchors(*(put(np.array([[x]])) for x in (document[at], at, 0)))
            p, accepted, q = map(np.asarray, parts(model, put(ids[None]), anchor, put(before[None, None])))
            for k, token in enumerate(true):
                w, log_p = np.exp(-k / 2.0), jax.nn.log_softmax(p[k])
                want["draft_ce"] -= w * log_p[token]
                distance = np.abs(np.exp(log_p) - jax.nn.softmax(q[at + k])).sum()
                want["draft_distance"] += w * distance
                kept = 1 - distance / 2
                c = np.float64(accepted[k])  # log sigmoid(c) = -log(1 + exp(-c))
                want["draft_confidence"] += w * (kept * np.logaddexp(0, -c) + (1 - kept) * np.logaddexp(0, c))
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_only_the_draft_blocks_learn(model, losses):
    _, grads = losses(model, put(np.array([[3, 8, -1], [0, 14, 7]])))
    for path, variable in nnx.to_flat_state(grads):
        assert np.asarray(variable.get_value()).any() == (path[0] == "mtp"), path


def test_no_anchor_at_all_is_no_loss(model, losses):
    (total, _), grads = losses(model, put(np.full((2, 3), -1)))
    assert total == 0
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def draft_steps(shape: tuple[int, int, int], steps: int):
    """Parameters before and after some steps of the draft stage on a mesh, and their metrics."""
    with jax.set_mesh(make_mesh(*shape)):
        mesh = dict(zip(("data", "expert", "context"), shape, strict=True))
        cfg = dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, **mesh))
        state = jax.jit(lambda: init_state(cfg))()
        before = jax.device_get(state.params)
        batch = dict(ids=IDS, segment_ids=SEGMENTS, targets=TARGETS, mtp_targets=np.full((2, S), -1))
        batch = {name: put(x.astype(np.int32)) for name, x in batch.items()}
        step, found = jax.jit(make_train_step(cfg)).lower(state, batch).compile(), []
        assert not loops(step.as_text()) or shape == (1, 1, 1)
        for _ in range(steps):
            state, metrics = step(state, batch)
            found.append(
                {name: float(metrics[name]) for name in ("train/draft_ce", "train/draft_distance", "grad_norm")}
            )
        return before, jax.device_get(state.params), found


def test_the_draft_stage_trains():
    """The backbone stays bit for bit; drafts come closer to the backbone."""
    before, after, found = draft_steps((1, 1, 1), 30)
    assert np.mean([m["train/draft_distance"] for m in found[-5:]]) < 0.9 * found[0]["train/draft_distance"]
    for (path, old), (_, new) in zip(nnx.to_flat_state(before), nnx.to_flat_state(after), strict=True):
        same = np.array_equal(old.get_value(), new.get_value())
        assert same == (path[0] != "mtp"), path


@pytest.mark.slow
def test_the_draft_stage_on_a_mesh():
    (_, _, found), (_, _, split) = draft_steps((1, 1, 1), 2), draft_steps((1, 2, 2), 2)
    for one, other in zip(found, split, strict=True):
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, rtol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("cheap_compilation")
def test_a_drafter_of_another_runs_model(tmp_path, monkeypatch, capsys):
    """A pre-training run leaves the draft blocks alone; a run that starts from it trains nothing else."""
    monkeypatch.setattr(programs, "make_eval_step", lambda cfg: lambda state, batch: {"text": (1.0, 1)})
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text("a b c d e f g h " * 4)
    data = DataConfig(path=str(tmp_path / "text"), seq_len=S, batch_size=2, held_out=0.3)
    one = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, vocab_size=257), data=data)
    train = TrainConfig(steps=1, run_dir=str(tmp_path / "one"), sample_tokens=0, eval_batches=1)
    one = dataclasses.replace(one, train=train)
    train = dataclasses.replace(train, objective="draft", init_from=train.run_dir, run_dir=str(tmp_path / "two"))
    two = dataclasses.replace(one, train=train)
    start = nnx.to_flat_state(nnx.state(jax.jit(lambda: DeepSeek(one.model, rngs=nnx.Rngs(0)))(), nnx.Param))
    said = io.StringIO()
    found = []
    for cfg in (one, two):
        run(cfg, Console(file=said, width=200))
        found.append(nnx.to_flat_state(nnx.state(load_model(cfg), nnx.Param)))
    for (path, a), (_, b), (_, c) in zip(start, *found, strict=True):
        moved = [not np.array_equal(x.get_value(), y.get_value()) for x, y in ((a, b), (b, c))]
        assert moved == ([False, True] if path[0] == "mtp" else [True, False]), path
    assert f"parameters  from {one.train.run_dir}" in said.getvalue()
    for command in (["report", train.run_dir], ["sample", train.run_dir, "a b", "--tokens", "4", "--draft"]):
        main(command)  # every command knows a run of this objective
    out, told = capsys.readouterr()
    assert "report.html" in out and "drafts accepted" in told and "bytes per token" in told


def test_proposals_follow_their_logits(model):
    out = jax.jit(lambda m: m.hidden(Inputs(put(IDS), put(SEGMENTS)), collect=["features"]))(model)
    anchors = Anchors(*(put(x) for x in ([[IDS[0, 3]], [IDS[1, 9]]], [[3], [9]], [[0], [0]])))
    made = jax.jit(lambda m: propose(m, m.draft(out, anchors), anchors))(model)
    np.testing.assert_array_equal(made.token_BAn, made.logits_BAnV.argmax(-1))
    assert made.confidence_BAn.shape == (2, 1, n)
