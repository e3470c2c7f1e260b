# SPDX-License-Identifier: Apache-2.0
"""Models for tests: the golden ones, compiled once, and small ones made for a purpose."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from support import golden_weights

import dsv4_jax as ds
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.model.token_map import make_token_map
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.weights.names import official_shapes, official_tensors


def small_config(**changes: Any) -> ds.ModelConfig:
    """One CSA layer with learned routing and an MTP block; everything as small as it goes."""
    fields = dict(
        vocab_size=64,
        dim=16,
        n_layers=1,
        n_heads=2,
        head_dim=8,
        rope_head_dim=4,
        q_lora_rank=8,
        o_groups=2,
        o_lora_rank=4,
        moe_inter_dim=8,
        n_routed_experts=4,
        n_activated_experts=2,
        compress_ratios=(4, 0),
        n_hash_layers=0,
        window_size=2,
        index_n_heads=16,
        index_head_dim=8,
        index_topk=2,
        original_seq_len=64,
    )
    return ds.ModelConfig(**(fields | changes))


def draft_configs(**changes: Any) -> dict[str, ds.ModelConfig]:
    """Models that draft with the MTP block and with DSpark; few tokens, so that drafts are accepted by chance."""
    fields = dict(vocab_size=16, window_size=6, hc_sinkhorn_iters=2, remat="none") | changes
    mtp = small_config(n_layers=2, compress_ratios=(4, 8, 0), n_hash_layers=1, **fields)
    dspark = small_config(
        dspark_target_layer_ids=(0,),
        dspark_block_size=3,
        dspark_noise_token_id=15,
        dspark_markov_rank=4,
        dspark_n_routed_experts=4,
        dspark_n_activated_experts=2,
        **fields,
    )
    return {"mtp": mtp, "dspark": dspark}


def empty_model(cfg: ds.ModelConfig) -> ds.DeepSeek:
    """A model of zeros, without the compilation that random numbers cost."""
    shapes = jax.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0)))
    place = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())
    return jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), place), shapes)


def loaded_model(cfg: ds.ModelConfig, tensors: Mapping[str, np.ndarray]) -> ds.DeepSeek:
    """A model filled with official tensors."""
    model = empty_model(cfg)
    ds.load_official(model, tensors)
    if model.token_map is not None:  # in no official checkpoint
        model.token_map.set_value(jnp.asarray(make_token_map(cfg)))
    return model


def ruled_model(cfg: ds.ModelConfig, seed: int = 0) -> ds.DeepSeek:
    """A model with weights of the golden files' rule: no tensor is zero or one throughout."""
    model = empty_model(cfg)
    routed = {"n_routed_experts": cfg.n_routed_experts, "n_activated_experts": cfg.n_activated_experts}
    ds.load_official(model, golden_weights.weights({"tensors": official_shapes(model), "weight_seed": seed} | routed))
    return model


def computed_as(model: ds.DeepSeek, **compute: Any) -> ds.DeepSeek:
    """The same model, computed in another way (keys of `ComputeConfig`)."""
    cfg = dataclasses.replace(model.cfg, **compute)
    graph = nnx.graphdef(jax.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, nnx.state(model))


def forward() -> Callable[..., ds.Output]:
    """A fresh compiled forward pass (model, ids) -> Output."""
    return jax.jit(lambda model, ids: model(ids))


class Losses(NamedTuple):
    """Weights of the objective: of every position's two cross-entropies, of the layers' own sums."""

    targets: Any
    ce: Any
    mtp_targets: Any
    mtp_ce: Any
    indexer: Any = 0.0
    balance: Any = 0.0


class Run(NamedTuple):
    """What one pass forward and back gives; gradients under the official names."""

    loss: float
    logits: np.ndarray
    mtp_logits: np.ndarray
    layers: list[dict[str, Any]]
    grads: dict[str, np.ndarray]


def position_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy of every position, in nats."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


