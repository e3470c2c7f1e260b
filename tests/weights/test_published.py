# SPDX-License-Identifier: Apache-2.0
"""Folders of published weights: what is written is read back, in every format, on any mesh."""

import dataclasses
import io
import json
import struct

import jax
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support import golden_weights
from support.golden_models import empty_model, small_config
from support.published import CONFIGS, copy, rewrite, same, stored_value

import dsv4_jax as ds
from dsv4_jax.mesh import make_mesh
from dsv4_jax.weights import export
from dsv4_jax.weights.convert import convert_folder
from dsv4_jax.weights.names import official_shapes
from dsv4_jax.weights.safetensors import INDEX, find_tensors, read_header


@pytest.mark.parametrize("storage", ["f32", "bf16", "fp8", "fp4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_is_loaded(models, folders, name, storage):
    model = models[name]
    loaded = ds.load_checkpoint(folders[name, storage], remat="none")
    want = {n: stored_value(n, x, storage, model.cfg) for n, x in ds.to_official(model).items()}
    same(ds.to_official(loaded), want)
    beside = "engram_token_map"
    assert dataclasses.replace(loaded.cfg, remat=model.cfg.remat, **{beside: model.cfg.engram_token_map}) == model.cfg


@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_values_do_not_change_again(folders, tmp_path, name):
    """Saved, loaded and saved: equal values. Bytes may differ, so a conversion copies what has its format already."""
    first = ds.load_checkpoint(folders[name, "fp4"])
    ds.save_checkpoint(first, tmp_path / "again", "fp4")
    same(ds.to_official(ds.load_checkpoint(tmp_path / "again")), ds.to_official(first))
    said = Console(file=io.StringIO())
    convert_folder(folders[name, "fp4"], tmp_path / "copied", "fp4", said)
    one, two = find_tensors(folders[name, "fp4"]), find_tensors(tmp_path / "copied")
    assert one.keys() == two.keys()
    for tensor in one:
        assert one[tensor].read().tobytes() == two[tensor].read().tobytes(), tensor


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 1), (8, 1, 1)], ids=str)
def test_any_mesh_gets_the_same_parameters(folders, shape):
    name = "v41" if shape == (2, 2, 2) else "v4"
    alone = ds.to_official(ds.load_checkpoint(folders[name, "fp4"]))
    mesh = jax.sharding.get_mesh()
    try:
        loaded = ds.load_checkpoint(folders[name, "fp4"], make_mesh(*shape))
        assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(loaded))
        same(ds.to_official(loaded), alone)
        same({n: export.Model(loaded).read(n, slice(0, len(x))) for n, x in alone.items() if x.ndim}, alone)
    finally:
        jax.set_mesh(mesh)


