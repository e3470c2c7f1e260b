# SPDX-License-Identifier: Apache-2.0
"""What a run will need: the published sizes without an array, and the step compiled for TPUs that are not there."""

import dataclasses
import importlib.util
import math
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.golden_models import small_config
from support.hlo import collectives

import dsv4_jax as ds
from dsv4_jax.cli import main
from dsv4_jax.config import Config, MeshConfig, TrainConfig
from dsv4_jax.mesh import RULES, make_mesh, param_spec
from dsv4_jax.model.counts import operations_per_token
from dsv4_jax.ops import attention
from dsv4_jax.plan import compile_for, compile_step, count_operations, explain_paths, slice_devices
from dsv4_jax.section import ConfigError
from dsv4_jax.train.describe import describe_placement

HAS_COMPILER = importlib.util.find_spec("libtpu") is not None
TINY = str(ROOT / "configs" / "tiny_v4.py")


@pytest.mark.parametrize(
    "name, total, matrices, devices",
    [
        ("v4_flash", 290_942_289_362, 1.4e10, 512),
        pytest.param("v4_pro", 1_598_837_347_742, 4.9e10, 1536, marks=pytest.mark.slow),
    ],
)
def test_published_sizes(name, total, matrices, devices):
    """Operations and bytes of the real models on hundreds of devices that need not exist."""
    command = [sys.executable, "-m", "dsv4_jax", "plan", str(ROOT / "configs" / f"{name}.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    numbers = lambda line: [float(n.replace(",", "")) for n in re.findall(r"\d[\d,.]*\d(?:e\+\d+)?", line)]
    said = {
        word: numbers(line)
        for line in lines
        for word in ("parameters ", "operations", "bytes per device:", "batch ", "activations")
        if line.startswith(word)
    }
    assert said["parameters "][0] == pytest.approx(total, rel=1e-6)
    assert said["operations"][0] / 6 == pytest.approx(matrices, rel=0.1) and said["operations"][1] > 1e9
    held, gradients, optimizer = said["bytes per device:"]
    assert 4 * total / devices <= held < 1.6 * 4 * total / devices and held < optimizer < 1.1 * held
    assert 0.99 * held < gradients < held  # the indexer rests in the first stage
    given, rows = said["batch "]
    assert given * devices == 4 * 4 * rows * 4096  # ids, segments and targets of two kinds
    assert 2e10 < said["activations"][0] < 2e11


@given(
    st.lists(st.tuples(st.sampled_from([*RULES, "lora"]), st.integers(1, 24)), max_size=4),
    st.sampled_from([(1, 1, 1), (2, 2, 2), (1, 1, 8), (3, 1, 2), (2, 1, 3), (1, 4, 2)]),
)
def test_a_parameter_is_split_wherever_a_free_mesh_axis_divides_it(axes, mesh):
    with jax.set_mesh(make_mesh(*mesh)):
        spec = param_spec(tuple(name for name, _ in axes), tuple(size for _, size in axes))
    count = dict(zip(("data", "expert", "context"), mesh, strict=True))
    split = [(s,) if isinstance(s, str) else s or () for s in spec]
    used = [name for names in split for name in names]
    assert len(used) == len(set(used))
    for (axis, size), names in zip(axes, split, strict=True):
        assert names == RULES.get(axis, ())[: len(names)]
        assert size % math.prod(count[name] for name in names) == 0
        rule = RULES.get(axis, ())
        if rule and not names:
            assert rule[0] in used or size % count[rule[0]]


def test_what_is_not_split_is_named():
    """A table whose vocabulary no axis divides is split by its width; a parameter with neither is named."""
    model = small_config(n_heads=6, o_groups=2, vocab_size=63)
    cfg = Config(model=model, train=TrainConfig(steps=200), mesh=MeshConfig(data=2, expert=2, context=2))
    with jax.set_mesh(make_mesh(2, 2, 2)):
        lines = describe_placement(cfg)
    table = [line.split() for line in lines if line.startswith("63 x 16 ")]
    assert [row[3:6] for row in table] == [["-,", "('data',", "'context')"]]
    (named,) = [line for line in lines if line.startswith("not fully split")]
    assert named == "not fully split: attn_sink (heads = 6 is not a multiple of mesh.data x mesh.context = 4)"
    assert lines[-1].startswith("bytes per device: parameters ")


def test_collectives_are_read_from_the_text():
    text = """
  %a = f32[2,40,16]{2,1,0} all-gather(%x), replica_groups={{0,1}}
  %b = (bf16[8,4]{1,0}, f32[3]{0}) all-to-all(%y, %z)
  %c = f32[] all-reduce-start(%w)
  %d = f32[5]{0} add(%p, %q)
"""
    assert collectives(text) == [("all-gather", 5120, (2, 40, 16)), ("all-to-all", 76, (8, 4)), ("all-reduce", 4, ())]


def test_slices_that_do_not_fit_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--topology", "v5e:2x2" if HAS_COMPILER else "nowhere", TINY])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert ("has 4 devices" if HAS_COMPILER else "pip install 'dsv4_jax[tpu]'") in said


def test_operations_of_a_step_grow_by_what_is_computed_again():
    cfg = ds.load_config(TINY, ["--mesh.data", "2", "--data.batch-size", "4"])
    matrices, attention = operations_per_token(cfg.model, cfg.data.seq_len)
    tokens = 2 * cfg.data.seq_len
    for remat, again in (("none", 0), ("save_block_outputs", attention / 3), ("full", (matrices + attention) / 3)):
        again_too = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, remat=remat))
        model, computed = count_operations(again_too)
        assert model == pytest.approx(tokens * (matrices + attention))
        assert computed == pytest.approx(model + tokens * again)


