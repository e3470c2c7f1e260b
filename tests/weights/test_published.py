# SPDX-License-Identifier: Apache-2.0
"""Folders of published weights: what is written is read back, in every format, and no damaged folder is read."""

import dataclasses
import io
import json
import re
import shutil
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support import golden_weights
from support.golden_models import empty_model, ruled_model, small_config

import dsv4_jax as ds
from dsv4_jax import cli
from dsv4_jax.mesh import make_mesh
from dsv4_jax.ops import quantize as q
from dsv4_jax.weights import export
from dsv4_jax.weights import safetensors as safetensors_files
from dsv4_jax.weights.convert import convert_folder
from dsv4_jax.weights.dialects import FUSED, hf_name, official_name
from dsv4_jax.weights.folder import Folder
from dsv4_jax.weights.names import official_shapes
from dsv4_jax.weights.safetensors import INDEX, find_tensors, read_header

# Sizes that no block divides.
ODD = dict(dim=36, moe_inter_dim=20, q_lora_rank=10, n_layers=3, compress_ratios=(0, 4, 8, 0), n_hash_layers=1)
V41 = dict(
    n_layers=4,
    compress_ratios=(0, 2, 2, 1, 0, 0),
    kv_source_layers=(1, 3),
    index_source_layers=(1, 3),
    candidate_source_layer=3,
    n_mtp_layers=2,
    dspark_target_layer_ids=(2, 3),
    dspark_n_routed_experts=3,
    dspark_n_activated_experts=2,
    dspark_noise_token_id=5,
    dspark_markov_rank=6,
    engram_layer_ids=(1,),
    engram_vocab_size=60,
    engram_n_heads=2,
    engram_head_dim=8,
    hc_single_pass=True,
    query_norm=False,
    modality_bias=True,
    vision_n_layers=2,
    vision_dim=16,
    vision_n_heads=2,
    vision_inter_dim=12,
    image_token_id=7,
)
DSPARK = ODD | {key: V41[key] for key in ("dspark_target_layer_ids", "dspark_noise_token_id", "dspark_markov_rank")}
DSPARK |= dict(n_layers=4, n_mtp_layers=3, compress_ratios=(0, 4, 8, 0, 0, 0, 0))
DSPARK |= dict(dspark_n_routed_experts=4, dspark_n_activated_experts=2)
CONFIGS = {"v4": small_config(**ODD), "v41": small_config(**V41), "dspark": small_config(**DSPARK)}


@pytest.fixture(scope="module")
def models():
    return {name: ruled_model(cfg) for name, cfg in CONFIGS.items()}


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """A folder of each model in each format, in small files."""
    root, made = tmp_path_factory.mktemp("weights"), {}
    for name, model in models.items():
        for storage in ("f32", "bf16", "fp8", "fp4"):
            made[name, storage] = root / f"{name}-{storage}"
            ds.save_checkpoint(model, made[name, storage], storage, file_bytes=20_000)
    return made


def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name, strict=True)


def stored_value(name, x, storage, cfg):
    """What a folder of the format holds of a tensor."""
    form = export.storage_of(name, x.shape, storage, cfg.hc_single_pass)
    if isinstance(form, str):
        return x.astype(ml_dtypes.bfloat16).astype(np.float32) if form == "BF16" else x
    return q.dequantize(*q.quantize(x, form), form, x.shape[-1])


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


def test_both_configuration_files_describe_the_model(folders):
    for (name, _), folder in folders.items():
        for file in (folder / "config.json", folder / "inference" / "config.json"):
            cfg = ds.model_config_from_official(json.loads(file.read_text()))
            assert dataclasses.replace(cfg, engram_token_map=CONFIGS[name].engram_token_map) == CONFIGS[name], file
    nested = json.loads((folders["v41", "fp4"] / "config.json").read_text())
    assert nested["text_config"]["hidden_size"] == 16 and nested["vision_config"]["hidden_size"] == 16
    assert nested["quantization_config"]["weight_block_size"] == [32, 32] and nested["expert_dtype"] == "fp4"


