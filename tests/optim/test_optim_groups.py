# SPDX-License-Identifier: Apache-2.0
"""Parameter groups: the tables of V4 and V4.1 on the model, path rules on other trees, and what they do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import optim_reference as ref
from support.golden_models import small_config

import dsv4_jax as ds
from dsv4_jax import optim
from dsv4_jax.optim import Group, MatrixSpec, Role

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def params():
    """Every kind of layer and an MTP block, as shapes."""
    cfg = small_config(n_layers=3, compress_ratios=(0, 4, 8, 0), n_hash_layers=1)
    return nnx.state(jax.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0))), nnx.Param)


def by_path(params, groups):
    names = [path for path, _ in optim.find_roles(params)]
    return dict(zip(names, jax.tree.leaves(groups, is_leaf=lambda x: isinstance(x, Group)), strict=True))


def foreign():
    """A tree of somebody else's, with the parts of V4.1 that have rates of their own."""
    params = {
        "embed": RNG.normal(size=(20, 8)),
        "layers": [{"q": RNG.normal(size=(8, 4, 3)), "up": RNG.normal(size=(8, 16)), "scale": np.ones(8)}],
        "engram": {"embed": RNG.normal(size=(30, 4)), "wkv": RNG.normal(size=(4, 8)), "q_weight": np.ones(4)},
        "vision": {"w": RNG.normal(size=(6, 6)), "norm": np.ones(6)},
        "bias": np.zeros(3),
    }
    rules = [
        (r"engram\.embed", Role("table", part="engram")),
        (r"engram\.wkv", Role("matrix", part="engram")),
        (r"engram", Role("norm", part="engram")),
        (r"^embed", Role("table")),
        (r"\.q$", Role("matrix", MatrixSpec(0, 2))),
        (r"\.up$", Role("matrix", heads=4)),
        (r"vision\.w", Role("matrix", part="vision")),
        (r"vision", Role("norm", part="vision")),
        (r"scale", Role("norm")),
        (r"bias", Role("vector")),
    ]
    return jax.tree.map(lambda x: x.astype(np.float32), params), rules


def test_v4_table(params):
    """Section 2.4: Muon for matrices, queries whole; AdamW for embedding, head, norms, gates and biases."""
    groups = by_path(params, optim.v4_groups(params))
    adamw = [path for path, group in groups.items() if group.rule == "adamw"]
    names = {path.rpartition(".")[2] for path in adamw}
    assert names == {
        "embed", "head", "norm", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "enorm", "hnorm", "ape", "attn_sink",
        "hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale", "hc_head_base", "hc_head_scale",
    }  # fmt: skip
    assert {group.decay for group in groups.values()} == {0.1} and {g.factor for g in groups.values()} == {1.0}
    muon = {path.rpartition(".")[2]: g.matrix for path, g in groups.items() if g.rule == "muon"}
    assert muon["wq_b"] == muon["w1"] == muon["wo_a"] == MatrixSpec()
    assert muon["hc_attn_fn"].output_split == (4, 4, 16)
    assert [g.matrix.output_split for p, g in groups.items() if p.endswith("compressor.wkv")] == [2, 2, 1]


def test_v41_table(params):
    """Section 2.5: heads one by one, the head's kernel with its vocabulary last, no decay but for matrices, norms."""
    groups = by_path(params, optim.v41_groups(params))
    cfg = small_config()
    last = lambda name: {g for path, g in groups.items() if path.rpartition(".")[2] == name}
    assert last("embed") == {Group("sinkhorn", rows=-2)} and last("head") == {Group("sinkhorn", rows=-1)}
    assert {g.matrix.output_split for g in last("wq_b")} == {cfg.n_heads, cfg.index_n_heads}
    assert last("ape") == last("attn_sink") == last("hc_ffn_scale") == {Group("adamw")}
    assert last("q_norm") == last("norm") == {Group("adamw", 0.1)}
    assert last("w2") == last("weight") == last("wo_a") == {Group("muon", 0.1)}
    assert {g.factor for g in groups.values()} == {1.0}


def test_foreign_tree():
    params, rules = foreign()
    groups = optim.v41_groups(params, rules, frozen=r"^vision\.w")
    assert groups["engram"]["embed"] == Group("sinkhorn", 0.0, 5.0)
    assert groups["engram"]["wkv"] == Group("muon", 0.1, 5.0)
    assert groups["engram"]["q_weight"] == groups["layers"][0]["scale"] == Group("adamw", 0.1)
    assert groups["layers"][0]["up"].matrix == MatrixSpec(output_split=4)
    assert groups["vision"]["w"] == Group("frozen") and groups["vision"]["norm"] == Group("adamw", 0.1, 0.1)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rules: rules[:-1], "no rule matches 'bias'"),
        (lambda rules: [*rules, ("head", Role("table"))], "no leaf is left for the rule 'head'"),
        (lambda rules: [("", Role("vector")), *rules], r"no leaf is left for the rule .* and 5 more"),
        (lambda rules: None, "no role is declared for 'bias'"),
    ],
)
def test_rules_are_strict(change, message):
    params, rules = foreign()
    with pytest.raises(ValueError, match=message):
        optim.deepseek_v4(0.1, params, change(rules))
    with pytest.raises(ValueError, match="frozen = 'tower' matches no path"):
        optim.deepseek_v41(0.1, params, rules, frozen="tower")


