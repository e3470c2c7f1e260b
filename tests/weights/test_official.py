# SPDX-License-Identifier: Apache-2.0
"""The published models: their sizes to the last parameter, and the names and shapes of their files.

Nothing is allocated: the models are traced for their shapes only.
"""

import functools
import math
import re

import jax
import pytest
from flax import nnx
from support.golden_models import small_config

import dsv4_jax as ds
from dsv4_jax.weights.names import official_shapes

COMMON = dict(
    vocab_size=129280,
    head_dim=512,
    rope_head_dim=64,
    o_lora_rank=1024,
    window_size=128,
    index_n_heads=64,
    index_head_dim=128,
    n_shared_experts=1,
    n_activated_experts=6,
    n_hash_layers=3,
    n_mtp_layers=1,
    score_func="sqrtsoftplus",
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    original_seq_len=65536,
    rope_factor=16,
    beta_fast=32,
    beta_slow=1,
    dtype="fp8",
    expert_dtype="fp4",
    scale_fmt="ue8m0",
)
FLASH = COMMON | dict(
    dim=4096,
    n_layers=43,
    n_heads=64,
    q_lora_rank=1024,
    o_groups=8,
    index_topk=512,
    n_routed_experts=256,
    moe_inter_dim=2048,
    route_scale=1.5,
    compress_ratios=[0, 0] + [4, 128] * 20 + [4] + [0],
)
PRO = COMMON | dict(
    dim=7168,
    n_layers=61,
    n_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    index_topk=1024,
    n_routed_experts=384,
    moe_inter_dim=3072,
    route_scale=2.5,
    compress_ratios=[128, 128] + [4, 128] * 29 + [4] + [0],
)
MODELS = {"flash": FLASH, "pro": PRO}


@functools.cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    cfg = ds.model_config_from_official(MODELS[name])
    return official_shapes(jax.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0))))


def count(name: str, keep=lambda tensor: True) -> int:
    """Parameters, which are all numbers of the file but the routing tables' token ids."""
    return sum(math.prod(s) for n, s in shapes(name).items() if not n.endswith("tid2eid") and keep(n))


def test_parameter_counts():
    """Flash as published; Pro's follows from its file's size, which the next test has to the byte."""
    assert count("flash") == 290_942_289_362
    assert count("pro") == 1_598_837_347_742


@pytest.mark.parametrize(
    "name, main, mtp, indexers, streams",
    [("flash", 284.33e9, 6.61e9, 226e6, 34e6), ("pro", 1573.0e9, 25.84e9, 501e6, 84e6)],
)
def test_counts_of_parts(name: str, main: float, mtp: float, indexers: float, streams: float):
    assert count(name, lambda n: not n.startswith("mtp.")) == pytest.approx(main, rel=5e-5)
    assert count(name, lambda n: n.startswith("mtp.")) == pytest.approx(mtp, rel=1e-3)
    assert count(name, lambda n: ".indexer." in n) == pytest.approx(indexers, rel=2e-3)
    assert count(name, lambda n: n.startswith("layers.") and ".hc_" in n) == pytest.approx(streams, rel=1e-2)


def storage(name: str, shape: tuple[int, ...]) -> tuple[str, int, int]:
    """How section 13 stores a tensor: type, bytes, and bytes of its scales (0: it has none)."""
    n = math.prod(shape)
    if name.endswith("tid2eid"):
        return "I64", 8 * n, 0
    if re.search(r"hc_\w+$|ape$|attn_sink$|gate\.bias$", name):
        return "F32", 4 * n, 0
    if ".experts." in name:
        return "I8", n // 2, n // 32
    low = r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|shared_experts\.w\d|[eh]_proj"
    if re.search(rf"(^|\.)({low})\.weight$", name):
        return "FP8", n, math.ceil(shape[0] / 128) * math.ceil(shape[1] / 128)
    return "BF16", 2 * n, 0


@pytest.mark.parametrize(
    "name, counts, scales, size",
    [
        ("flash", dict(BF16=433, F32=417, FP8=375, I8=33792, I64=3), 34167, 159_609_485_896),
        ("pro", dict(BF16=619, F32=590, FP8=528, I8=71424, I64=3), 71952, 864_704_792_696),
    ],
)
def test_published_files_to_the_byte(name: str, counts: dict[str, int], scales: int, size: int):
    stored = [storage(n, s) for n, s in shapes(name).items()]
    assert {kind: sum(k == kind for k, _, _ in stored) for kind in counts} == counts
    assert sum(scale > 0 for _, _, scale in stored) == scales
    assert sum(n + scale for _, n, scale in stored) == size