def test_configurations_that_differ_or_are_absent(folders, tmp_path):
    folder = copy(folders["v4", "bf16"], tmp_path)
    file = folder / "inference" / "config.json"
    file.write_text(file.read_text().replace('"window_size": 2', '"window_size": 3'))
    with pytest.raises(ds.ConfigError, match="differ in window_size: 2 and 3"):
        ds.load_checkpoint(folder)
    file.write_text(file.read_text().replace("window_size", "windw_size"))
    with pytest.raises(ds.ConfigError, match=r"inference/config\.json: .*windw_size.*window_size"):
        ds.load_checkpoint(folder)
    shutil.rmtree(folder / "inference")
    (folder / "config.json").unlink()
    with pytest.raises(ds.ConfigError, match=r"neither config\.json nor"):
        ds.load_checkpoint(folder)


# The configuration file of transformers' own `save_pretrained`, in its spelling.
SAVED = dict(
    model_type="deepseek_v4",
    hidden_size=36,
    head_dim=8,
    num_hidden_layers=3,
    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    mlp_layer_types=["hash_moe", "moe", "moe"],
    partial_rotary_factor=0.5,
    rope_parameters={
        "main": {"rope_type": "default"},
        "compress": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
    },
    num_nextn_predict_layers=1,
)


def test_the_configuration_that_transformers_saves():
    own = {field.name: getattr(CONFIGS["v4"], field.name) for field in dataclasses.fields(ds.ModelConfig)}
    same_names = """vocab_size q_lora_rank o_groups o_lora_rank n_routed_experts index_n_heads index_head_dim index_topk
    head_dim""".split()
    fields = {key: own[key] for key in same_names} | dict(
        num_attention_heads=2, moe_intermediate_size=20, num_experts_per_tok=2, sliding_window=2
    )
    cfg = ds.model_config_from_official(SAVED | fields)
    assert cfg == dataclasses.replace(CONFIGS["v4"], n_mtp_layers=0, compress_ratios=(0, 4, 8))
    with pytest.raises(ds.ConfigError, match="tie_word_embeddings"):
        ds.model_config_from_official(SAVED | fields | {"tie_word_embeddings": True})
    with pytest.raises(ds.ConfigError, match="hidden_sizes"):
        ds.model_config_from_official(SAVED | fields | {"hidden_sizes": 1})


def rewrite(folder, change):
    """Write the tensors of a folder again, as `change` maps (name, stored) to a list of (name, dtype, array)."""
    from dsv4_jax.weights.safetensors import DTYPES, Output, write_folder

    outputs = []
    for name, stored in find_tensors(folder).items():
        for new, dtype, array in change(name, stored):
            array = np.ascontiguousarray(array)
            assert DTYPES[dtype] == array.dtype, (new, dtype, array.dtype)
            outputs.append(Output(new, dtype, array.shape, lambda array=array: [array]))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_folder(folder, outputs, 1 << 30, lambda _: None)
    return folder


def kept(name, stored):
    return [(name, stored.dtype, stored.read())]


def test_base_weights_have_scales_in_fp32(models, folders, tmp_path):
    """The format follows from the tensors: also if the configuration speaks of 4 bits."""
    form = q.Format(8, 128, 128, "f32")

    def change(name, stored):
        if export.storage_of(name, stored.shape, "fp8", False) != q.FP8_128:
            return kept(name, stored)
        numbers, scale = q.quantize(stored.read(), form)
        return [(name, "F8_E4M3", numbers), (re.sub("weight$", "weight_scale_inv", name), "F32", scale)]

    folder = rewrite(copy(folders["v4", "f32"], tmp_path), change)
    file = folder / "inference" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"expert_dtype": "fp4"}))
    want = {}
    for name, x in ds.to_official(models["v4"]).items():
        eight = export.storage_of(name, x.shape, "fp8", False) == q.FP8_128
        want[name] = q.dequantize(*q.quantize(x, form), form, x.shape[-1]) if eight else x
    same(ds.to_official(ds.load_checkpoint(folder)), want)