def test_three_steps_against_float64():
    """Every rule with its decay, factor and momentum; a frozen leaf has no state and does not move."""
    params, rules = foreign()
    tx = optim.deepseek_v41(
        lambda count: 0.01 * (count + 1) ** 0, params, rules, frozen=r"^vision\.w", vision_factor=0.5
    )
    gradients = [jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), params) for _ in range(3)]
    state, got = tx.init(params), params
    assert sum(x.size for x in jax.tree.leaves(state)) < 2.2 * sum(x.size for x in jax.tree.leaves(params))
    for g in gradients:
        updates, state = jax.jit(tx.update)(g, state, got)
        got = optax.apply_updates(got, updates)
    pick = lambda tree, *path: functools.reduce(lambda node, key: node[key], path, tree)
    history = lambda *path: [pick(g, *path) for g in gradients]
    for path, want in {
        ("embed",): ref.sinkhorn_balanced(history("embed"), params["embed"]),
        ("engram", "embed"): ref.sinkhorn_balanced(history("engram", "embed"), params["engram"]["embed"], 0.05),
        ("engram", "wkv"): ref.muon(history("engram", "wkv"), params["engram"]["wkv"], 0.05),
        ("engram", "q_weight"): ref.adamw(history("engram", "q_weight"), params["engram"]["q_weight"]),
        ("vision", "norm"): ref.adamw(history("vision", "norm"), params["vision"]["norm"], 0.005),
        ("vision", "w"): params["vision"]["w"],
        ("bias",): ref.adamw(history("bias"), params["bias"], decay=0),
    }.items():
        np.testing.assert_allclose(pick(got, *path), want, atol=1e-5, err_msg=str(path))
    np.testing.assert_array_equal(got["vision"]["w"], params["vision"]["w"])
    for h in range(4):
        for name, block in (("q", np.s_[:, h]), ("up", np.s_[:, 4 * h : 4 * h + 4])):
            want = ref.muon([g[block] for g in history("layers", 0, name)], params["layers"][0][name][block])
            np.testing.assert_allclose(got["layers"][0][name][block], want, atol=1e-5)


def test_adamw_is_optax_adamw_and_not_nesterovs():
    params, rules = foreign()
    ours = optim.grouped(0.01, optim.adamw_groups(params, rules))
    theirs = optax.adamw(0.01, 0.9, 0.95, 1e-20, weight_decay=0.1)
    a, b = (params, ours.init(params)), (params, theirs.init(params))
    for _ in range(3):
        g = jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), params)
        for tx, run in ((ours, a), (theirs, b)):
            updates, state = tx.update(g, run[1], run[0])
            run = (optax.apply_updates(run[0], updates), state)
            a, b = (run, b) if tx is ours else (a, run)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a[0], b[0])


def test_decay_can_be_chosen():
    params, rules = foreign()
    zeros = jax.tree.map(jnp.zeros_like, params)
    for make in (optim.deepseek_v4, optim.deepseek_v41):
        tx = make(0.1, params, rules, weight_decay=0.5)
        updates, _ = tx.update(zeros, tx.init(params), params)
        np.testing.assert_allclose(updates["layers"][0]["up"], -0.05 * params["layers"][0]["up"], rtol=1e-5)


def test_zero_gradients_only_decay():
    """Muon leaves and norms by 1 - lr decay, the rest not by a bit; nothing is NaN."""
    params, rules = foreign()
    tx = optim.deepseek_v41(0.1, params, rules)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    ratio = jax.tree.map(lambda u, p: (u / np.where(p == 0, 1, p)).mean(), updates, params)
    want = {"up": -0.01, "q": -0.01, "scale": -0.01}
    assert ratio["layers"][0] == pytest.approx(want, rel=1e-5)
    assert ratio["engram"] == pytest.approx({"embed": 0, "wkv": -0.05, "q_weight": -0.01}, rel=1e-5)
    assert ratio["embed"] == ratio["bias"] == 0


def test_factor_may_be_a_schedule():
    """The vision tower at rest until a step, while its state is kept."""
    params, rules = foreign()
    tx = optim.deepseek_v41(0.1, params, rules, vision_factor=lambda count: jnp.where(count < 2, 0.0, 0.5))
    state, moved = tx.init(params), []
    for _ in range(4):
        updates, state = tx.update(params, state, params)
        moved.append(bool(np.asarray(updates["vision"]["w"]).any()))
        assert np.asarray(updates["embed"]).any()
    assert moved == [False, False, True, True]


def test_description_tells_the_update():
    """A line a leaf, and the root mean square it foretells is the one of the first step."""
    params, rules = foreign()
    groups = optim.v41_groups(params, rules, frozen=r"vision\.w")
    lines = optim.describe(params, groups).splitlines()
    assert len(lines) == 1 + len(jax.tree.leaves(params))
    assert next(line for line in lines if ".up" in line).split() == [
        "layers.0.up", "8", "x", "16", "muon", "4", "of", "8", "x", "4", "0.1", "1", "0.18",
    ]  # fmt: skip
    tx = optim.grouped(
        1.0, jax.tree.map(lambda g: g._replace(decay=0.0), groups, is_leaf=lambda x: isinstance(x, Group))
    )
    g = jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), params)
    updates, _ = tx.update(g, tx.init(params), params)
    for line, u in zip(lines[1:], jax.tree.leaves(updates), strict=True):
        assert np.sqrt((np.asarray(u) ** 2).mean()) == pytest.approx(float(line.split()[-1]), abs=2e-3), line


def test_needs_parameters():
    params, rules = foreign()
    tx = optim.deepseek_v4(0.1, params, rules)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
