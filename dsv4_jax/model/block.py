# SPDX-License-Identifier: Apache-2.0
"""One layer: Engram memory, hyper-connected attention, hyper-connected experts; and the MTP block made from it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.mesh import act_spec
from dsv4_jax.model import hyper, moe
from dsv4_jax.model.attention import Attention, Shared, make_empty_shared
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.engram import Engram
from dsv4_jax.model.params import Params, linear, rms_norm
from dsv4_jax.model.tables import Tables


class Tokens(NamedTuple):
    """What every layer may read of the batch.

    Attributes:
        ids_BS: token ids.
        at: tables of the packed rows.
        real_BS: positions that are no padding.
        image_BS: positions of images, delimiters included; None without images.
        engram_rows_BSLC: rows of the Engrams' tables; None without Engrams.
    """

    ids_BS: jax.Array
    at: Tables
    real_BS: jax.Array
    image_BS: jax.Array | None = None
    engram_rows_BSLC: jax.Array | None = None


class Stack(NamedTuple):
    """What goes down the stack of layers.

    Attributes:
        x_BSND: the residual streams.
        pre_BSN: input mix for the next sublayer, fp32; None if every sublayer computes its own.
        shared: what CSA2 layers hand down, by ratio.
    """

    x_BSND: jax.Array
    pre_BSN: jax.Array | None
    shared: dict[int, Shared]


def stack(cfg: ModelConfig, e_BSD: jax.Array, dtype: jnp.dtype) -> Stack:
    """The start: every stream is the embedding, the first input mix reads the first one."""
    B, S, D = e_BSD.shape
    x_BSND = jnp.broadcast_to(e_BSD[:, :, None], (B, S, cfg.hc_mult, D))
    pre = None
    if cfg.hc_single_pass:
        pre = jax.reshard(jnp.broadcast_to(jnp.eye(cfg.hc_mult)[0], (B, S, cfg.hc_mult)), act_spec(3))
    return Stack(x_BSND, pre, make_empty_shared(cfg, B, S, dtype))


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
        self, down: Stack, tokens: Tokens, dtype: jnp.dtype, forced_BSk: jax.Array | None = None
    ) -> tuple[Stack, dict[str, Any]]:
        """What goes down after the layer, and what the layer tells.

        Told, by name: `experts` [B, S, k], `load` (see there), `clamped` (activations of real tokens), `balance`
        and `indexer` (losses summed over real tokens), `router_scores` [B, S, E], `entering` [B, S, D]
        (the mean of the streams that attention reads), and where there are such, `topk` [B, S, k],
        `candidates` [B, S, blocks], `pre_mix` [B, S, N] and `recall` [3] (`indexer_recall` summed over queries).
        """
        cfg, at = self.cfg, tokens.at
        x_BSND = down.x_BSND
        if self.spec.engram >= 0:
            assert tokens.engram_rows_BSLC is not None  # the model makes them
            with jax.named_scope("engram"):
                rows_BSC = tokens.engram_rows_BSLC[:, :, self.spec.engram]
                text_BS = tokens.real_BS if tokens.image_BS is None else tokens.real_BS & ~tokens.image_BS
                x_BSND = self.engram(x_BSND, rows_BSC, text_BS, dtype)
        told: dict[str, Any] = {"entering": x_BSND.astype(jnp.float32).mean(2).astype(x_BSND.dtype)}
        with jax.named_scope("attention"):
            mix = hyper.compute_mix(x_BSND, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, cfg)
            pre = mix.pre_BSN if down.pre_BSN is None else down.pre_BSN
            u = rms_norm(hyper.collapse(x_BSND, pre), cfg.norm_eps, self.attn_norm)
            y, attended, shared = self.attn(u, down.shared, at, dtype)
            x_BSND = hyper.expand(y, x_BSND, mix)
        down = down._replace(x_BSND=x_BSND, shared=shared)
        down, routing, clamped = self.feed_forward(down, mix, tokens, forced_BSk, dtype)
        told |= {
            "experts": routing.experts_BSk,
            "load": self.load(routing, tokens),
            "clamped": clamped,
            "balance": jnp.zeros(()) if self.spec.hashed else moe.compute_balance_loss(routing, at.docs),
            "indexer": (attended.kl_BS * tokens.real_BS).sum(),
            "router_scores": routing.scores_BSE,
        }
        chosen = {"topk": attended.topk_BSk if self.spec.indexed else None, "candidates": attended.candidates_BSc}
        chosen["pre_mix"] = down.pre_BSN
        chosen["recall"] = None if attended.recall_BS3 is None else attended.recall_BS3.sum((0, 1))
        return down, told | {name: value for name, value in chosen.items() if value is not None}

    def feed_forward(
        self, down: Stack, before: hyper.Mix, tokens: Tokens, forced_BSk: jax.Array | None, dtype: jnp.dtype
    ) -> tuple[Stack, moe.Routing, jax.Array]:
        """The experts' half of the layer, after the attention site with the mix `before`; what `MoE` tells."""
        cfg, x_BSND = self.cfg, down.x_BSND
        with jax.named_scope("experts"):
            mix = hyper.compute_mix(x_BSND, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, cfg)
            pre = before.pre_BSN if cfg.hc_single_pass else mix.pre_BSN
            u = rms_norm(hyper.collapse(x_BSND, pre), cfg.norm_eps, self.ffn_norm)
            y, routing, clamped = self.ffn(u, tokens.ids_BS, tokens.real_BS, tokens.image_BS, forced_BSk, dtype)
            x_BSND = hyper.expand(y, x_BSND, mix)
        return down._replace(x_BSND=x_BSND, pre_BSN=mix.pre_BSN if cfg.hc_single_pass else None), routing, clamped

    def load(self, routing: moe.Routing, tokens: Tokens) -> jax.Array:
        """Real tokens that each expert got, fp32 [E]; with images, or a bias for them, [2, E] of text and images."""
        count = lambda kind_BS: moe.count_loads(routing, kind_BS, self.cfg.n_routed_experts)
        if tokens.image_BS is None and not self.cfg.modality_bias:
            return count(tokens.real_BS)
        image_BS = jnp.zeros_like(tokens.real_BS) if tokens.image_BS is None else tokens.image_BS
        return jnp.stack([count(tokens.real_BS & ~image_BS), count(tokens.real_BS & image_BS)])


