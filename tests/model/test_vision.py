# SPDX-License-Identifier: Apache-2.0
"""Images: the tower and the aligner against golden numbers and plain loops, packing, insertion, meshes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from support import golden_weights
from support.golden_models import small_config

import dsv4_jax as ds
from dsv4_jax.mesh import BATCH, act_spec, make_mesh
from dsv4_jax.model import images, vision
from dsv4_jax.model.params import Params
from dsv4_jax.ops.images import attend_images, attend_images_reference, max_cells
from dsv4_jax.optim.groups import v41_groups
from dsv4_jax.weights.names import load_official, official_shapes, official_tensors, to_official

R, P, N = 2, 40, 4  # patches of a cell's side, patches and lines of image_grids in most tests
CFG = small_config(
    vision_n_layers=2, vision_dim=16, vision_n_heads=2, vision_inter_dim=12, vision_patch_size=2,
    vision_downsample_ratio=R, vision_min_pixels=1, image_token_id=63,
)  # fmt: skip
B, S, D = 4, 24, CFG.dim


class Parts(nnx.Module):
    """The parts of a model that see images."""

    def __init__(self, cfg):
        make = Params(nnx.Rngs(0), cfg.init_std)
        self.cfg = cfg
        self.vision, self.aligner = vision.Vision(cfg, make), vision.Aligner(cfg, make)
        self.image_start, self.image_newline, self.image_end = images.make_delimiters(cfg, make)


def loaded(cfg, weights=None):
    """Parts with official tensors, those of the golden rule if none are given."""
    shapes = jax.eval_shape(lambda: Parts(cfg))
    zeros = lambda s: jax.device_put(
        np.zeros(s.shape, s.dtype), jax.NamedSharding(jax.sharding.get_mesh(), s.sharding.spec)
    )
    parts = jax.tree.map(zeros, shapes)
    load_official(parts, weights or rule(cfg))
    return parts


@functools.cache
def rule(cfg):
    shapes = official_shapes(jax.eval_shape(lambda: Parts(cfg)))
    return golden_weights.weights({"tensors": shapes, "weight_seed": 0})


def layout(h, w, r=R):
    """Token types of an image of h x w patches."""
    return [0, *([1] * -(-w // r) + [2]) * -(-h // r), 3]


def types_of(grids, shape=(B, S)):
    types = np.full(shape, -1, np.int32)
    for row, start, h, w in grids:
        if h:
            types[row, start : start + len(layout(h, w))] = layout(h, w)
    return types


def pixels(sizes, n=P, seed=0):
    """Patches of images by their sizes, each image the same wherever it comes; padding is NaN."""
    images = [np.random.RandomState((seed, h, w)).standard_normal((h * w, 3, 2, 2)) for h, w in sizes]
    count = sum(map(len, images))
    return np.concatenate([*images, np.full((n - count, 3, 2, 2), np.nan)]).astype(np.float32)


def lines(grids, n=N):
    return np.array([*grids, *[(0, 0, 0, 0)] * (n - len(grids))], np.int32).reshape(n, 4)


EMBEDDINGS, WEIGHT = np.random.RandomState(1).standard_normal((2, B, S, D)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(cfg, parts, e, types, patches, grids, weight):
    """What the model gets and the gradients of a random linear function of it."""

    def loss(parts, e):
        out, outputs = images.embed_images(parts, e, types, patches, grids, cfg, jnp.float32)
        return (out * weight).sum(), (out, outputs)

    grads, (out, outputs) = jax.grad(loss, (0, 1), has_aux=True)(parts, e)
    return out, outputs, grads


def run(grids, patches, types=None, weight=WEIGHT, n=N, parts=None):
    """`value_and_grad` on the mesh that is set, as numpy; gradients under the official names."""
    types = types_of(grids.reshape(-1, 4)) if types is None else types
    place = lambda x: jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), act_spec(x.ndim)))
    spec = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(BATCH) if patches.ndim == 5 else jax.P())
    parts = parts or loaded(CFG)
    args = (place(EMBEDDINGS), place(types), jax.device_put(patches, spec), jax.device_put(grids, spec), place(weight))
    out, outputs, (grads, de) = value_and_grad(CFG, parts, *args)
    return *jax.device_get((out, outputs, de)), official_tensors(parts, grads)


def image_by_loops(x, h, w, cfg, weights):
    """Tower and aligner for one image [h w, 3, p, p], one patch, head and cell at a time, float64."""
    t = {name: np.asarray(tensor, np.float64) for name, tensor in weights.items()}
    norm = lambda x, name: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * t[name]
    affine = lambda x, name: x @ t[f"{name}.weight"].T + t[f"{name}.bias"]
    H, K, r = cfg.vision_n_heads, cfg.vision_dim // cfg.vision_n_heads, cfg.vision_downsample_ratio
    f = [cfg.vision_rope_theta ** (-2 * i / (K // 2)) for i in range(K // 4)]
    turn = np.array([[row * g for g in f] + [column * g for g in f] for row in range(h) for column in range(w)])

    def rotate(x):  # pairs as complex numbers
        z = (x[:, : K // 2] + 1j * x[:, K // 2 :]) * np.exp(1j * turn)
        return np.concatenate([z.real, z.imag], -1)

    x = affine(x.reshape(h * w, -1).astype(np.float64), "vision.patch_embed.proj")
    for i in range(cfg.vision_n_layers):
        b = f"vision.blocks.{i}"
        qkv = affine(norm(x, f"{b}.norm1.weight"), f"{b}.attn.wqkv").reshape(h * w, 3, H, K)
        heads = []
        for q, k, v in qkv.transpose(2, 1, 0, 3):
            p = np.exp(rotate(q) @ rotate(k).T / np.sqrt(K))
            heads.append(p / p.sum(1, keepdims=True) @ v)
        x = x + affine(np.concatenate(heads, -1), f"{b}.attn.wo")
        gate, up = np.split(norm(x, f"{b}.norm2.weight") @ t[f"{b}.mlp.w1.weight"].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ t[f"{b}.mlp.w2.weight"].T
    x = norm(x, "vision.norm.weight")
    cells = []
    for y0 in range(0, h, r):
        for x0 in range(0, w, r):
            feature = np.zeros((x.shape[1], r, r))
            for dy in range(min(r, h - y0)):
                for dx in range(min(r, w - x0)):
                    feature[:, dy, dx] = x[(y0 + dy) * w + x0 + dx]
            cells.append(feature.reshape(-1))
    hidden = affine(np.array(cells), "aligner.w1")
    return x, affine(hidden * (1 + np.vectorize(math.erf)(hidden / np.sqrt(2))) / 2, "aligner.w2")


def test_golden_tower_and_aligner():
    spec, fields, arrays = golden_weights.read("v41_tiny")
    cfg = ds.model_config_from_official(fields)
    tensors = {k: v for k, v in golden_weights.weights(spec).items() if k.startswith(("vision", "aligner", "image_"))}
    parts, at = loaded(cfg, tensors), spec["image"]
    grids = np.array([[at["row"], at["start"], at["vit_h"], at["vit_w"]]])
    e = jnp.ones((*arrays["ids"].shape, cfg.dim), device=jax.NamedSharding(jax.sharding.get_mesh(), act_spec(3)))
    types = jax.device_put(arrays["token_types"], jax.NamedSharding(jax.sharding.get_mesh(), act_spec(2)))
    out, outputs, _ = value_and_grad(cfg, parts, e, types, arrays["patches"], grids, e)
    np.testing.assert_allclose(outputs["vision"], arrays["vision_out"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(outputs["aligner"][:6], arrays["aligner_out"], rtol=0, atol=1e-5)
    assert (np.asarray(outputs["aligner"])[6:] == 0).all()
    out = np.asarray(out)
    np.testing.assert_array_equal(out[arrays["token_types"] == 1], outputs["aligner"][:6])
    for kind, name in enumerate(("start", None, "newline", "end")):
        if name:
            assert (out[arrays["token_types"] == kind] == tensors[f"image_{name}"]).all()
    assert (out[arrays["token_types"] == -1] == 1).all()


def test_official_names_and_sizes():
    """The published tower: 266 tensors of 485,268,480 numbers, and the map to them and back."""
    cfg = small_config(dim=5120, vision_n_layers=32, image_token_id=0)
    shapes = official_shapes(jax.eval_shape(lambda: Parts(cfg)))
    size = lambda part: sum(math.prod(s) for name, s in shapes.items() if name.startswith(part))
    assert (size("vision."), size("aligner."), size("image_")) == (411_842_560, 73_410_560, 15_360)
    assert len(shapes) == 266
    block = {name.removeprefix("vision.blocks.31."): s for name, s in shapes.items() if ".31." in name}
    assert block == {
        "norm1.weight": (1024,), "attn.wqkv.weight": (3072, 1024), "attn.wqkv.bias": (3072,),
        "attn.wo.weight": (1024, 1024), "attn.wo.bias": (1024,), "norm2.weight": (1024,),
        "mlp.w1.weight": (5632, 1024), "mlp.w2.weight": (1024, 2816),
    }  # fmt: skip
    assert shapes["vision.patch_embed.proj.weight"] == (1024, 588) and shapes["aligner.w1.weight"] == (5120, 9216)
    for name, tensor in to_official(loaded(CFG)).items():
        np.testing.assert_array_equal(tensor, rule(CFG)[name])


def test_optimizer_groups():
    """Fused projections are matrices of their own; the tower's factor spares its last norm and the aligner."""
    params = nnx.state(jax.eval_shape(lambda: Parts(CFG)), nnx.Param)
    groups = dict(
        (".".join(map(str, path)), v.get_value())
        for path, v in nnx.to_flat_state(v41_groups(params, vision_factor=0.25))
    )
    parts = {name: g.matrix.output_split for name, g in groups.items() if g.rule == "muon"}
    split = {"vision.blocks.attn.wqkv.weight": 3, "vision.blocks.mlp.w1": 2}
    ones = ["vision.patch_embed.proj.weight", "vision.blocks.attn.wo.weight", "vision.blocks.mlp.w2"]
    assert parts == split | dict.fromkeys([*ones, "aligner.w1.weight", "aligner.w2.weight"], 1)
    slow = {name for name in groups if name.startswith("vision.") and name != "vision.norm"}
    assert {name for name, g in groups.items() if g.factor == 0.25} == slow
    assert {name for name, g in groups.items() if g.decay and g.rule == "adamw"} == {
        "vision.norm", "vision.blocks.norm1", "vision.blocks.norm2",
    }  # fmt: skip