@pytest.mark.parametrize("name", CONFIGS)
def test_formats_as_they_are_published(folders, models, name):
    """The library reads the files; types and scales are those of the releases."""
    cfg, kinds = CONFIGS[name], {}
    for file in folders[name, "fp4"].glob("*.safetensors"):
        header = json.loads(file.read_bytes()[8 : 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]])
        kinds |= {n: (entry["dtype"], entry["shape"]) for n, entry in header.items() if n != "__metadata__"}
        with safetensors.safe_open(file, "np") as library:
            assert set(library.keys()) <= kinds.keys()
    shapes, block = official_shapes(models[name]), 32 if cfg.hc_single_pass else 128
    assert kinds["layers.0.ffn.experts.3.w2.weight"] == ("I8", [cfg.dim, cfg.moe_inter_dim // 2])
    assert kinds["layers.0.ffn.experts.3.w2.scale"] == ("F8_E8M0", [cfg.dim, -(-cfg.moe_inter_dim // 32)])
    rows, columns = shapes["layers.1.attn.wo_a.weight"]
    assert kinds["layers.1.attn.wo_a.weight"] == ("F8_E4M3", [rows, columns])
    assert kinds["layers.1.attn.wo_a.scale"] == ("F8_E8M0", [-(-rows // block), -(-columns // block)])
    assert kinds["layers.0.hc_attn_scale"][0] == kinds["layers.0.attn.attn_sink"][0] == "F32"
    assert kinds["embed.weight"][0] == kinds["layers.1.attn.compressor.wkv.weight"][0] == "BF16"
    if name == "v41":
        assert kinds["layers.1.engram.embed.weight"][0] == "F8_E4M3"
        assert kinds["layers.1.engram.embed.scale"][1] == [shapes["layers.1.engram.embed.weight"][0], 1]
        assert kinds["vision.blocks.0.attn.wo.weight"][0] == "BF16"
    else:
        assert kinds["layers.0.ffn.gate.tid2eid"][0] == "I64"


def test_four_bits_become_eight_without_error(folders, tmp_path):
    """Of any folder in 4 bits, and refused where 8 bits cannot hold a block."""
    for name in ("v4", "v41"):
        convert_folder(folders[name, "fp4"], tmp_path / name, "fp8", Console(file=io.StringIO()))
        assert not any(s.dtype == "I8" for s in find_tensors(tmp_path / name).values())
        same(*(ds.to_official(ds.load_checkpoint(f)) for f in (folders[name, "fp4"], tmp_path / name)))
    folder = copy(folders["v4", "fp4"], tmp_path)

    def change(name, stored):
        array = stored.read()
        if name == "layers.1.ffn.experts.2.w1.scale":
            array[3] = array[0] - 20
        return [(name, stored.dtype, array)]

    rewrite(folder, change)
    with pytest.raises(ds.ConfigError, match=r"layers\.1\.ffn\.experts\.2\.w1\.weight.*2\^14.*keep fp4"):
        convert_folder(folder, tmp_path / "refused", "fp8", Console(file=io.StringIO()))
    assert not (tmp_path / "refused" / INDEX).exists()


def test_one_file_needs_no_index(models, tmp_path):
    ds.save_checkpoint(models["v4"], tmp_path / "one", "f32")
    (tmp_path / "one" / INDEX).unlink()
    same(ds.to_official(ds.load_checkpoint(tmp_path / "one")), ds.to_official(models["v4"]))


@pytest.mark.parametrize("name", ["v4_flash_tiny", "v4_pro_tiny", "v41_tiny"])
def test_golden_models_in_bf16_come_back_bit_by_bit(tmp_path, name):
    """Saved, loaded and saved: numbers of bf16 stay, and so do the files."""
    spec, fields, _ = golden_weights.read(name)
    tensors = golden_weights.weights(spec)
    cfg = ds.model_config_from_official(fields)
    half = {n: x if n.endswith("tid2eid") else stored_value(n, x, "bf16", cfg) for n, x in tensors.items()}
    model = empty_model(cfg)
    ds.load_official(model, half)
    ds.save_checkpoint(model, tmp_path / "one")
    loaded = ds.load_checkpoint(tmp_path / "one")
    same(ds.to_official(loaded), ds.to_official(model))
    ds.save_checkpoint(loaded, tmp_path / "two")
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / side).glob("*.safetensors*")} for side in ("one", "two"))
    assert one == two and len(one) > 1


@given(
    dim=st.integers(1, 40).map(lambda n: 4 * n),
    inter=st.integers(1, 70),
    lora=st.integers(1, 40),
    storage=st.sampled_from(["bf16", "fp8", "fp4", "hf"]),
    file_bytes=st.sampled_from([1, 3_000, 1 << 30]),
)
def test_any_size_is_read_back(tmp_path_factory, dim, inter, lora, storage, file_bytes):
    cfg = small_config(
        dim=dim, moe_inter_dim=inter, q_lora_rank=lora, vocab_size=30, n_mtp_layers=0, compress_ratios=(4,)
    )
    model = empty_model(cfg)
    rng = np.random.default_rng(dim)
    tensors = {n: rng.standard_normal(s).astype(np.float32) for n, s in official_shapes(model).items()}
    ds.load_official(model, tensors)
    folder = tmp_path_factory.mktemp("any") / "out"
    ds.save_checkpoint(model, folder, storage, file_bytes)
    want = {n: stored_value(n, x, storage, cfg) for n, x in tensors.items()}
    same(ds.to_official(ds.load_checkpoint(folder)), want)
    assert all(len(read_header(f)) == 1 for f in folder.glob("*.safetensors")) or file_bytes > 1