class MTP(Block):
    """Predicts the token after the next from the streams and the next token (V3 section 2.2)."""

    def __init__(self, cfg: ModelConfig, make: Params):
        super().__init__(cfg, make, LayerSpec("window"))
        D = cfg.dim
        self.e_proj = make.kernel(("embed", D), ("model", D))
        self.h_proj = make.kernel(("embed", D), ("model", D))
        self.enorm, self.hnorm, self.norm = (make.ones(("norm", D)) for _ in range(3))
        if not cfg.hc_single_pass:
            self.hc_head_fn, self.hc_head_base, self.hc_head_scale = hyper.make_head(make, cfg)

    def predict(
        self, x_BSND: jax.Array, e_BSD: jax.Array, tokens: Tokens, dtype: jnp.dtype
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Features [B, S, D] for the head, from the last streams and the next tokens' embeddings."""
        cfg = self.cfg
        e = linear(rms_norm(e_BSD, cfg.norm_eps, self.enorm), self.e_proj, dtype)
        h = linear(rms_norm(x_BSND, cfg.norm_eps, self.hnorm), self.h_proj, dtype)
        start = stack(cfg, e, dtype)
        z, told = self(start._replace(x_BSND=(h + e[:, :, None]).astype(x_BSND.dtype)), tokens, dtype)
        return rms_norm(collapsed(self, z), cfg.norm_eps, self.norm), told


def collapsed(module: Any, down: Stack) -> jax.Array:
    """The streams after the last layer as one [B, S, D]: by the mix handed down, or by the module's `hc_head`."""
    if down.pre_BSN is not None:
        return hyper.collapse(down.x_BSND, down.pre_BSN)
    head = module.hc_head_fn, module.hc_head_base, module.hc_head_scale
    return hyper.collapse_head(down.x_BSND, *head, module.cfg)
