# SPDX-License-Identifier: Apache-2.0
"""Formats of text are declared by names: compressed ones are read, unknown ones refused, descriptions left out."""

import dataclasses
import gzip
import io
import json
import os
import shutil
import threading
import time

import pyarrow
import pytest
from rich.console import Console
from support import runs

import dsv4_jax as ds
from dsv4_jax.config import DataConfig
from dsv4_jax.data import prepare, records
from dsv4_jax.data.prepare import write_shards
from dsv4_jax.data.sources import open_source, prepared_folder
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.data.vision_layout import VisionLayout

TEXTS = ["one", "zwei äöü", "three\nlines\n"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
LIST = json.dumps([{"text": text} for text in TEXTS], indent=1).encode()


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstd, ".GZ": gzip.compress}
SOURCES = {"a.jsonl": LINES, "a.ndjson": LINES, "a.json": LINES, "b.json": b"\n " + LIST}


@pytest.mark.parametrize("pack", PACKED)
@pytest.mark.parametrize("name", SOURCES)
def test_json_is_read_as_records(tmp_path, name, pack):
    (tmp_path / (name + pack)).write_bytes(PACKED[pack](SOURCES[name]))
    assert [record.text for record in records.records(str(tmp_path), "text")] == TEXTS


@pytest.mark.parametrize("pack", PACKED)
def test_text_is_read_whole_or_cut_at_lines(tmp_path, pack):
    whole = "".join(f"line {i}\n" for i in range(9000))
    (tmp_path / f"a.txt{pack}").write_bytes(PACKED[pack](whole.encode()))
    parts = [str(record.text) for record in records.records(str(tmp_path), "text")]
    assert "".join(parts) == whole and len(parts) > 3
    (tmp_path / "b").write_text("no suffix")
    assert [record.text for record in records.records(str(tmp_path), "text")] == [whole, "no suffix"]


@pytest.mark.parametrize("name", ["a.docx", "a.txt.xz", "a.parquet.gz", "a.png", "a.arrow", "a.tar.gz"])
def test_what_is_no_text_by_its_name_is_refused(tmp_path, name):
    """Also with `data.on_error = "skip"`, which is for records."""
    (tmp_path / name).write_bytes(b"text all the same")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ds.ConfigError, match=rf"{name} is no text by its name.*\.jsonl.*\.parquet.*\.txt"):
        open_source(str(tmp_path), DataConfig(on_error="skip"), Bytes())


def test_what_describes_a_folder_of_records_is_left_out(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("README.md", "LICENSE", "dataset_info.json", "state.json", "data/readme.txt"):
        (tmp_path / name).write_text("{}")
    texts = lambda: [record.text for record in records.records(str(tmp_path), "text")]
    (tmp_path / "LICENSE").write_text("alone, these are text and a record without the field")
    (tmp_path / "data" / "train.jsonl.gz").write_bytes(gzip.compress(LINES))
    assert texts() == TEXTS
    (tmp_path / "data" / "train.jsonl.gz").rename(tmp_path / "README.jsonl.gz")
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / name).unlink()
    assert len(texts()) == 6  # a name on the list is content where nothing else is


def test_tokens_made_ahead_are_found_wherever_the_source_lies(tmp_path, monkeypatch):
    """By another spelling and after a copy with other times; a change of content makes others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number}\n" * 100_000)
    cfg = DataConfig(prepared="prepared")
    folder = prepared_folder("text", cfg, Bytes())
    write_shards("text", cfg, Bytes(), folder, 1, Console(file=io.StringIO()))
    shutil.copytree("text", "disk/copy", copy_function=shutil.copyfile)
    os.utime("disk/copy/0.txt", (1, 1))
    for path in ("text/", "./text", str(tmp_path / "text"), f"../{tmp_path.name}/text", "disk/copy", "text/*.txt"):
        assert prepared_folder(path, cfg, Bytes()) == folder
        assert type(open_source(path, cfg, Bytes())).__name__ == "TokenShards"
    changed = tmp_path / "disk" / "copy" / "2.txt"
    changed.write_text("3" + changed.read_text()[1:])
    assert prepared_folder("disk/copy", cfg, Bytes()) != folder
    assert prepared_folder("text", dataclasses.replace(cfg, on_error="skip"), Bytes()) != folder


def test_commands_that_prepare_one_source_at_a_time_share_the_result(tmp_path, monkeypatch):
    """Two `data` commands: the second waits for the first, then finds its folder."""
    (tmp_path / "text.txt").write_text("a document\n" * 1000)
    cfg = runs.small(str(tmp_path / "text.txt"), tmp_path / "run")
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, prepared=str(tmp_path / "prepared")))
    started, made, write = threading.Event(), [], prepare.write_shards

    def slow(*args):
        started.set()
        time.sleep(0.3)  # the second command reaches the lock in this time
        made.append(write(*args))

    monkeypatch.setattr(prepare, "write_shards", slow)
    output = [io.StringIO(), io.StringIO()]
    commands = [threading.Thread(target=prepare.run, args=(cfg, Console(file=file, width=1000))) for file in output]
    commands[0].start()
    assert started.wait(30)
    commands[1].start()
    for command in commands:
        command.join()
    assert len(made) == 1
    assert "wrote" in output[0].getvalue() and "is there already" in output[1].getvalue()


def test_shards_made_without_vision_have_no_id_of_images(tmp_path):
    (tmp_path / "text.txt").write_text("a document\n" * 1000)
    cfg, folder = DataConfig(path=str(tmp_path / "text.txt")), tmp_path / "shards"
    write_shards(cfg.path, cfg, Bytes(), folder, 1, Console(file=io.StringIO()))
    vision = VisionLayout(**dict.fromkeys(VisionLayout._fields, 1))
    with pytest.raises(ds.ConfigError, match=r"without vision.*image_token_id = 97.*run the data command again"):
        open_source(str(folder), cfg, Bytes(), vision._replace(image_token_id=97))
    assert open_source(str(folder), cfg, Bytes(), vision._replace(image_token_id=Bytes().size)).spans is None


def test_what_is_truncated_or_lacks_a_library_is_named(tmp_path, monkeypatch):
    for name, data in (("a.txt.gz", gzip.compress(LINES)[:-9]), ("b.json.zst", zstd(LINES)[:9]), ("c.json", b"[1")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ds.ConfigError, match=f"{name}.*cannot be read"):
            list(records.records(str(tmp_path / name), "text"))
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ds.ConfigError, match=r"b\.json\.zst needs a library.*dsv4_jax\[text\]"):
        list(records.records(str(tmp_path / "b.json.zst"), "text"))
