# SPDX-License-Identifier: Apache-2.0
"""Generation on meshes gives the tokens of one device, with and without drafts."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from support.golden_models import draft_configs, empty_model

import dsv4_jax as ds
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.generate.engine import Generator
from dsv4_jax.generate.request import Request, make_request
from dsv4_jax.mesh import make_mesh

MODELS = draft_configs(init_std=0.5)
VISION = dataclasses.replace(
    MODELS["mtp"], vocab_size=257, n_hash_layers=0, n_mtp_layers=0, compress_ratios=(4, 8), modality_bias=True,
    vision_n_layers=1, vision_dim=16, vision_n_heads=2, vision_inter_dim=16, vision_patch_size=2,
    vision_downsample_ratio=2, vision_min_pixels=1, image_token_id=7,
)  # fmt: skip
# Five requests for four rows: likeliest and drawn tokens, and a row that serves two.
REQUESTS = [
    Request(ids=np.random.RandomState(i).randint(0, 16, n).tolist(), max_tokens=m, seed=i, temperature=t)
    for i, (n, m, t) in enumerate([(9, 14, 0), (1, 5, 1.0), (4, 12, 0.7), (12, 6, 0), (3, 8, 1.0)])
]


def generated(shape: tuple[int, int, int], name: str, draft: int):
    """Tokens of every request."""
    with jax.set_mesh(make_mesh(*shape)):
        model = jax.jit(lambda: ds.DeepSeek(MODELS[name], rngs=nnx.Rngs(0)))()
        tokens = ds.generate(model, REQUESTS, rows=3, chunk=5, capacity=32, draft=draft, keep_experts=True)
        found = [[] for _ in REQUESTS]
        for token in tokens:
            found[token.request].append(token)
    return found


@pytest.mark.parametrize(
    ("name", "draft", "shape"),
    [
        ("dspark", 3, (2, 1, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("mtp", 2, (1, 2, 2)),
                ("mtp", 0, (1, 2, 2)),
                ("mtp", 0, (1, 3, 1)),
                ("mtp", 2, (2, 2, 1)),
                ("dspark", 3, (1, 4, 1)),
                ("dspark", 0, (4, 1, 2)),
            ]
        ),
    ],
)
def test_a_mesh_generates_what_one_device_does(name: str, draft: int, shape: tuple[int, int, int]):
    """Rows that the mesh does not divide are filled up with idle ones, and so are chunks."""
    for got, want in zip(generated(shape, name, draft), generated((1, 1, 1), name, draft), strict=True):
        assert [t.id for t in got] == [t.id for t in want] and [t.finish for t in got] == [t.finish for t in want]
        np.testing.assert_allclose([t.logprob for t in got], [t.logprob for t in want], rtol=0, atol=2e-5)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.experts, b.experts)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_a_mesh_reads_images_as_one_device_does(tmp_path, shape: tuple[int, int, int]):
    """One of three prompts has an image, across the borders of chunks and of the devices' positions."""
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (8, 12, 3), np.uint8)).save(path)
    how = dict(max_tokens=8, stop_ids=())
    prompts = [make_request(text, VISION, Bytes(), **how) for text in ("one", "another")]
    prompts.append(make_request("x", VISION, Bytes(), image=str(path), **how))

    def run(*shape: int):
        with jax.set_mesh(make_mesh(*shape)):
            model = jax.jit(lambda: ds.DeepSeek(VISION, rngs=nnx.Rngs(0)))()
            made = list(ds.generate(model, prompts, rows=2, chunk=6, capacity=32))
        return sorted((t.request, i, t.id, t.logprob) for i, t in enumerate(made))

    got, want = run(*shape), run(1, 1, 1)
    assert [t[:3] for t in got] == [t[:3] for t in want] and len(want) == 24
    np.testing.assert_allclose([t[3] for t in got], [t[3] for t in want], rtol=0, atol=2e-5)


def test_rows_and_chunks_are_rounded_up_to_the_mesh():
    with jax.set_mesh(make_mesh(2, 2, 2)):
        engine = Generator(empty_model(MODELS["mtp"]), 5, chunk=7, capacity=8)
    assert (engine.rows, engine.chunk) == (8, 8)
