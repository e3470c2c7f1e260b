# SPDX-License-Identifier: Apache-2.0
"""Token ids that count as the same in an n-gram: from a tokenizer, from a file, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.golden_models import small_config

import dsv4_jax as ds
from dsv4_jax.model.engram import compute_engram_rows, make_token_map_buffer
from dsv4_jax.model.params import Params
from dsv4_jax.ops.documents import find_documents


def config(**changes):
    """A model of one layer with an Engram."""
    return small_config(**(dict(compress_ratios=(0,), n_mtp_layers=0, engram_layer_ids=(0,)) | changes))


def numbers(**changes):
    found = make_token_map_buffer(config(**changes), Params(nnx.Rngs(0), 0.02))
    return None if found is None else np.asarray(found[...])


def test_identity():
    np.testing.assert_array_equal(numbers(), np.arange(64))
    np.testing.assert_array_equal(numbers(engram_compressed_vocab_size=64), np.arange(64))
    assert numbers(engram_layer_ids=()) is None
    cfg = config(engram_compressed_vocab_size=40)  # as an official configuration without its tokenizer
    assert numbers(engram_compressed_vocab_size=40) is None
    zeros = jnp.zeros((1, 4), int)
    with pytest.raises(ValueError, match=r"model\.engram_token_map = 'identity' .* 64 .* = 40"):
        compute_engram_rows(cfg, None, zeros, zeros == 0, find_documents(zeros + 1))


TEXTS = [
    ("pad", 0), ("A", 1), ("a", 1), (" a", 1), ("  A ", 1), ("\u00e1", 1), ("a\u0301", 1), ("\uff21", 1), ("b", 2),
    (" ", 3), ("   ", 3), ("\n", 3), ("\t\r\n", 3), ("\u3000", 3), ("\ufb01", 4), ("FI", 4), ("f i", 5), ("f \n I", 5),
    ("\u0301", 6), ("\u0300", 7), ("\u00c9", 8), ("e", 8), (b"\xc3", 9), (b"\xa9", 10), (b"\xe4\xb8", 11), ("<A>", 12),
    ("<a>", 12), ("\u4e2d", 13),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer.json of those texts; the last three are added tokens, one of them special."""
    library = pytest.importorskip("tokenizers")
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in visible}  # of bytes, as byte-level tokenizers write them
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in visible)}
    spell = lambda text: "".join(letters[b] for b in (text if isinstance(text, bytes) else text.encode()))
    vocabulary = {spell(text): i for i, (text, _) in enumerate(TEXTS[:-3])}
    found = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
    found.decoder = library.decoders.ByteLevel()
    found.add_special_tokens(["<A>"])
    found.add_tokens(["<a>", "\u4e2d"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    found.save(str(path))
    return str(path)


def test_tokens_are_compared_without_case_accents_and_spaces(tokenizer):
    got = numbers(engram_token_map=tokenizer, engram_compressed_vocab_size=14, engram_pad_id=8)
    assert got.tolist() == [number for _, number in TEXTS] + [2] * (64 - len(TEXTS))
    assert got.dtype == np.int32


def test_token_maps_that_do_not_fit(tokenizer, tmp_path, monkeypatch):
    def refused(pattern, **changes):
        with pytest.raises(ds.ConfigError, match=pattern):
            numbers(**changes)

    refused("gives 14 numbers, .* = 99 stands for 99", engram_token_map=tokenizer, engram_compressed_vocab_size=99)
    refused("gives 14 numbers, .* = 0 stands for 64", engram_token_map=tokenizer)
    refused("has 28 tokens, expected .* vocab_size = 20", engram_token_map=tokenizer, vocab_size=20)
    refused("has 28 tokens, expected more than engram_pad_id = 28", engram_token_map=tokenizer, engram_pad_id=28)
    (tmp_path / "other.json").write_text("{}")
    refused("is no tokenizer.json", engram_token_map=str(tmp_path / "other.json"))
    refused("is no tokenizer.json", engram_token_map=str(tmp_path / "absent.json"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(r"needs a library: pip install 'dsv4_jax\[text\]'", engram_token_map=tokenizer)

    path = str(tmp_path / "map.npy")
    refused("is no array", engram_token_map=path)
    for found, pattern in (
        (np.zeros(63, int), r"integers \[64\].*found int64\[63\]"),
        (np.zeros(64), r"found float64\[64\]"),
        (np.zeros((64, 1), int), r"found int64\[64, 1\]"),
        (np.arange(64) - 1, "numbers from 0 to 63; found -1 to 62"),
        (np.arange(64) + 1, "numbers from 0 to 63; found 1 to 64"),
        (np.array([None] * 64), "is no array"),
    ):
        np.save(path, found)
        refused(pattern, engram_token_map=path)
    np.save(path, np.arange(64, dtype=np.uint8) // 2)
    refused("numbers from 0 to 30; found 0 to 31", engram_token_map=path, engram_compressed_vocab_size=31)
    assert numbers(engram_token_map=path).tolist() == [i // 2 for i in range(64)]
