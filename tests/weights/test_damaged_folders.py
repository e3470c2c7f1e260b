# SPDX-License-Identifier: Apache-2.0
"""No damaged or unfinished folder is read, and a conversion that stopped goes on."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console
from support.published import copy, kept, rewrite, same

import dsv4_jax as ds
from dsv4_jax import cli
from dsv4_jax.weights import export
from dsv4_jax.weights import safetensors as safetensors_files
from dsv4_jax.weights.convert import convert_folder
from dsv4_jax.weights.folder import Folder
from dsv4_jax.weights.safetensors import INDEX, find_tensors


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
