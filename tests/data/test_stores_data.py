# SPDX-License-Identifier: Apache-2.0
"""Data at addresses: the documents of the same local files, streamed or copied once; failures are named."""

import builtins
import contextlib
import gzip
import io
import json
import os

import numpy as np
import pytest
from rich.console import Console
from support.buckets import Bucket

import dsv4_jax as ds
from dsv4_jax.config import DataConfig
from dsv4_jax.data import ids, prepare, records, remote, sources
from dsv4_jax.data.prepare import write_shards
from dsv4_jax.data.sources import TokenShards, open_source, prepared_folder
from dsv4_jax.data.tokenizer import Bytes

TEXTS = [f"document {number}: " + "words " * number for number in range(1, 8)]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "cache"))
    Bucket.clear()
    yield Bucket()
    Bucket.clear()


def documents(path, **changes):
    source = open_source(path, DataConfig(**{"prepared": "nowhere"} | changes), Bytes())
    return [source.tokens(i, 0, int(n)).tolist() for i, n in enumerate(source.lengths)], source.keys.tolist()


def write(folder, name, texts=TEXTS):
    """Write texts as a file of the kind that its name says."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    encoded = np.concatenate([[256, *text.encode()] for text in texts])
    if name.endswith(".gz"):
        lines = gzip.compress(lines)
    elif name.endswith(".parquet"):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        file = io.BytesIO()
        pq.write_table(pa.table({"text": texts}), file)
        lines = file.getvalue()
    elif name.endswith(".bin"):
        lines = encoded.astype(np.uint16).tobytes()
    elif name.endswith(".npy"):
        file = io.BytesIO()
        np.save(file, encoded.astype(np.uint16))
        lines = file.getvalue()
    (folder / name).write_bytes(lines)
    return lines


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.bin", "a.npy"])
@pytest.mark.parametrize("spelling", ["{}/x", "{}/x/a.*", "{}/x/{name}"])
def test_a_store_gives_the_documents_of_the_same_local_files(bucket, tmp_path, name, spelling):
    (tmp_path / "x").mkdir()
    bucket.pipe_file(f"/data/x/{name}", write(tmp_path / "x", name))
    here, there = (spelling.format(where, name=name) for where in (tmp_path, "bucket://data"))
    assert documents(there) == documents(here)
    copied = list((tmp_path / "cache").rglob(name))
    assert len(copied) == (name in ("a.bin", "a.npy"))  # text is streamed; ids are copied, to be mapped


def test_a_copy_is_made_once_for_each_content(bucket, tmp_path):
    reads = []
    Bucket.fails = staticmethod(lambda operation, path: reads.append(path) if operation == "read" else None)
    bucket.pipe_file("/data/a.bin", write(tmp_path, "a.bin"))
    first = documents("bucket://data/a.bin")
    once = len(reads)
    assert documents("bucket://data/a.bin") == first and len(reads) == once
    bucket.pipe_file("/data/a.bin", write(tmp_path, "a.bin", TEXTS[:3]))
    assert len(documents("bucket://data/a.bin")[0]) == 3 and len(reads) > once


def test_tokens_are_prepared_into_a_store_and_read_from_it(bucket, tmp_path):
    bucket.pipe_file("/data/texts/a.jsonl", write(tmp_path, "a.jsonl"))
    data = DataConfig(path="bucket://data/texts", prepared="bucket://data/texts/prepared")
    at_start = documents(data.path)
    folder = prepared_folder(data.path, data, Bytes())
    write_shards(data.path, data, Bytes(), folder, 1, Console(file=io.StringIO()))
    assert isinstance(open_source(data.path, data, Bytes()), TokenShards)
    assert documents(data.path, prepared=data.prepared) == at_start
    assert documents(str(folder)) == at_start
    assert not list((tmp_path / "cache" / "stores").glob("*.new"))


def test_a_failed_upload_of_tokens_leaves_no_index(bucket, tmp_path):
    bucket.pipe_file("/data/a.jsonl", write(tmp_path, "a.jsonl"))
    data = DataConfig(path="bucket://data/a.jsonl", prepared="bucket://prepared")
    folder = prepared_folder(data.path, data, Bytes())

    def fails(operation, path):
        if operation == "write" and path.endswith(sources.DOCUMENTS):
            raise OSError("the store is full")

    Bucket.fails = staticmethod(fails)
    with pytest.raises(OSError, match="the store is full"):
        write_shards(data.path, data, Bytes(), folder, 1, Console(file=io.StringIO()))
    assert not any(name.endswith(records.INDEX) for name in bucket.names("prepared"))


def test_the_index_of_ids_is_kept_in_the_store(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(ids, "_INDEXED", 1)
    bucket.pipe_file("/data/a.bin", write(tmp_path, "a.bin"))
    data = {"prepared": "bucket://data"}
    first = documents("bucket://data", **data)
    assert len(bucket.names("data/.tables")) == 1
    monkeypatch.setattr(ids, "_scan", lambda *args: pytest.fail("scanned again"))
    assert documents("bucket://data", **data) == first


def test_a_store_that_cannot_be_read_is_named(bucket, tmp_path):
    with pytest.raises(ds.ConfigError, match=r"data.path = 'bucket://data/x': there is no such file"):
        documents("bucket://data/x")
    for name in ("a.jsonl", "a.bin"):
        bucket.pipe_file(f"/data/{name}", write(tmp_path, name))

    def fails(operation, path):
        if operation == "read":
            raise ConnectionError("no route to the store")

    Bucket.fails = staticmethod(fails)
    for name in ("a.jsonl", "a.bin"):
        with pytest.raises(ds.ConfigError, match=f"{name}.*cannot be .*no route to the store"):
            documents(f"bucket://data/{name}")


def test_a_copy_that_is_cut_short_is_refused(bucket, tmp_path, monkeypatch):
    bucket.pipe_file("/data/a.bin", write(tmp_path, "a.bin"))
    monkeypatch.setattr(Bucket, "get_file", lambda self, path, to, **_: open(to, "wb").close())
    with pytest.raises(ds.ConfigError, match="0 bytes were read, expected"):
        documents("bucket://data/a.bin")
    assert not list((tmp_path / "cache").rglob("a.bin*"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nosuch://bucket/texts", "no file system is known for nosuch://"),
        ("gs://bucket/texts", r"needs a package: pip install 'dsv4_jax\[stores\]'"),
        ("zip://a::gs://bucket/b.zip", "chain of addresses"),
    ],
)
def test_addresses_that_cannot_be_opened_are_refused(path, message, monkeypatch):
    plain = builtins.__import__

    def without_gcsfs(name, *args, **options):
        if name.startswith("gcsfs"):
            raise ImportError("No module named 'gcsfs'")
        return plain(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_gcsfs)
    with pytest.raises(ds.ConfigError, match=f"data.path = '{path}'.*{message}"):
        open_source(path, DataConfig(), Bytes())


@pytest.mark.parametrize("where", ["", "prepared"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.bin"])
def test_prepared_tokens_inside_the_source_are_no_part_of_it(tmp_path, name, where, monkeypatch):
    monkeypatch.setattr(ids, "_INDEXED", 1)
    (tmp_path / "x").mkdir(parents=True)
    write(tmp_path / "x", name)
    data = DataConfig(path=str(tmp_path / "x"), prepared=str(tmp_path / "x" / where))
    first = documents(data.path, prepared=data.prepared)
    if name == "a.jsonl":
        folder = prepared_folder(data.path, data, Bytes())
        write_shards(data.path, data, Bytes(), folder, 1, Console(file=io.StringIO()))
        assert prepared_folder(data.path, data, Bytes()) == folder
    assert documents(data.path, prepared=data.prepared) == first


def open_files(folder):
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(path.startswith(str(folder)) for path in found)


def test_many_shards_hold_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_SHARD", 1)  # a shard for each document
    texts = [f"document {number}" for number in range(40)]
    write(tmp_path, "a.jsonl", texts)
    data = DataConfig(path=str(tmp_path / "a.jsonl"), prepared=str(tmp_path / "prepared"))
    folder = prepared_folder(data.path, data, Bytes())
    write_shards(data.path, data, Bytes(), folder, 1, Console(file=io.StringIO()))
    monkeypatch.setattr(ids, "_map", ids.functools.lru_cache(6)(ids._map.__wrapped__))
    source = open_source(data.path, data, Bytes())
    got = [bytes(source.tokens(i, 1, int(n) - 1).tolist()).decode() for i, n in enumerate(source.lengths)]
    assert got == texts and 0 < open_files(folder) <= 6
    (folder / "00000.ids").write_bytes(b"\0" * (folder / "00000.ids").stat().st_size)
    with pytest.raises(ds.RunError, match=r"00000.ids has been replaced while the run reads it"):
        source.tokens(0, 0, 2)


def test_local_paths_stay_pathlib(tmp_path):
    for path in ("a/b", str(tmp_path), "~/x"):
        assert type(remote.open_path(path, "x")) is type(tmp_path) and not remote.is_address(path)