def test_the_draft_blocks_of_v4(folders, tmp_path):
    """Three blocks under `mtp`, though the configuration counts one; the Markov head has names of its own."""
    new = {"markov_head.embed.weight": "markov_w1.weight", "markov_head.head.weight": "markov_w2.weight"}

    def change(name, stored):
        for old, markov in new.items():
            name = name.replace(old, markov)
        return kept(name, stored)

    folder = rewrite(copy(folders["dspark", "bf16"], tmp_path), change)
    assert "mtp.2.markov_w1.weight" in find_tensors(folder)
    for file in (folder / "config.json", folder / "inference" / "config.json"):
        fields = json.loads(file.read_text())
        for key in ("dspark_n_routed_experts", "dspark_num_experts_per_tok", "dspark_n_activated_experts"):
            fields.pop(key, None)
        fields["num_nextn_predict_layers" if "hidden_size" in fields else "n_mtp_layers"] = 1
        file.write_text(json.dumps(fields))
    loaded = ds.load_checkpoint(folder)
    assert loaded.cfg == CONFIGS["dspark"]
    same(ds.to_official(loaded), ds.to_official(ds.load_checkpoint(folders["dspark", "bf16"])))


@pytest.mark.parametrize("dialect", ["modules", "saved"])
def test_dialects_of_transformers(models, folders, tmp_path, dialect):
    want = ds.to_official(ds.load_checkpoint(folders["v4", "bf16"]))
    if dialect == "modules":
        ds.save_checkpoint(models["v4"], tmp_path / "copy", "hf")
        names = set(find_tensors(tmp_path / "copy"))
        assert "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight" in names
        assert "model.layers.2.mlp.experts.gate_up_proj" in names and "lm_head.weight" in names
        assert "model.layers.1.self_attn.kv_norm.weight" in names
        assert "model.layers.1.self_attn.compressor.kv_norm.weight" in names
    else:

        def change(name, stored):
            name = re.sub("^hc_head_", "hc_head.hc_", re.sub("^embed.weight", "embed_tokens.weight", name))
            return kept("model." + name.replace("attn.kv_norm.", "attn.norm."), stored)

        rewrite(copy(folders["v4", "bf16"], tmp_path), change)
    same(ds.to_official(ds.load_checkpoint(tmp_path / "copy")), want)


def test_names_lead_back(models):
    names = [name for key in ("v4", "dspark") for name in official_shapes(models[key])]
    for name in names:
        assert official_name(name) == name
        if ".ffn.experts." not in name:
            assert official_name(hf_name(name)) == name
    assert len({hf_name(name) for name in names}) == len(set(names))
    assert official_name(hf_name("layers.3.ffn.experts.gate_up_proj")) == "layers.3.ffn.experts.gate_up_proj"
    assert set(FUSED) == {"gate_up_proj", "down_proj"}
    for name in official_shapes(models["v41"]):
        assert official_name(name) == name


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


def drop(wanted):
    return lambda name, stored: [] if name == wanted else kept(name, stored)


def replace(wanted, make):
    return lambda name, stored: make(name, stored) if name == wanted else kept(name, stored)