@given(data=st.data(), block=st.sampled_from([1, 5, 8, 64]), chunk=st.sampled_from([(0, 23), (9, 16)]))
def test_blocked_attention_equals_whole_mask(data, block, chunk):
    """Values and gradients, whatever the images' lengths; padding in between and at the end; some of the queries."""
    lengths = data.draw(st.lists(st.integers(1, 12), max_size=5))
    (start, end), p = np.zeros((2, 23), int).tolist(), 0
    for length in lengths:
        stop, skip = min(p + length, 23), data.draw(st.integers(0, 2))
        start[p:stop], end[p:stop] = [p] * (stop - p), [stop] * (stop - p)
        p = min(stop + skip, 23)
    r = np.random.RandomState(len(lengths))
    qkv, weight = r.standard_normal((3, 23, 2, 4)), r.standard_normal((23, 2, 4))
    args = (np.float32(qkv * 2), np.array(start, np.int32), np.array(end, np.int32), np.float32(weight))
    got, want = _attention(block, chunk, *args), _attention(0, chunk, *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert (np.asarray(got[0])[np.array(end[slice(*chunk)]) == 0] == 0).all()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attention(block, chunk, qkv, start, end, weight):
    core = functools.partial(attend_images, block=block) if block else attend_images_reference
    own = slice(*chunk)
    o, back = jax.vjp(lambda qkv: core(qkv[0][own], *qkv[1:], start[own], end[own]), qkv)
    return o, back(weight[own])


def test_attention_of_large_logits_is_finite():
    qkv = np.float32(1e3 * np.random.RandomState(0).standard_normal((3, 23, 2, 4)))
    out = _attention(5, (0, 23), qkv, np.zeros(23, int), np.full(23, 23), np.ones((23, 2, 4), np.float32))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))


