# SPDX-License-Identifier: Apache-2.0
"""One layer: hyper-connected attention, then hyper-connected experts; and the MTP block made from it."""

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.mesh import act_spec
from dsv4_jax.model import hyper, moe
from dsv4_jax.model.attention import Attention, Tables
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.params import Params, linear, rms_norm


class Block(nnx.Module):
    """A layer of the given spec, or a stack of equal layers for a scan (section 2)."""

    def __init__(self, cfg: ModelConfig, make: Params, spec: LayerSpec, layers: range | None = None):
        self.cfg, self.hashed = cfg, spec.hashed
        self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale = hyper.site(make, cfg)
        self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale = hyper.site(make, cfg)
        self.attn_norm = make.ones(("norm", cfg.dim))
        self.ffn_norm = make.ones(("norm", cfg.dim))
        self.attn = Attention(cfg, make, spec.ratio)
        self.ffn = moe.MoE(cfg, make, layers, spec.hashed)

    def __call__(
        self,
        x_BSND: jax.Array,
        ids_BS: jax.Array,
        at: Tables,
        dtype: jnp.dtype,
        forced_BSk: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The streams after the layer, and what the layer tells.

        Told, by name: `experts` [B, S, k], `load` [E] of real tokens, `balance` and `indexer`
        (losses summed over real tokens), `router_scores` [B, S, E], `topk` [B, S, k] where selected.
        """
        cfg = self.cfg
        with jax.named_scope("attention"):
            mix = hyper.mix(x_BSND, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, cfg)
            u = rms_norm(hyper.collapse(x_BSND, mix.pre_BSN), cfg.norm_eps, self.attn_norm)
            y, attended = self.attn(u, at, dtype)
            x_BSND = hyper.expand(y, x_BSND, mix)
        with jax.named_scope("experts"):
            mix = hyper.mix(x_BSND, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, cfg)
            u = rms_norm(hyper.collapse(x_BSND, mix.pre_BSN), cfg.norm_eps, self.ffn_norm)
            real = jax.reshard(at.docs.first_BS < at.docs.first_BS.shape[1], act_spec(2))
            y, routing = self.ffn(u, ids_BS, real, forced_BSk, dtype)
            x_BSND = hyper.expand(y, x_BSND, mix)
        told = {
            "experts": routing.experts_BSk,
            "load": moe.loads(routing, real, cfg.n_routed_experts),
            "balance": jnp.zeros(()) if self.hashed else moe.balance_loss(routing, at.docs),
            "indexer": (attended.kl_BS * real).sum(),
            "router_scores": routing.scores_BSE,
        }
        if attended.topk_BSk is not None:
            told["topk"] = attended.topk_BSk
        return x_BSND, told


class MTP(Block):
    """Predicts the token after the next from the streams and the next token (V3 section 2.2)."""

    def __init__(self, cfg: ModelConfig, make: Params):
        super().__init__(cfg, make, LayerSpec(ratio=0, hashed=False))
        D = cfg.dim
        self.e_proj = make.kernel(("embed", D), ("model", D))
        self.h_proj = make.kernel(("embed", D), ("model", D))
        self.enorm, self.hnorm, self.norm = (make.ones(("norm", D)) for _ in range(3))
        self.hc_head_fn, self.hc_head_base, self.hc_head_scale = hyper.head(make, cfg)

    def predict(
        self, x_BSND: jax.Array, e_BSD: jax.Array, ids_BS: jax.Array, at: Tables, dtype: jnp.dtype
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Features [B, S, D] for the head, from the last streams and the next tokens' embeddings."""
        cfg = self.cfg
        e = linear(rms_norm(e_BSD, cfg.norm_eps, self.enorm), self.e_proj, dtype)
        h = linear(rms_norm(x_BSND, cfg.norm_eps, self.hnorm), self.h_proj, dtype)
        z, told = self((h + e[:, :, None]).astype(x_BSND.dtype), ids_BS, at, dtype)
        h = hyper.collapse_head(z, self.hc_head_fn, self.hc_head_base, self.hc_head_scale, cfg)
        return rms_norm(h, cfg.norm_eps, self.norm), told
