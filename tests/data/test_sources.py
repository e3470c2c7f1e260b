# SPDX-License-Identifier: Apache-2.0
"""Sources of every kind give the same documents; what is wrong with one is named."""

import gzip
import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console
from support.golden_models import small_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import dsv4_jax as ds
from dsv4_jax.config import Config, DataConfig, TrainConfig
from dsv4_jax.data.prepare import run
from dsv4_jax.data.records import ArrayRecordWriter
from dsv4_jax.data.sources import open_source, open_sources, prepared_folder
from dsv4_jax.data.tokenizer import Bytes, load_tokenizer

TEXTS = ["one", "zwei äöü", "three\nlines\nhere\n", "日本語" * 50, "x"]


def array_record(file, texts):
    writer = ArrayRecordWriter(str(file), "group_size:2")
    for text in texts:
        writer.write(text if isinstance(text, bytes) else text.encode())
    writer.close()


def write(folder, kind):
    """The texts as a source of a kind; its path."""
    folder = folder / kind
    folder.mkdir()
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n\n" for i, text in enumerate(TEXTS))
    if kind == "text":
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text)
        (folder / "9.txt").write_text("")
        (folder / ".hidden").write_bytes(b"\xff")
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text(lines)
    elif kind == "gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [*TEXTS, ""]}), folder / "a.parquet")
    elif kind == "array_record":
        array_record(folder / "a.array_record", TEXTS)
    else:
        ids = np.concatenate([[Bytes.border, *text.encode()] for text in TEXTS]).astype(np.uint16)
        if kind == "bin":
            ids.tofile(folder / "a.bin")
        else:
            np.save(folder / "a.npy", ids.astype(np.int64))
            np.save(folder / "b.npy", np.array([Bytes.border, 7, 8], np.int32))
            return str(folder / "a.n*y")
    return str(folder)


def documents(source):
    return [source.tokens(i, 0, 10**6).tolist() for i in range(len(source.lengths))]


WANT = [[Bytes.border, *text.encode(), Bytes.border] for text in TEXTS]


@pytest.mark.parametrize("kind", ["text", "jsonl", "gz", "parquet", "array_record", "bin", "npy"])
def test_every_kind_gives_the_same_documents(tmp_path, kind):
    source = open_source(write(tmp_path, kind), DataConfig(), Bytes())
    assert documents(source) == WANT
    assert source.lengths.tolist() == [len(w) for w in WANT]
    assert len(set(source.keys.tolist())) == len(WANT)
    for first in range(8):
        for last in range(first, 12):
            assert source.tokens(1, first, last).tolist() == WANT[1][first:last]


def test_several_files_of_ids_are_one_source(tmp_path):
    write(tmp_path, "npy")
    source = open_source(str(tmp_path / "npy"), DataConfig(), Bytes())
    assert documents(source) == [*WANT, [256, 7, 8, 256]]


def test_a_single_text_file_is_cut_at_line_ends(tmp_path):
    text = "".join(f"line {i}\n" for i in range(20000))
    (tmp_path / "long.txt").write_text(text)
    source = open_source(str(tmp_path / "long.txt"), DataConfig(), Bytes())
    parts = [bytes(d[1:-1]) for d in documents(source)]
    assert b"".join(parts) == text.encode() and len(parts) > 5
    assert all(p.endswith(b"\n") and len(p) < 2**15 for p in parts)


def test_the_header_of_llm_c_is_no_text(tmp_path):
    """Its numbers were ids to a tokenizer that is large enough."""
    file, ids = tmp_path / "a.bin", np.array([256, 1, 2, 256, 3])
    for kind, magic, version in (("uint16", 20240520, 1), ("uint32", 20240801, 7)):
        header = np.zeros(256, np.int32)
        header[:3] = magic, version, len(ids)
        whole = header.tobytes() + ids.astype(kind).tobytes()
        file.write_bytes(whole)
        source = open_source(str(file), DataConfig(bin_type=kind), Bytes())
        assert documents(source) == [[256, 1, 2, 256], [256, 3, 256]]
        other = "uint32" if kind == "uint16" else "uint16"
        assert f"set it to {kind}" in refusal(file, bin_type=other)
        for cut in (len(whole) - 4, 1000, 4):
            file.write_bytes(whole[:cut])
            assert "truncated" in refusal(file, bin_type=kind)


def config(path, tmp_path, **changes):
    fields = {"path": str(path), "prepared": str(tmp_path / "prepared"), "seq_len": 64} | changes
    return Config(model=small_config(vocab_size=600), data=DataConfig(**fields), train=TrainConfig(steps=200))


def prepared(cfg):
    said = io.StringIO()
    run(cfg, Console(file=said, width=200))
    return said.getvalue()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE of 300 tokens, made here."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return str(path)