def test_attention_takes_linear_memory():
    def scratch(n):
        x, i = jax.ShapeDtypeStruct((n, 2, 8), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
        loss = lambda q, k, v, start, end: attend_images(q, k, v, start, end, 64).sum()
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, i, i).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert scratch(8192) < 5 * scratch(2048)


def test_rows_turn_the_first_half_of_the_pairs():
    """A channel j and its partner j + K / 2 turn by row * f_j, or by column * f in the second half (V4.1 2.1.1)."""
    cfg = small_config(vision_n_layers=1, image_token_id=0)
    at = vision.compute_angles(cfg, jnp.array([3]), jnp.array([50]))
    x = np.random.RandomState(0).standard_normal(64).astype(np.float32)
    got = np.asarray(vision.rotate_halves(x[None], at))[0]
    for j in range(32):
        angle = (3 if j < 16 else 50) * 10000 ** (-2 * (j % 16) / 32)
        c, s = math.cos(angle), math.sin(angle)
        np.testing.assert_allclose(got[j], x[j] * c - x[j + 32] * s, atol=1e-5)
        np.testing.assert_allclose(got[j + 32], x[j + 32] * c + x[j] * s, atol=1e-5)


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(st.lists(SIZES, max_size=3), st.integers(0, 1), st.integers(0, 2))
def test_packed_images_equal_loops(sizes, gap, start):
    """Every image alone by loops: features, cells, and the positions that show them."""
    while sum(h * w for h, w in sizes) > P:
        sizes = sizes[:-1]
    grids = [(i, start * i, h, w) for i, (h, w) in enumerate(sizes)]
    grids = [(0, 0, 0, 0)] * gap + grids
    out, outputs, de, grads = run(lines(grids), pixels(sizes))
    types, p, c = types_of(grids), 0, 0
    for (row, start, h, w), image in ((g, pixels([g[2:]], g[2] * g[3])) for g in grids if g[2]):
        x, y = image_by_loops(image, h, w, CFG, rule(CFG))
        np.testing.assert_allclose(outputs["vision"][p : p + h * w], x, rtol=0, atol=2e-5)
        np.testing.assert_allclose(outputs["aligner"][c : c + len(y)], y, rtol=0, atol=2e-5)
        shown = out[row, start : start + len(layout(h, w))]
        np.testing.assert_array_equal(shown[np.array(layout(h, w)) == 1], outputs["aligner"][c : c + len(y)])
        p, c = p + h * w, c + len(y)
    assert (outputs["vision"][p:] == 0).all() and (outputs["aligner"][c:] == 0).all()
    text = types == -1
    np.testing.assert_array_equal(out[text], EMBEDDINGS[text])
    for kind, name in ((0, "start"), (2, "newline"), (3, "end")):
        assert (out[types == kind] == rule(CFG)[f"image_{name}"]).all()
        np.testing.assert_allclose(grads[f"image_{name}"], WEIGHT[types == kind].sum(0), atol=1e-5)
    np.testing.assert_array_equal(de, np.where(text[..., None], WEIGHT, 0))
    assert all(np.isfinite(g).all() for g in grads.values())
    moved = {name.partition(".")[0] for name, g in grads.items() if np.abs(g).max() > 0}
    assert moved == ({"vision", "aligner", "image_start", "image_newline", "image_end"} if sizes else set())


