# SPDX-License-Identifier: Apache-2.0
"""One layer: Engram memory, hyper-connected attention, hyper-connected experts."""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.mesh import act_spec
from dsv4_jax.model import hyper, moe
from dsv4_jax.model.attention import Attention, Shared, make_empty_shared
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.engram import Engram
from dsv4_jax.model.params import Params, rms_norm
from dsv4_jax.model.place import LayerCache, LayerUpdate
from dsv4_jax.model.tables import Tables


class Tokens(NamedTuple):
    """What every layer may read of the batch.

    Attributes:
        ids_BS: token ids.
        tables: integer and angle tables of the packed rows; None for slots of draft blocks.
        real_BS: bool, positions that are no padding.
        image_BS: bool, positions of images, delimiters included; None without images.
        engram_rows_BSLC: rows of the Engrams' tables; None without Engrams.
    """

    ids_BS: jax.Array
    tables: Tables | None
    real_BS: jax.Array
    image_BS: jax.Array | None = None
    engram_rows_BSLC: jax.Array | None = None


class Carry(NamedTuple):
    """The carry of the scan over layers: what one layer hands to the next.

    Attributes:
        x_BSND: the residual streams.
        pre_BSN: input mix for the next sublayer, fp32; None if every sublayer computes its own.
        shared: entries and selections that CSA2 layers hand on, by compression ratio.
    """

    x_BSND: jax.Array
    pre_BSN: jax.Array | None
    shared: dict[int, Shared]


class Collected(NamedTuple):
    """Arrays of a layer that a caller can ask for by name (`collect`). None: not asked for, or the layer has none.

    Attributes:
        streams: residual streams after the layer, [B, S, N, D].
        pre_mix: input mix that the layer hands on, [B, S, N].
        topk: entries that its indexer selected, [B, S, k] in any order; -1 for none.
        candidates: blocks of entries in the pool that it made, [B, S, blocks].
        router_scores: the router's scores before the bias, [B, S, E].
        features: mean of the streams that its attention reads, [B, S, D], which draft blocks read.
    """

    streams: jax.Array | None = None
    pre_mix: jax.Array | None = None
    topk: jax.Array | None = None
    candidates: jax.Array | None = None
    router_scores: jax.Array | None = None
    features: jax.Array | None = None

    def only(self, names: Collection[str]) -> "Collected":
        """Drop all but the named ones."""
        return Collected(**{name: x for name, x in self._asdict().items() if name in names})


class LayerReport(NamedTuple):
    """What a layer reports beside its output.

    Attributes:
        experts: chosen experts, int32 [B, S, k].
        load: real tokens of every expert (see `Block.load`).
        clamped: number of the experts' activations of real tokens that the SwiGLU clamps.
        balance: balance loss, summed over real tokens; 0 in hashed layers.
        indexer: the indexer's loss, summed over real tokens; 0 without an indexer.
        recall: [3], `indexer_recall` summed over queries; None unless it is measured.
        collected: what the caller asked for.
        update: what to put into the cache of its attention; None without a cache.
    """

    experts: jax.Array
    load: jax.Array
    clamped: jax.Array
    balance: jax.Array
    indexer: jax.Array
    recall: jax.Array | None
    collected: Collected
    update: LayerUpdate | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
    """Hidden states of a batch before the head, and the reports of its layers.

    Attributes:
        h: normed hidden states [B, S, D] that the head turns into the next token.
        mtp: the same for the token after the next, or None without an MTP block.
        layers: report of every layer, in order; the MTP block's comes last.
        tables: integer and angle tables of the rows.
        images: outputs of the vision tower and of the aligner, by name; None without images.
    """

    h: jax.Array
    mtp: jax.Array | None
    layers: list[LayerReport]
    tables: Tables
    images: dict[str, jax.Array] | None = None


def start_carry(cfg: ModelConfig, e_BSD: jax.Array, dtype: jnp.dtype, capacity: int = 0) -> Carry:
    """Make the first layer's carry: every stream is the embedding, the first input mix reads the first stream.

    `capacity` is that of the cache, if there is one.
    """
    B, S, D = e_BSD.shape
    x_BSND = jnp.broadcast_to(e_BSD[:, :, None], (B, S, cfg.hc_mult, D))
    pre = None
    if cfg.hc_single_pass:
        pre = jax.reshard(jnp.broadcast_to(jnp.eye(cfg.hc_mult)[0], (B, S, cfg.hc_mult)), act_spec(3))
    return Carry(x_BSND, pre, make_empty_shared(cfg, B, S, dtype, capacity))


