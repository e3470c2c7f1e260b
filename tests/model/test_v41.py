# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 against numbers of the official equations: streams, selections, images, Engram."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import ROOT, golden_weights

import dsv4_jax as ds
from dsv4_jax.mesh import abstract_mesh
from dsv4_jax.model.dspark import Anchors, propose
from dsv4_jax.model.engram import compute_engram_rows
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import RouterBias
from dsv4_jax.ops.documents import find_documents
from dsv4_jax.train.step import update_biases
from dsv4_jax.weights.names import official_shapes

S = 45


def test_streams_and_logits(v41):
    out, arrays = v41["out"], v41["arrays"]

    def close(got, name):
        # In float64 this model is up to 5e-6 of the largest away from the stored fp32 numbers.
        largest = np.abs(arrays[name]).max()
        np.testing.assert_allclose(got, arrays[name], rtol=0, atol=2e-5 * largest, err_msg=name)

    for i in range(v41["cfg"].n_layers):
        close(out.collected["streams"][i][:, ::3], f"stream/{i}")
        close(out.collected["pre_mix"][i], f"pre_mix/{i}")
    close(out.logits, "logits")
    features = [f for f in out.collected["features"] if f is not None]
    close(np.concatenate(features, axis=-1)[:, ::3], "features")


def test_selections_are_the_same(v41):
    out, arrays, cfg = v41["out"], v41["arrays"], v41["cfg"]
    for i in range(cfg.n_layers):
        experts = np.sort(out.experts[i].reshape(-1, cfg.n_activated_experts))
        np.testing.assert_array_equal(experts, arrays[f"experts/{i}"], err_msg=f"layer {i}")
        assert (out.collected["topk"][i] is not None) == (f"topk/{i}" in arrays)
        assert (out.collected["candidates"][i] is not None) == (f"candidates/{i}" in arrays)
    for name in (n for n in arrays if n.startswith(("topk/", "candidates/"))):
        kind, i = name.split("/")
        np.testing.assert_array_equal(out.collected[kind][int(i)], arrays[name], err_msg=name)


def test_images(v41):
    tower, aligned = v41["out"].collected["vision"]
    np.testing.assert_allclose(tower, v41["arrays"]["vision_out"], rtol=0, atol=1e-5)
    want = v41["arrays"]["aligner_out"]
    np.testing.assert_allclose(aligned[: len(want)], want, rtol=0, atol=1e-5)


def test_load_and_save_are_exact_inverses(v41):
    saved, weights = ds.to_official(v41["model"]), golden_weights.weights(v41["spec"])
    assert set(saved) == set(weights)
    for name, tensor in weights.items():
        np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


def test_drafts(v41):
    """The row goes on with a token that the backbone has read, then the anchor."""
    arrays, model = v41["arrays"], v41["model"]
    longer = lambda x, fill: np.concatenate([x, np.broadcast_to(fill, (2, 1))], axis=1)
    ids = longer(arrays["ids"], arrays["draft/context_token"][:, None])
    types = longer(arrays["token_types"], -1)
    position = np.full((2, 1), S + 1)
    anchors = Anchors(arrays["draft/anchor_token"][:, None], position, np.zeros((2, 1), int))

    @jax.jit
    def draft(model):
        images = dict(patches=arrays["patches"], image_grids=v41["grids"])
        out = model.hidden(Inputs(ids, token_types=types, **images), collect=["features"])
        return propose(model, model.draft(out, anchors), anchors)

    found = draft(model)
    np.testing.assert_array_equal(found.token_BAn[:, 0], arrays["draft/ids"][:, 1:])
    np.testing.assert_allclose(found.logits_BAnV[:, 0], arrays["draft/logits"], rtol=0, atol=1e-4)
    # The confidence reads streams before their norm, which are as far away as in `test_streams_and_logits`.
    np.testing.assert_allclose(found.confidence_BAn[:, 0], arrays["draft/confidence"], rtol=1e-5, atol=5e-4)