# Rows in no order; cells that lie in another chunk or row stand where this one's own are, modulo the chunk.
PACKED = [(2, 4, 4, 1), (0, 8, 3, 5), (1, 5, 2, 5), (1, 14, 1, 1)]


def test_packed_images_equal_each_alone():
    """An image among lines and patches of padding: the same outputs, and gradients that add up to the packed ones."""
    out, outputs, _, grads = one_device()
    total, p = dict.fromkeys(grads, 0), 0
    for g in PACKED:
        types, n = types_of([g]), g[2] * g[3]
        alone, outputs_alone, _, grads_alone = run(lines([g]), pixels([g[2:]]), types, WEIGHT * (types >= 0)[..., None])
        np.testing.assert_allclose(outputs_alone["vision"][:n], outputs["vision"][p : p + n], rtol=0, atol=1e-5)
        np.testing.assert_allclose(alone[types >= 0], out[types >= 0], rtol=0, atol=1e-5)
        total, p = {name: x + grads_alone[name] for name, x in total.items()}, p + n
    for name, grad in grads.items():
        np.testing.assert_allclose(total[name], grad, rtol=0, atol=1e-5 * (1 + np.abs(grad).max()), err_msg=name)


@functools.cache
def one_device():
    with jax.set_mesh(make_mesh()):
        return run(lines(PACKED), pixels([g[2:] for g in PACKED]))


