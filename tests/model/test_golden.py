# SPDX-License-Identifier: Apache-2.0
"""The whole model against numbers of the official equations, and proof that those numbers bite."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest
from support.golden_models import loaded_model

import dsv4_jax as ds
from dsv4_jax.model import attention


def test_values_match_the_official_equations(golden):
    """Streams after every layer, and both logits."""
    run = golden.next_token_loss()
    for i in range(golden.cfg.n_layers):
        stream = run.layers[i].collected.streams[:, ::3]
        np.testing.assert_allclose(stream, golden.arrays[f"stream/{i}"], rtol=0, atol=1e-4, err_msg=f"layer {i}")
    np.testing.assert_allclose(run.logits, golden.arrays["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(run.mtp_logits, golden.arrays["mtp_logits"], rtol=0, atol=1e-4)


def test_a_plain_call_gives_the_same(flash):
    out = flash.forward(flash.model, flash.ids)
    np.testing.assert_allclose(out.logits, flash.arrays["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(out.mtp_logits, flash.arrays["mtp_logits"], rtol=0, atol=1e-4)
    assert out.logits.dtype == out.mtp_logits.dtype == np.float32


def test_loss_and_gradients_match_the_official_equations(golden):
    run = golden.next_token_loss()
    assert abs(run.loss - golden.arrays["loss"]) < 1e-5
    stored = [k for k in golden.arrays if k.startswith("grad/")]
    assert len(stored) > 10
    for key in stored:
        want = golden.arrays[key]
        error = np.abs(run.grads[key.removeprefix("grad/")] - want).max() / np.abs(want).max()
        assert error < 1e-4, f"{key}: off by {error:.1e} of its largest element"


def test_every_gradient_norm_matches(golden):
    """All tensors, not only those stored; what the loss cannot reach gets exactly nothing."""
    grads, norms = golden.next_token_loss().grads, golden.spec["grad_norms"]
    assert set(norms) <= set(grads)
    for name, grad in grads.items():
        norm = np.linalg.norm(grad)
        if norms.get(name):
            assert abs(norm - norms[name]) < 1e-3 * norms[name], name
        else:
            assert norm == 0, name
            assert ".indexer." in name or name.startswith("mtp."), name


def test_buffers_get_no_gradient(golden):
    """Routing tables and balance biases are tensors of the checkpoint, but no optimizer sees them."""
    buffers = set(golden.spec["tensors"]) - set(golden.next_token_loss().grads)
    assert buffers == {n for n in golden.spec["tensors"] if n.endswith(("gate.bias", "gate.tid2eid"))}


def test_load_and_save_are_exact_inverses(golden):
    saved = ds.to_official(golden.model)
    assert set(saved) == set(golden.weights)
    for name, tensor in golden.weights.items():
        np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


def _without(tensors):
    del tensors["layers.4.attn.indexer.wq_b.weight"]
    return "missing layers.4.attn.indexer.wq_b.weight"


def _extra(tensors):
    tensors["layers.6.attn.wkv.weight"] = np.zeros((2, 2), np.float32)
    return "unexpected layers.6.attn.wkv.weight"


def _transposed(tensors):
    tensors["layers.3.ffn.experts.7.w1.weight"] = tensors["layers.3.ffn.experts.7.w1.weight"].T
    return "layers.3.ffn.experts.7.w1.weight: expected"


def _out_of_range(tensors):
    tensors["layers.1.ffn.gate.tid2eid"] = tensors["layers.1.ffn.gate.tid2eid"] + 1
    return "layers.1.ffn.gate.tid2eid"


def _negative(tensors):
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"] - 1
    return "layers.0.ffn.gate.tid2eid"


def _zeros(tensors):
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"] * 0
    return "layers.0.ffn.gate.tid2eid"


@pytest.mark.parametrize("spoil", [_without, _extra, _transposed, _out_of_range, _negative, _zeros])
def test_loading_is_strict_and_leaves_the_model_alone(flash, spoil: Callable):
    """Everything else in the file is new, so a half-loaded model would show."""
    tensors = {name: t if name.endswith("tid2eid") else t + 1 for name, t in flash.weights.items()}
    named = spoil(tensors)
    with pytest.raises(ValueError, match=named):
        ds.load_official(flash.model, tensors)
    for name, tensor in ds.to_official(flash.model).items():
        np.testing.assert_array_equal(tensor, flash.weights[name], err_msg=name)


# Mutants: common mistakes, made by editing the weights (a wrong reading of the file is the same as a
# right reading of a permuted file) or the configuration. Each must miss the golden logits by far.


def _comb_untransposed(name: str, x: np.ndarray) -> np.ndarray:
    if name.endswith(("hc_attn_fn", "hc_ffn_fn", "hc_attn_base", "hc_ffn_base")):
        comb = x[8:].reshape(4, 4, *x.shape[1:]).swapaxes(0, 1).reshape(16, *x.shape[1:])
        return np.concatenate([x[:8], comb])
    return x


def _no_sink(name: str, x: np.ndarray) -> np.ndarray:
    return np.full_like(x, -1e9) if name.endswith("attn_sink") else x


def _halves_swapped(name: str, x: np.ndarray) -> np.ndarray:
    if name.startswith(("layers.2.", "layers.4.")):  # the CSA layers
        if name.endswith(("compressor.wkv.weight", "compressor.wgate.weight")):
            return np.roll(x, x.shape[0] // 2, axis=0)
        if name.endswith("compressor.ape"):
            return np.roll(x, x.shape[1] // 2, axis=1)
    return x


def _rotate_half(name: str, x: np.ndarray) -> np.ndarray:
    """Pairs (j, j + r/2) are interleaved pairs of permuted channels, here of every head of width 32."""
    to_pairs = np.concatenate([np.arange(16), 16 + np.arange(16).reshape(2, 8).T.reshape(-1)])
    norms = ("attn.kv_norm.weight", "compressor.norm.weight")
    rows = ("wq_b.weight", "attn.wkv.weight", "compressor.wkv.weight", "compressor.wgate.weight", *norms)
    if name.endswith(rows):
        return x.reshape(-1, 32, *x.shape[1:])[:, to_pairs].reshape(x.shape)
    if name.endswith(("wo_a.weight", "compressor.ape")):
        return x.reshape(x.shape[0], -1, 32)[..., to_pairs].reshape(x.shape)
    return x


def _miss(flash, logits) -> float:
    return float(np.abs(np.asarray(logits) - flash.arrays["logits"]).max())


@pytest.mark.parametrize("edit", [_comb_untransposed, _no_sink, _halves_swapped, _rotate_half])
def test_golden_catches_wrong_weights(flash, edit: Callable):
    mutant = loaded_model(flash.cfg, {name: edit(name, x) for name, x in flash.weights.items()})
    assert _miss(flash, flash.forward(mutant, flash.ids).logits) > 0.1


def _logits(model: ds.DeepSeek, ids: np.ndarray) -> np.ndarray:
    """A compilation of its own, without what only other outputs need."""
    return jax.jit(lambda model, ids: model(ids).logits)(model, ids)


def test_golden_catches_missing_yarn(flash):
    mutant = loaded_model(dataclasses.replace(flash.cfg, yarn=False), flash.weights)
    assert _miss(flash, _logits(mutant, flash.ids)) > 0.1


def test_golden_catches_a_missing_inverse_rotation(flash, monkeypatch):
    rotate = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, at, inverse=False: x if inverse else rotate(x, at))
    assert _miss(flash, _logits(flash.model, flash.ids)) > 0.1