def test_a_packed_row_equals_its_documents_alone(v41):
    """A document of text and one with an image, one after the other and each in a row of its own."""
    arrays, cfg = v41["arrays"], v41["cfg"]
    words, image = 25, 20  # tokens of the two documents
    ids, types = arrays["ids"], arrays["token_types"]
    rows = arrays["engram_rows"]
    assert (types[0, :image] >= 0).any() and (types[0, image:] < 0).all()

    own_rows = jax.jit(functools.partial(compute_engram_rows, cfg))

    def run(packed: bool):
        """Two rows: both documents and padding only, or each alone."""
        new = [np.zeros((2, S, *x.shape[2:]), x.dtype) for x in (ids, rows)]
        kinds, segments = np.full((2, S), -1), np.zeros((2, S), int)
        start = words if packed else 0
        row = 0 if packed else 1
        for x, old in zip(new, (ids, rows), strict=True):
            x[0, :words] = old[1, :words]
            x[row, start : start + image] = old[0, :image]
        kinds[row, start : start + image] = types[0, :image]
        segments[0, :words] = 1
        segments[row, start : start + image] = 2
        grids = np.array(v41["grids"])
        grids[0, :2] = row, start + grids[0, 1]
        docs, text = find_documents(jnp.asarray(segments)), (segments > 0) & (kinds < 0)
        found = np.asarray(own_rows(v41["model"].token_map, new[0], text, docs))
        np.testing.assert_array_equal(found[segments > 0], new[1][segments > 0])
        out = v41["call"](v41["model"], new[0], segments, kinds, arrays["patches"], grids, found)
        return out, (row, slice(start, start + image))

    (together, at), (alone, at_alone) = run(True), run(False)
    for here, there in ((at, at_alone), ((0, slice(words)),) * 2):
        np.testing.assert_allclose(together.logits[here], alone.logits[there], rtol=0, atol=2e-4)
        for i in range(cfg.n_layers):
            np.testing.assert_array_equal(np.sort(together.experts[i][here]), np.sort(alone.experts[i][there]))
        for i in cfg.index_source_layers:
            chosen = (out.collected["topk"][i][place] >= 0 for out, place in ((together, here), (alone, there)))
            assert next(chosen).sum() == next(chosen).sum()


def test_the_released_model_has_its_size():
    """Parameters and tensors of the public checkpoint, whose quantised tensors have one with scales beside them."""
    cfg = ds.load_config(str(ROOT / "configs" / "v41_flash.py")).model
    with abstract_mesh(1, 1, 1):
        shapes = official_shapes(jax.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0))))
    assert sum(math.prod(shape) for shape in shapes.values()) == 763_205_315_794
    quantised = r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|experts\.(\d+\.)?w\d|engram\.(embed|wkv)|main_proj"
    assert len(shapes) + sum(bool(re.search(rf"({quantised})\.weight", name)) for name in shapes) == 96_085


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_source_layers=(4, 6)), "for layer 2 of ratio 2"),
        (dict(index_source_layers=(2, 4)), "must be among index_source_layers"),
        (dict(index_source_layers=(0, 2, 4, 6)), "with a ratio only"),
        (dict(candidate_source_layer=4), "found [6] after"),
        (dict(candidate_topk_blocks=1), "at least index_topk"),
        (dict(engram_layer_ids=(4, 1)), "in order"),
        (dict(dspark_n_activated_experts=5), "at most dspark_n_routed_experts"),
        (dict(vision_dim=36), "multiple of 4 x vision_n_heads"),
        (dict(dspark_target_layer_ids=()), "must be 0 or 1"),
    ],
)
def test_unusable_configurations_are_refused(v41, change, message):
    with pytest.raises(ds.ConfigError, match=re.escape(message)):
        dataclasses.replace(v41["cfg"], **change)


def test_wrong_inputs_are_refused(v41):
    model, (ids, _, types, patches) = v41["model"], v41["inputs"]
    for arguments, message in [
        (dict(patches=patches), "belong together"),
        (dict(patches=patches, image_grids=v41["grids"]), "need token_types"),
        (dict(token_types=types[:, :3]), r"token_types must be \[2, 45\]"),
        (dict(engram_rows=np.zeros((2, S, 2, 5), int)), r"engram_rows must be integers \[2, 45, 2, 6\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(ids, **arguments)


def test_every_bias_moves_by_the_load_of_its_modality(v41):
    model, cfg = v41["model"], v41["cfg"]
    load = np.random.RandomState(0).randint(0, 9, (cfg.n_layers, 2, cfg.n_routed_experts)).astype(np.float32)
    _, _, before = nnx.split(model, nnx.Param, ...)
    after = nnx.to_flat_state(update_biases(model, before, jnp.asarray(load), 0.5))
    for (path, old), (_, new) in zip(nnx.to_flat_state(before), after, strict=True):
        moved = np.asarray(new.get_value()) - np.asarray(old.get_value())
        if not isinstance(old, RouterBias) or path[0] == "mtp":  # draft blocks are not run
            assert not moved.any(), path
            continue
        for row, layer in zip(moved, model.layers_of(path), strict=True):
            own = load[layer, int(path[-1] == "bias_vl")]
            np.testing.assert_allclose(row, 0.5 * np.sign(own.mean() - own), atol=1e-6)
