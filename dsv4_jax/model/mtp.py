# SPDX-License-Identifier: Apache-2.0
"""The multi-token prediction (MTP) block, made from a layer (V3 section 2.2)."""

import jax
import jax.numpy as jnp

from dsv4_jax.model import hyper
from dsv4_jax.model.block import Block, LayerReport, Tokens, collapse_streams, start_carry
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.params import Params, linear, rms_norm
from dsv4_jax.model.place import LayerCache


class MTP(Block):
    """A layer that predicts the token after the next, from the last streams and the next token's embedding."""

    def __init__(self, cfg: ModelConfig, make: Params):
        super().__init__(cfg, make, LayerSpec("window"))
        D = cfg.dim
        self.e_proj = make.kernel(("embed", D), ("model", D))
        self.h_proj = make.kernel(("embed", D), ("model", D))
        self.enorm, self.hnorm, self.norm = (make.ones(("norm", D)) for _ in range(3))
        if not cfg.hc_single_pass:
            self.hc_head_fn, self.hc_head_base, self.hc_head_scale = hyper.make_head(make, cfg)

    def predict(
        self, x_BSND: jax.Array, e_BSD: jax.Array, tokens: Tokens, dtype: jnp.dtype, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerReport]:
        """Compute the hidden states [B, S, D] for the head, and the layer's report with its streams collected.

        Args:
            x_BSND: streams after the last layer.
            e_BSD: embeddings of the next tokens.
            tokens: what layers read of the batch.
            dtype: type of the large products.
            cache: cache of the block; None in training.
        """
        cfg = self.cfg
        e = linear(rms_norm(e_BSD, cfg.norm_eps, self.enorm), self.e_proj, dtype)
        h = linear(rms_norm(x_BSND, cfg.norm_eps, self.hnorm), self.h_proj, dtype)
        # Every stream starts as its projection plus that of the next token.
        start = start_carry(cfg, e, dtype)
        start = start._replace(x_BSND=(h + e[:, :, None]).astype(x_BSND.dtype))
        carry, report = self(start, tokens, dtype, cache=cache)
        u = collapse_streams(self, carry)
        return rms_norm(u, cfg.norm_eps, self.norm), report._replace(collected=report.collected.only(["streams"]))