class Block(nnx.Module):
    """A layer of the given spec, or a stack of equal layers for a scan (section 2)."""

    def __init__(self, cfg: ModelConfig, make: Params, spec: LayerSpec, layers: range | None = None):
        self.cfg, self.spec = cfg, spec
        if spec.engram >= 0:
            self.engram = Engram(cfg, make, spec.engram)
        self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale = hyper.make_connection(make, cfg)
        self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale = hyper.make_connection(make, cfg)
        self.attn_norm = make.ones(("norm", cfg.dim))
        self.ffn_norm = make.ones(("norm", cfg.dim))
        self.attn = Attention(cfg, make, spec)
        self.ffn = moe.MoE(cfg, make, layers, spec.hashed)

    def __call__(
        self,
        carry: Carry,
        tokens: Tokens,
        dtype: jnp.dtype,
        forced_BSk: jax.Array | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Carry, LayerReport]:
        """Run the layer: the carry after it, and its report with everything collected.

        With a cache, `tokens` are a chunk that follows the tokens of the cache, and there is no balance loss.
        """
        cfg, tables = self.cfg, tokens.tables
        assert tables is not None
        x_BSND = carry.x_BSND
        # The Engram adds to the streams of text positions.
        if self.spec.engram >= 0:
            assert tokens.engram_rows_BSLC is not None  # the model makes them
            with jax.named_scope("engram"):
                rows_BSC = tokens.engram_rows_BSLC[:, :, self.spec.engram]
                text_BS = tokens.real_BS if tokens.image_BS is None else tokens.real_BS & ~tokens.image_BS
                x_BSND = self.engram(x_BSND, rows_BSC, text_BS, dtype)
        features = x_BSND.astype(jnp.float32).mean(2).astype(x_BSND.dtype)

        # Attention reads one mix of the streams [B, S, D] and its output goes into all of them.
        with jax.named_scope("attention"):
            mix = hyper.compute_mix(x_BSND, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, cfg)
            pre = mix.pre_BSN if carry.pre_BSN is None else carry.pre_BSN
            u = rms_norm(hyper.collapse(x_BSND, pre), cfg.norm_eps, self.attn_norm)
            y, attended, shared, update = self.attn(u, carry.shared, tables, dtype, cache)
            x_BSND = hyper.expand(y, x_BSND, mix)

        # So do the experts.
        carry = carry._replace(x_BSND=x_BSND, shared=shared)
        carry, routing, clamped = self.feed_forward(carry, mix, tokens, forced_BSk, dtype)
        unbalanced = self.spec.hashed or cache is not None
        report = LayerReport(
            experts=routing.experts_BSk,
            load=self.load(routing, tokens),
            clamped=clamped,
            balance=jnp.zeros(()) if unbalanced else moe.compute_balance_loss(routing, tables.docs),
            indexer=(attended.kl_BS * tokens.real_BS).sum(),
            recall=None if attended.recall_BS3 is None else attended.recall_BS3.sum((0, 1)),
            collected=Collected(
                streams=carry.x_BSND,
                pre_mix=carry.pre_BSN,
                topk=attended.topk_BSk if self.spec.indexed else None,
                candidates=attended.candidates_BSc,
                router_scores=routing.scores_BSE,
                features=features,
            ),
            update=update,
        )
        return carry, report

    def feed_forward(
        self, carry: Carry, before: hyper.Mix, tokens: Tokens, forced_BSk: jax.Array | None, dtype: jnp.dtype
    ) -> tuple[Carry, moe.Routing, jax.Array]:
        """Run the experts' sublayer after the attention with the mix `before`.

        Returns:
            carry: with the streams after the sublayer and the input mix for the next one.
            routing: the router's choice.
            clamped: number of activations of real tokens that the SwiGLU clamps.
        """
        cfg, x_BSND = self.cfg, carry.x_BSND
        with jax.named_scope("experts"):
            mix = hyper.compute_mix(x_BSND, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, cfg)
            pre = before.pre_BSN if cfg.hc_single_pass else mix.pre_BSN
            u = rms_norm(hyper.collapse(x_BSND, pre), cfg.norm_eps, self.ffn_norm)
            y, routing, clamped = self.ffn(u, tokens.ids_BS, tokens.real_BS, tokens.image_BS, forced_BSk, dtype)
            x_BSND = hyper.expand(y, x_BSND, mix)
        return carry._replace(x_BSND=x_BSND, pre_BSN=mix.pre_BSN if cfg.hc_single_pass else None), routing, clamped

    def load(self, routing: moe.Routing, tokens: Tokens) -> jax.Array:
        """Count the real tokens of every expert, fp32 [E].

        With images, or a bias for them, it is [2, E]: tokens of text, then of images.
        """
        count = lambda kind_BS: moe.count_loads(routing, kind_BS, self.cfg.n_routed_experts)
        if tokens.image_BS is None and not self.cfg.modality_bias:
            return count(tokens.real_BS)
        image_BS = jnp.zeros_like(tokens.real_BS) if tokens.image_BS is None else tokens.image_BS
        return jnp.stack([count(tokens.real_BS & ~image_BS), count(tokens.real_BS & image_BS)])


def collapse_streams(module: Any, carry: Carry) -> jax.Array:
    """Collapse the streams after the last layer to [B, S, D], by the mix handed on or by the module's `hc_head`."""
    if carry.pre_BSN is not None:
        return hyper.collapse(carry.x_BSND, carry.pre_BSN)
    head = module.hc_head_fn, module.hc_head_base, module.hc_head_scale
    return hyper.collapse_head(carry.x_BSND, *head, module.cfg)
