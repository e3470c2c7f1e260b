# SPDX-License-Identifier: Apache-2.0
"""What a rollback and a change of mesh cost: room for one state, nothing compiled again, a checkpoint to go back to."""

import dataclasses
import gc

import jax
import pytest
from orbax.checkpoint import v1 as ocp
from support.runs import small, train
from test_stages import SPIKES, poisoned, spiky, staged  # noqa: F401

from dsv4_jax.config import AnticipationConfig, MeshConfig, RoutingConfig
from dsv4_jax.mesh import make_mesh
from dsv4_jax.section import ConfigError


@pytest.fixture
def at_reading(monkeypatch):
    """Bytes of the arrays that are live when a checkpoint is about to be read, and of the state."""
    load, found = ocp.load, []
    gc.collect()
    others = jax.live_arrays()  # held, so that no new array takes the identity of one that is gone
    before = {id(x) for x in others}

    def measured(path, wanted, **options):
        live = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
        found.append((live, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(wanted) if hasattr(x, "size"))))
        return load(path, wanted, **options)

    monkeypatch.setattr(ocp, "load", measured)
    return found


@pytest.mark.slow
def test_a_rollback_holds_one_state_and_compiles_nothing_again(corpus, tmp_path, poisoned, at_reading):  # noqa: F811
    poisoned(7)
    said = train(spiky(corpus, tmp_path, skip=-1))
    [(live, state)] = at_reading
    assert state > 100_000 and live < 0.2 * state, (live, state)
    # The step once with experts chosen ahead and once without; the rest once.
    assert [said.count(f"compiled    {name} ") for name in ("step", "evaluation", "routing")] == [2, 1, 1]


@pytest.mark.slow
def test_a_change_of_mesh_holds_one_state(corpus, tmp_path, at_reading):
    cfg = small(corpus, tmp_path)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=8), mesh=MeshConfig(data=8))
    change = {"mesh.data": 1, "mesh.expert": 2, "mesh.context": 4}
    with jax.set_mesh(make_mesh(8)):
        train(staged(cfg, ("a", 3 * 512, {}), ("b", 6 * 512, change)))
    [(live, state)] = at_reading
    assert live < 0.2 * state, (live, state)


@pytest.mark.parametrize(
    "keep, keep_every, margin, steps, ok",
    [(2, 0, 3, 1, True), (2, 0, 4, 1, False), (2, 0, 3, 2, False), (3, 0, 6, 1, True), (1, 0, 0, 1, True),
     (1, 0, 0, 2, False), (1, 3, 99, 1, True)],
)  # fmt: skip
def test_a_margin_that_no_checkpoint_reaches_is_refused(tmp_path, keep, keep_every, margin, steps, ok):
    """Steps 3, 6, 9 ... are saved."""
    cfg = small("text", tmp_path, keep=keep, keep_every=keep_every)
    cfg = dataclasses.replace(cfg, spikes=dataclasses.replace(SPIKES, margin=margin, steps=steps))
    auto = RoutingConfig(anticipation=AnticipationConfig(mode="auto"))
    if ok:
        dataclasses.replace(cfg, routing=auto)
    else:
        with pytest.raises(ConfigError, match=r"spikes\.margin = .*lower spikes\.margin or raise train\.keep"):
            dataclasses.replace(cfg, routing=auto)