def test_a_step_that_does_not_fit_is_refused_with_what_it_needs(monkeypatch):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM, 132.16G exceeds 95.74G.")

    monkeypatch.setattr("dsv4_jax.plan.make_train_step", lambda *_: lambda state, batch: state)
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    run = Config(model=small_config(), train=TrainConfig(steps=200))
    with pytest.raises(ConfigError, match=r"1 x cpu: .*132\.16G.*model\.remat = 'full'"):
        compile_step(run, run.resolved_stages[0], np.array(jax.devices()[:1]).reshape(1, 1, 1))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs libtpu, the TPU compiler")
@pytest.mark.parametrize(
    "mesh, exchange", [((2, 2, 2), "gather"), ((1, 1, 8), "auto"), ((1, 8, 1), "ragged"), ((8, 1, 1), "auto")]
)
def test_the_tiny_step_compiles_for_tpu_on_every_axis(mesh, exchange):
    names = [f"--mesh.{axis}={size}" for axis, size in zip(("data", "expert", "context"), mesh, strict=True)]
    rest = ["--data.batch-size", "8", "--model.n-routed-experts", "16", "--model.expert-exchange", exchange]
    cfg = ds.load_config(TINY, names + rest)
    lines = compile_for(cfg, cfg.resolved_stages[0], slice_devices("v5e:2x4", cfg.mesh))
    assert "8 x TPU" in lines[0] and any(line.startswith("memory") for line in lines)
    assert any("ragged-all-to-all" in line for line in lines) == (exchange == "ragged")
    assert lines[1].startswith("experts     grouped product pallas (auto): ")


def test_the_plan_names_the_paths_of_attention_and_indexer():
    """Without a device: rows of 64K gather their entries and sort blocks, rows of 4K have a mask and no choice."""
    run = ds.load_config(ROOT / "configs" / "v4_flash.py")
    stages = {stage.declared.name: stage.cfg for stage in run.resolved_stages}
    lines = {name: explain_paths(cfg) for name, cfg in stages.items()}
    assert lines["4K"][0].startswith("experts     grouped product ")
    assert not any("indexer" in line for line in lines["4K"])  # attention is dense
    (csa,) = (line for line in lines["64K"] if line.startswith("attention   csa/4: "))
    assert "512 of 16,384 entries for each query, gathered (auto)" in csa
    (hca,) = (line for line in lines["64K"] if line.startswith("attention   hca/128: "))
    assert "all 512 entries under a mask" in hca
    (index,) = (line for line in lines["64K"] if line.startswith("indexer     csa/4: "))
    assert "16,384 scores of a query in tiles of " in index and "whole rows" in index
    assert any("262,144 scores" in line and "blocks of the largest maxima" in line for line in lines["1M"])
    assert any("no selection" in line for line in lines["warm-up of the indexer"])


def test_a_selection_takes_the_path_that_is_named():
    for M, k, select in ((1024, 512, "auto"), (4096, 512, "auto"), (4096, 512, "masked"), (600, 512, "gathered")):
        assert ("gathered" in attention.explain_choice(M, k, select)) == attention.gathers(M, k, select)
    assert not attention.gathers(512, 512, "gathered") and not attention.gathers(512, 0, "gathered")