@pytest.mark.parametrize("with_bpe", [False, True])
def test_tokens_made_ahead_are_those_made_at_the_start(tmp_path, tokenizer, with_bpe):
    """Documents, keys and what is skipped; the same command finds them, and makes them anew when a file changes."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "{}\n")
    bpe = {"tokenizer": tokenizer, "border": "<|end|>"} if with_bpe else {}
    cfg = config(path, tmp_path, on_error="skip", **bpe)
    (at_start,), _, chosen = open_sources(cfg.data, 600)
    said = prepared(cfg)
    assert "5 documents" in said and "1 records skipped" in said and "padding" in said and "sample" in said
    folder = prepared_folder(str(path), cfg.data, chosen)
    (ahead,), _, _ = open_sources(cfg.data, 600)
    assert type(ahead).__name__ == "TokenShards" and ahead.skipped == at_start.skipped == 1
    assert documents(ahead) == documents(at_start)
    np.testing.assert_array_equal(ahead.keys, at_start.keys)
    assert "is there already" in prepared(cfg)
    by_folder, _, _ = open_sources(config(folder, tmp_path, **bpe).data, 600)
    assert documents(by_folder[0]) == documents(ahead)
    assert [chosen.decode(np.array(d[1:-1])) for d in documents(ahead)] == TEXTS
    path.write_text(json.dumps({"text": "other"}) + "\n")
    assert prepared_folder(str(path), cfg.data, chosen) != folder
    if with_bpe:
        assert len(documents(ahead)[3]) < len(WANT[3])
        with pytest.raises(ds.ConfigError, match="made with the tokenizer"):
            open_source(str(folder), cfg.data, Bytes())


def test_no_text_ahead_is_no_text_at_the_start(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    cfg = config(tmp_path / "empty.txt", tmp_path)
    for _ in range(2):
        with pytest.raises(ds.ConfigError, match="holds no text"):
            prepared(cfg)


def test_special_tokens_in_a_text_are_text(tokenizer):
    """Or a document could end another one."""
    chosen = load_tokenizer(tokenizer, "<|end|>")
    (ids,) = chosen.encode(["a<|end|>b"])
    assert chosen.border not in ids and chosen.decode(ids) == "a<|end|>b"


def refusal(path, **changes):
    with pytest.raises(ds.ConfigError) as error:
        open_sources(DataConfig(path=str(path), **changes), 600)
    return str(error.value)


BAD = {
    "utf8.txt": (b"fine \xff not", ["utf8.txt", "invalid UTF-8 at byte 5"]),
    "field.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', ["field.jsonl:2", "no field 'text', only 'body'"]),
    "type.jsonl": (b'{"text": 5}\n', ["type.jsonl:1", "no text in field 'text' but int"]),
    "list.jsonl": (b'{"text": "a"}\n\n[1]\n', ["list.jsonl:3", "no text"]),
    "json.jsonl": (b'{"text": "a"}\n{"text": \n', ["json.jsonl:2", "invalid JSON"]),
    "utf8.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', ["utf8.jsonl:2", "invalid UTF-8"]),
    "half.jsonl": (b'{"text": "\\ud800"}\n', ["half.jsonl:1", "no Unicode"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_named_or_skipped_and_counted(tmp_path, name):
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.jsonl").write_text('{"text": "good"}\n')
    said = refusal(tmp_path)
    assert all(word in said for word in [*words, "data.on_error"]), said
    (source,), _, _ = open_sources(DataConfig(path=str(tmp_path), on_error="skip"), 600)
    assert source.skipped == 1 and [256, *b"good", 256] in documents(source)


def test_unusable_sources_are_refused_by_name(tmp_path, tokenizer):
    def there(name, content=b""):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    (tmp_path / "nothing").mkdir()
    assert "no such file" in refusal("nowhere") and "no such file" in refusal(tmp_path / "nothing")
    assert "holds no text" in refusal(there("empty.txt"))
    assert "holds no text" in refusal(there("empty.bin"))
    assert "cannot be read" in refusal(there("a.parquet", b"PAR1 and then nothing"))
    assert "cannot be read" in refusal(there("a.array_record", b"not one"))
    assert "no whole number of uint16" in refusal(there("odd.bin", b"\0\1\0"))
    far = there("far.bin", np.array([1, 2, 256, 3, 257], np.uint16).tobytes())
    assert "far.bin: id 257 at position 4" in refusal(far)
    assert "no array of ids" in refusal(there("a.npy", b"junk"))
    np.save(tmp_path / "two.npy", np.zeros((2, 2), np.int32))
    assert "expected one axis" in refusal(tmp_path / "two.npy")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    assert "no array of ids" in refusal(tmp_path / "object.npy")  # nothing is unpickled
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.bin").write_bytes(b"\1\0")
    (tmp_path / "mixed" / "b.txt").write_text("x")
    assert "separate them" in refusal(tmp_path / "mixed")
    assert "no column 'words', only text" in refusal(write(tmp_path, "parquet"), text_field="words")
    assert "is no tokenizer.json" in refusal("", tokenizer=str(there("t.json", b"{}")))
    assert "data.border = ''" in refusal("", tokenizer=tokenizer)
    assert "<|end|>" in refusal("", tokenizer=tokenizer, border="<|no|>")
    with pytest.raises(ds.ConfigError, match=r"model.vocab_size = 256 is less than the 257 ids"):
        open_sources(DataConfig(), 256)


def test_a_damaged_folder_of_tokens_is_refused(tmp_path):
    path = write(tmp_path, "text")
    cfg = config(path, tmp_path)
    prepared(cfg)
    folder = prepared_folder(path, cfg.data, Bytes())
    shard, index = folder / "00000.ids", folder / "index.json"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert "00000.ids has" in refusal(path, prepared=cfg.data.prepared)
    shard.write_bytes(whole)
    (folder / "00000.npy").unlink()
    assert "00000.npy has 0 bytes" in refusal(folder)
    index.write_text(index.read_text()[:50])
    assert "index.json is damaged" in refusal(folder)


def test_too_much_text_is_to_be_tokenised_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr("dsv4_jax.data.sources._IN_MEMORY", 10)
    assert "python -m dsv4_jax data CONFIG" in refusal(write(tmp_path, "text"))