def groups_of(n_groups, n_patches=20):
    """`PACKED` in groups of their rows."""
    members = [[g for g in PACKED if g[0] // (B // n_groups) == i] for i in range(n_groups)]
    grids = np.stack([lines([(-1, -1, -1, -1), *m], N + 1) for m in members])
    return grids, np.stack([pixels([g[2:] for g in m], n_patches) for m in members])


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
MESHES = [((2, 1, 4), 2), ((1, 2, 1), 4), ((2, 2, 2), 0), slow((2, 2, 2), 4), slow((1, 1, 8), 1), slow((4, 1, 1), 0)]


@pytest.mark.parametrize("shape, n_groups", MESHES)
def test_groups_on_a_mesh_equal_one_device(shape, n_groups):
    """Groups with their rows, several on a device, or all patches everywhere (0); chunks cut images."""
    with jax.set_mesh(make_mesh(*shape)):
        grids, patches = groups_of(n_groups, 30) if n_groups else (lines(PACKED), pixels([g[2:] for g in PACKED]))
        got = run(grids, patches, types_of(PACKED))
    (out, outputs, de, grads), (out_1, outputs_1, de_1, grads_1) = got, one_device()
    np.testing.assert_allclose(out, out_1, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(de, de_1)
    for name in outputs:
        real = lambda x: np.sort(x[np.abs(x).max(-1) > 0], axis=0)
        np.testing.assert_allclose(real(outputs[name]), real(outputs_1[name]), rtol=0, atol=1e-5)
    for name, grad in grads.items():
        scale = np.abs(grads_1[name]).max()
        np.testing.assert_allclose(grad, grads_1[name], rtol=0, atol=1e-5 * scale + 1e-6, err_msg=name)


def test_no_image_no_patches():
    """Arrays of no length, and types that no image covers: delimiters are there, cells are zero."""
    types = types_of([(0, 2, 4, 4)])
    for patches, grids in ((pixels([], 0), lines([], 0)), (pixels([]), lines([]))):
        out, _, de, grads = run(grids, patches, types)
        assert (out[types == 1] == 0).all() and (out[types == 0] == rule(CFG)["image_start"]).all()
        np.testing.assert_array_equal(de, WEIGHT * (types < 0)[..., None])
        assert all((g == 0).all() for name, g in grads.items() if not name.startswith("image_"))


def test_cells_show_only_where_the_types_say():
    """A grid over text positions leaves them alone, and its image gets no gradient from them."""
    grids = lines([(0, 2, 4, 4), (1, 2, 4, 4)])
    out, _, _, grads = run(grids, pixels([(4, 4), (4, 4)]), types_of([(0, 2, 4, 4)]))
    np.testing.assert_array_equal(out[1:], EMBEDDINGS[1:])
    alone = run(lines([(0, 2, 4, 4)]), pixels([(4, 4)]))[3]
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, alone[name], rtol=0, atol=1e-5 * (1 + np.abs(grad).max()), err_msg=name)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=6), st.integers(1, 4))
def test_bound_of_cells(sizes, r):
    cells = sum(-(-h // r) * -(-w // r) for h, w in sizes)
    patches = sum(h * w for h, w in sizes)
    assert cells <= max_cells(patches, len(sizes), r) <= patches


def test_the_bound_of_cells_is_reached_by_strips():
    assert max_cells(4 * 7, 4, 3) == 4 * 3


zeros = lambda *shape, dtype=np.float32: np.zeros(shape, dtype)
BAD = {
    r"floats \[P, 3, 2, 2\].*vision_patch_size = 2.*found float32\[8, 3, 14, 14\]": {"patches": zeros(8, 3, 14, 14)},
    r"floats \[P, 3, 2, 2\].*found int32\[8, 3, 2, 2\]": {"patches": zeros(8, 3, 2, 2, dtype=np.int32)},
    r"integers \[n, 4\] for patches \[8, 3, 2, 2\], found int32\[1, 3\]": {"grids": zeros(1, 3, dtype=np.int32)},
    r"integers \[n, 4\].*found float32\[1, 4\]": {"grids": zeros(1, 4)},
    r"integers \[2, n, 4\].*found int32\[1, 4\]": {"patches": zeros(2, 8, 3, 2, 2)},
    r"token_types must be integers \[4, 24\].*found int32\[4, 23\]": {"types": zeros(B, S - 1, dtype=np.int32)},
    r"divide the 4 rows.* found 3 groups": {
        "patches": zeros(3, 8, 3, 2, 2),
        "grids": zeros(3, 1, 4, dtype=np.int32),
    },
    r"need 9 patches, found 8": {"grids": np.array([[0, 0, 3, 3]])},
    r"rows in image_grids must be 0 to 3, found \[4\]": {"grids": np.array([[4, 0, 2, 2]])},
    r"no vision tower.*found float32\[8, 3, 2, 2\]": {"cfg": small_config()},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused(message):
    good = {"types": np.full((B, S), -1, np.int32), "patches": np.zeros((8, 3, 2, 2), np.float32)}
    a = good | {"grids": np.zeros((1, 4), np.int32), "cfg": CFG} | BAD[message]
    place = lambda x: jax.reshard(jnp.asarray(x), act_spec(x.ndim))
    with pytest.raises(ValueError, match=message):
        images.embed_images(None, place(EMBEDDINGS), place(a["types"]), a["patches"], a["grids"], a["cfg"], jnp.float32)