def table(cfg: ds.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Section 13, written out: every tensor of a model under its official name, as (out, in)."""
    d, c, f, H, V, E = cfg.dim, cfg.head_dim, cfg.moe_inter_dim, cfg.n_heads, cfg.vocab_size, cfg.n_routed_experts
    dc, g, dg, J = cfg.q_lora_rank, cfg.o_groups, cfg.o_lora_rank, cfg.index_head_dim
    I = cfg.index_n_heads

    def compressor(ratio: int, width: int) -> dict:
        n = width * (2 if ratio == 4 else 1)
        return {"ape": (ratio, n), "wkv.weight": (n, d), "wgate.weight": (n, d), "norm.weight": (width,)}

    def block(ratio: int, hashed: bool) -> dict:
        t = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,)}
        for site in ("attn", "ffn"):
            t |= {f"hc_{site}_fn": (24, 4 * d), f"hc_{site}_base": (24,), f"hc_{site}_scale": (3,)}
        a = {"wq_a.weight": (dc, d), "q_norm.weight": (dc,), "wq_b.weight": (H * c, dc), "wkv.weight": (c, d)}
        a |= {"kv_norm.weight": (c,), "attn_sink": (H,)}
        a |= {"wo_a.weight": (g * dg, H * c // g), "wo_b.weight": (d, g * dg)}
        if ratio:
            a |= {f"compressor.{n}": s for n, s in compressor(ratio, c).items()}
        if ratio == 4:
            a |= {"indexer.wq_b.weight": (I * J, dc), "indexer.weights_proj.weight": (I, d)}
            a |= {f"indexer.compressor.{n}": s for n, s in compressor(4, J).items()}
        m = {"gate.weight": (E, d)}
        m |= {"gate.tid2eid": (V, cfg.n_activated_experts)} if hashed else {"gate.bias": (E,)}
        for expert in ("shared_experts", *(f"experts.{e}" for e in range(E))):
            m |= {f"{expert}.w1.weight": (f, d), f"{expert}.w3.weight": (f, d), f"{expert}.w2.weight": (d, f)}
        return t | {f"attn.{n}": s for n, s in a.items()} | {f"ffn.{n}": s for n, s in m.items()}

    ends = {"norm.weight": (d,), "hc_head_fn": (4, 4 * d), "hc_head_base": (4,), "hc_head_scale": (1,)}
    want = {"embed.weight": (V, d), "head.weight": (V, d)} | ends
    for i in range(cfg.n_layers):
        want |= {f"layers.{i}.{n}": s for n, s in block(cfg.compress_ratios[i], i < cfg.n_hash_layers).items()}
    mtp = block(0, False) | ends | {"e_proj.weight": (d, d), "h_proj.weight": (d, d)}
    mtp |= {"enorm.weight": (d,), "hnorm.weight": (d,)}
    return want | {f"mtp.0.{n}": s for n, s in mtp.items()}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes(name: str):
    assert shapes(name) == table(ds.model_config_from_official(MODELS[name]))


@pytest.mark.parametrize("ratios", [(0, 4, 3, 0), (4, 4, 4, 0), (7, 0, 7, 0)], ids=str)
def test_names_and_shapes_of_other_lists(ratios: tuple[int, ...]):
    cfg = small_config(n_layers=3, compress_ratios=ratios, n_hash_layers=1)
    assert official_shapes(jax.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0)))) == table(cfg)


def test_layer_kinds():
    """Flash: 2 window, 21 CSA, 20 HCA; Pro: 30 CSA, 31 HCA; three hashed layers and a window MTP block each."""
    for name, kinds in (("flash", {0: 2, 4: 21, 128: 20}), ("pro", {4: 30, 128: 31})):
        cfg = ds.model_config_from_official(MODELS[name])
        ratios = [spec.ratio for spec in cfg.layer_specs]
        assert {r: ratios.count(r) for r in set(ratios)} == kinds
        assert [spec.hashed for spec in cfg.layer_specs] == [True] * 3 + [False] * (cfg.n_layers - 3)
        assert cfg.compress_ratios[-1] == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"windw_size": 128}, "windw_size.*window_size"),
        ({"score_func": "sigmoid"}, "score_func.*sqrtsoftplus"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"compress_ratios": FLASH["compress_ratios"][:-1]}, "compress_ratios has 43 entries, expected 44"),
        ({"compress_ratios": [*FLASH["compress_ratios"], 0]}, "compress_ratios has 45 entries, expected 44"),
        ({"compress_ratios": [4, *FLASH["compress_ratios"][:-2], 4]}, "compress_ratios.*MTP"),
        ({"o_groups": 7}, "n_heads.*o_groups"),
        ({"n_activated_experts": 257}, "n_activated_experts"),
        ({"dim": 0}, "dim"),
    ],
)
def test_unusable_configurations_are_refused(change: dict, message: str):
    with pytest.raises(ds.ConfigError, match=message):
        ds.model_config_from_official(FLASH | change)


@pytest.mark.parametrize("key", ["dim", "n_layers", "compress_ratios", "moe_inter_dim"])
def test_missing_fields_are_named(key: str):
    with pytest.raises(ds.ConfigError, match=key):
        ds.model_config_from_official({k: v for k, v in FLASH.items() if k != key})