W1, SCALE = "layers.0.ffn.experts.1.w1.weight", "layers.0.ffn.experts.1.w1.scale"
BAD = {
    rf"missing: {re.escape(W1)} \[20, 36\]": lambda n, s: [] if n in (W1, SCALE) else kept(n, s),
    rf"{re.escape(W1)} is I8 \[20, 18\] and has no scale": drop(SCALE),
    rf"{re.escape(SCALE)} has no weight of its own": drop(W1),
    r"embed\.weights?: unexpected": replace("embed.weight", lambda n, s: kept(n, s) + kept("embed.weights", s)),
    r"norm\.weight: expected \[36\], found \[35\]": replace("norm.weight", lambda n, s: [(n, "BF16", s.read()[1:])]),
    rf"scale of {re.escape(W1)} .*no number|scales of {re.escape(W1)} .*no number": replace(
        SCALE, lambda n, s: [(n, "F8_E8M0", np.full(s.shape, 255, np.uint8))]
    ),
    rf"{re.escape(W1)}: I8 .*scales F8_E8M0 \[20, 1\].*no known format": replace(
        SCALE, lambda n, s: [(n, "F8_E8M0", s.read()[:, :1])]
    ),
    "same tensor as": replace("embed.weight", lambda n, s: kept(n, s) + kept("model.embed_tokens.weight", s)),
    "distinct expert ids": replace("layers.0.ffn.gate.tid2eid", lambda n, s: [(n, "I64", 0 * s.read())]),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_tensors_are_named(folders, tmp_path, message):
    folder = rewrite(copy(folders["v4", "fp4"], tmp_path), BAD[message])
    with pytest.raises(ds.ConfigError, match=message):
        ds.load_checkpoint(folder)
    if "distinct" not in message:
        with pytest.raises(ds.ConfigError, match=message):
            convert_folder(folder, tmp_path / "out", "bf16", Console(file=io.StringIO()))
        assert not (tmp_path / "out").exists()


def break_file(folder, how):
    file = sorted(folder.glob("*.safetensors"))[1]
    data, index = bytearray(file.read_bytes()), json.loads((folder / INDEX).read_text())
    if how == "truncated":
        data = data[:-1]
    elif how == "longer":
        data += b"0"
    elif how == "length":
        data[5] ^= 1
    elif how == "json":
        data[12] ^= 0xFF
    elif how == "header":
        data = data[:4]
    elif how == "twice":
        names = [n for n, f in index["weight_map"].items() if f == file.name]
        text = bytes(data)
        assert len(names[0]) and text.count(names[1].encode()) == 1
        length = int.from_bytes(text[:8], "little")
        head = text[8 : 8 + length].replace(f'"{names[1]}"'.encode(), f'"{names[0]}"'.encode())
        head += b" " * (length - len(head))
        data = text[:8] + head[:length] + text[8 + length :]
    file.write_bytes(bytes(data))
    return file


@pytest.mark.parametrize("how", ["truncated", "longer", "length", "json", "header", "twice"])
def test_damaged_files_are_named(folders, tmp_path, how):
    file = break_file(copy(folders["v4", "f32"], tmp_path), how)
    with pytest.raises(ds.ConfigError, match=re.escape(file.name)):
        ds.load_checkpoint(tmp_path / "copy")


def test_index_and_files_that_disagree(folders, tmp_path):
    folder = copy(folders["v4", "bf16"], tmp_path)
    whole = json.loads((folder / INDEX).read_text())
    names = list(whole["weight_map"])

    def refuse(match, **changes):
        (folder / INDEX).write_text(json.dumps({"weight_map": whole["weight_map"] | changes}))
        with pytest.raises(ds.ConfigError, match=match):
            Folder(folder)

    refuse(r"names 'gone\.safetensors', which is no file", more="gone.safetensors")
    refuse(r"names '\.\./x'", more="../x")
    refuse(f"has more in {whole['weight_map'][names[0]]}, which lacks it", more=whole["weight_map"][names[0]])
    other = next(f for f in whole["weight_map"].values() if f != whole["weight_map"][names[0]])
    refuse(f"{re.escape(names[0])} is in", **{names[0]: other})
    (folder / INDEX).write_text("{}")
    with pytest.raises(ds.ConfigError, match="damaged: KeyError"):
        Folder(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ds.ConfigError, match=r"has no model\.safetensors\.index\.json and"):
        Folder(folder)
    (folder / "model0-mp1.safetensors").touch()
    with pytest.raises(ds.ConfigError, match=r"official convert\.py"):
        Folder(folder)


def test_one_file_needs_no_index(models, tmp_path):
    ds.save_checkpoint(models["v4"], tmp_path / "one", "f32")
    (tmp_path / "one" / INDEX).unlink()
    same(ds.to_official(ds.load_checkpoint(tmp_path / "one")), ds.to_official(models["v4"]))


def test_an_interrupted_conversion_goes_on(folders, tmp_path, monkeypatch):
    """Stopped in every file in turn: no index, so no checkpoint; in the end equal to one that was never stopped."""
    source, target, said = folders["v4", "f32"], tmp_path / "out", Console(file=io.StringIO())
    files, real, opened = 4_000, export._plain, []

    def stopping(*args):
        opened.append(args[1])
        if len(opened) == stop:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(export, "_plain", stopping)
    stops = 0
    for stop in (2, 20, 40, 60, 10_000):
        opened.clear()
        if stop == 10_000:
            convert_folder(source, target, "bf16", said, files)
        else:
            with pytest.raises(KeyboardInterrupt):
                convert_folder(source, target, "bf16", said, files)
            stops += 1
            assert not (target / INDEX).exists()
            with pytest.raises(ds.ConfigError):
                ds.load_checkpoint(target)
            with pytest.raises(ds.ConfigError, match="unfinished folder of other weights"):
                convert_folder(source, target, "f32", said, files)
    assert stops == 4 and len(opened) < len(find_tensors(source))  # files that were there are not written again
    monkeypatch.undo()
    convert_folder(source, tmp_path / "straight", "bf16", said, files)
    contents = lambda folder: {f.relative_to(folder): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    assert contents(target) == contents(tmp_path / "straight")
    with pytest.raises(ds.ConfigError, match="is not empty"):
        convert_folder(source, target, "bf16", said, files)


def test_a_full_disk_or_read_only_folder_ends_the_run(models, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_folder", full)
    with pytest.raises(ds.RunError, match="No space left"):
        ds.save_checkpoint(models["v4"], tmp_path / "full")
    assert not (tmp_path / "full" / INDEX).exists()
    monkeypatch.undo()
    ds.save_checkpoint(models["v4"], tmp_path / "full")  # a model in memory is written from the start
    (tmp_path / "file").touch()
    with pytest.raises(ds.RunError, match="cannot be written"):
        ds.save_checkpoint(models["v4"], tmp_path / "file" / "inside")
    with pytest.raises(ds.ConfigError, match="format = 'fp5', expected f32, bf16"):
        ds.save_checkpoint(models["v4"], tmp_path / "other", "fp5")
    with pytest.raises(ds.ConfigError, match=r"transformers has no V4\.1"):
        ds.save_checkpoint(models["v41"], tmp_path / "other", "hf")


def test_a_disk_that_fills_up_in_the_middle(folders, tmp_path, monkeypatch, capsys):
    """Exit status 1 with the folder's name; what is there is no checkpoint, and the same command finishes it."""
    source, target, real = folders["v4", "fp4"], tmp_path / "out", safetensors_files.os.fsync
    flushed = []

    def full(file):
        flushed.append(file)
        if len(flushed) == 3:
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(safetensors_files.os, "fsync", full)
    monkeypatch.setattr(convert_folder, "__defaults__", (10_000,))
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(source), str(target), "--format", "f32"])
    assert ended.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"{target} cannot be written: [Errno 28] No space left on device" in said and "goes on" in said
    assert len(list(target.glob("*.safetensors"))) == 2 and not (target / INDEX).exists()
    with pytest.raises(ds.ConfigError, match=re.escape(str(target))):
        ds.load_checkpoint(target)
    monkeypatch.setattr(safetensors_files.os, "fsync", real)
    cli.main(["convert", str(source), str(target), "--format", "f32"])
    assert not list(target.glob("*.part"))
    same(*(ds.to_official(ds.load_checkpoint(folder)) for folder in (source, target)))


def test_a_conversion_takes_no_mesh(folders, tmp_path, capsys):
    """It holds a piece of a tensor at a time, in one process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(folders["v4", "f32"]), str(tmp_path / "out"), "--mesh.data", "8"])
    assert ended.value.code == 2 and "unrecognized arguments: --mesh.data 8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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