@dataclasses.dataclass
class Golden:
    """A golden model, its numbers, and two compiled passes for its shape of ids (2 rows of 70)."""

    name: str
    remat: str = "full"

    def __post_init__(self):
        self.spec, self.fields, self.arrays = golden_weights.read(self.name)
        self.weights = golden_weights.weights(self.spec)
        self.cfg = dataclasses.replace(ds.model_config_from_official(self.fields), remat=self.remat)
        self.model = loaded_model(self.cfg, self.weights)
        self.ids = self.arrays["ids"]
        self.forward = forward()
        self._grad = jax.jit(jax.value_and_grad(_objective, argnums=1, has_aux=True), static_argnums=0)

    def run(self, ids: np.ndarray, segment_ids: np.ndarray, losses: Losses) -> Run:
        """One pass with gradients; all calls share one compilation."""
        graph, params, rest = nnx.split(self.model, nnx.Param, ...)
        losses = Losses(*(jnp.asarray(x) for x in losses))
        ids, segment_ids = jnp.asarray(ids), jnp.asarray(segment_ids)
        (loss, (logits, mtp, layers)), grads = self._grad(graph, params, rest, ids, segment_ids, losses)
        grads = official_tensors(self.model, grads)
        return Run(float(loss), np.asarray(logits), np.asarray(mtp), jax.tree.map(np.asarray, layers), grads)

    def next_token_loss(self, indexer: float = 0.0, balance: float = 0.0) -> Run:
        """The golden objective (mean cross-entropy of the next token), plus other terms."""
        shape = self.ids.shape
        mean = np.where(np.arange(shape[1]) < shape[1] - 1, 1 / (shape[0] * (shape[1] - 1)), 0.0)
        ce = np.broadcast_to(mean, shape).astype(np.float32)
        nothing = np.zeros(shape, np.float32)
        losses = Losses(np.roll(self.ids, -1, axis=1), ce, self.ids, nothing, indexer, balance)
        return self.run(self.ids, np.ones(shape, np.int32), losses)


def _objective(graph, params, rest, ids, segment_ids, losses: Losses):
    model = nnx.merge(graph, params, rest)
    out = model.hidden(Inputs(ids, segment_ids), collect=("streams",))
    head = whole(model.head)
    logits, mtp = head_logits(out.h, head), head_logits(out.mtp, head)
    loss = (position_losses(logits, losses.targets) * losses.ce).sum()
    loss += (position_losses(mtp, losses.mtp_targets) * losses.mtp_ce).sum()
    loss += losses.indexer * sum(report.indexer for report in out.layers)
    loss += losses.balance * sum(report.balance for report in out.layers)
    return loss, (logits, mtp, out.layers)


COLLECT = ("streams", "pre_mix", "topk", "candidates", "features", "vision")


def golden_v41(folder: Path) -> dict[str, Any]:
    """The golden model of V4.1, its numbers, and what a call gives; `folder` takes its token map."""
    spec, fields, arrays = golden_weights.read("v41_tiny")
    np.save(folder / "map.npy", np.arange(fields["vocab_size"]) // 2)
    cfg = ds.model_config_from_official(fields | {"engram_token_map": str(folder / "map.npy")})
    cfg = dataclasses.replace(cfg, remat="none")
    model = loaded_model(cfg, golden_weights.weights(spec))
    image = spec["image"]
    grids = np.array([[image["row"], image["start"], image["vit_h"], image["vit_w"]]])

    @jax.jit
    def call(model, ids, segment_ids, token_types, patches, grids, rows):
        return model(ids, segment_ids, token_types, patches, grids, rows, collect=COLLECT)

    inputs = [arrays["ids"], np.ones_like(arrays["ids"]), *(arrays[n] for n in ("token_types", "patches"))]
    out = call(model, *inputs, grids, arrays["engram_rows"])
    return dict(cfg=cfg, spec=spec, model=model, arrays=arrays, call=call, inputs=inputs, grids=grids, out=out)
