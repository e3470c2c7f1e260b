# SPDX-License-Identifier: Apache-2.0
"""Draft several tokens at a time with DSpark, from the inputs of the backbone's target layers (V4.1 section 2.4.3).

A draft belongs to an anchor, a token up to which the text is known. Its n slots start as the anchor and n - 1 noise
tokens. Slot k predicts the token k + 1 positions after the anchor. Letters: B rows, S positions, A anchors of a row,
n slots, s = A n slots of a row, W context positions, F = features of all target layers, R Markov rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.mesh import BATCH, act_spec, row_spec
from dsv4_jax.model import hyper
from dsv4_jax.model.block import Block, Carry, LayerReport, Tokens, collapse_streams, start_carry
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.params import Params, apply_remat, linear, rms_norm, whole
from dsv4_jax.model.quantized import quantize_window
from dsv4_jax.model.rope import compute_frequencies, compute_rotation, rotate
from dsv4_jax.model.tables import Tables
from dsv4_jax.ops.attention import softmax_with_sink
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.optim.roles import Role


class Anchors(NamedTuple):
    """Tokens that drafts start from, [B, A] each.

    Attributes:
        token_BA: ids of the anchors.
        position_BA: row positions of the anchors; -1 for none.
        first_BA: row position of the first token of each anchor's document.
    """

    token_BA: jax.Array
    position_BA: jax.Array
    first_BA: jax.Array


class MarkovHead(nnx.Module):
    """Add to the logits by the token before: a V x V matrix of rank R."""

    def __init__(self, cfg: ModelConfig, make: Params):
        vocab, rank = ("vocab", cfg.vocab_size), ("lora", cfg.dspark_markov_rank)
        self.embed = make.table(vocab, rank)
        self.head = make.kernel(rank, vocab, role=Role("table", rows=-1))


class ConfidenceHead(nnx.Module):
    """Predict the logit of the probability that a drafted token is accepted, given that those before it are."""

    def __init__(self, cfg: ModelConfig, make: Params):
        width = cfg.dim + cfg.dspark_markov_rank
        self.proj = make.kernel(("features", width), ("out", 1), role=Role("vector"))


class DraftBlock(Block):
    """A block of the drafter. Its slots attend to the features before their anchor and to the slots of their draft."""

    def __init__(self, cfg: ModelConfig, make: Params, number: int):
        experts = cfg.dspark_n_routed_experts, cfg.dspark_n_activated_experts
        own = dataclasses.replace(cfg, n_routed_experts=experts[0], n_activated_experts=experts[1])
        super().__init__(own, make, LayerSpec("window"))
        if number == 0:
            sources = ("features", len(cfg.dspark_target_layer_ids) * cfg.dim)
            self.main_proj = make.kernel(sources, ("embed", cfg.dim))
            self.main_norm = make.ones(("norm", cfg.dim))
        if number == cfg.n_mtp_layers - 1:
            self.norm = make.ones(("norm", cfg.dim))
            self.markov_head = MarkovHead(cfg, make)
            self.confidence_head = ConfidenceHead(cfg, make)
            if not cfg.hc_single_pass:
                self.hc_head_fn, self.hc_head_base, self.hc_head_scale = hyper.make_head(make, cfg)

    def context(self, memory_BSD: jax.Array, tables: Tables, dtype: jnp.dtype) -> jax.Array:
        """Compute the rotated keys [B, S, K] of the context, whole rows, from what `compute_memory` gives."""
        keys_BSK = jax.reshard(self.attn.keys(memory_BSD, dtype), row_spec(3))
        return quantize_window(self.cfg, rotate(keys_BSK, tables.rotations[False]))

    def draft(
        self, carry: Carry, context_BSK: jax.Array, anchors: Anchors, tokens: Tokens, dtype: jnp.dtype
    ) -> tuple[Carry, jax.Array]:
        """Run the block on the slots: the carry of their streams [B, A n, N, D] after it, and its experts' loads."""
        cfg = self.cfg
        # Slots make the queries and their own keys.
        with jax.named_scope("attention"):
            mix = hyper.compute_mix(carry.x_BSND, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, cfg)
            pre = mix.pre_BSN if carry.pre_BSN is None else carry.pre_BSN
            u = rms_norm(hyper.collapse(carry.x_BSND, pre), cfg.norm_eps, self.attn_norm)
            q, _ = self.attn.queries(u, dtype)
            # Each device of `context` attends for its own anchors.
            slots, rows = jax.P(BATCH, "context"), jax.P(BATCH)
            core = functools.partial(_core, cfg)
            core = jax.shard_map(core, in_specs=(slots, slots, slots, rows, jax.P()), out_specs=slots)
            o = core(q, self.attn.keys(u, dtype), anchors, context_BSK, whole(self.attn.attn_sink))
            carry = carry._replace(x_BSND=hyper.expand(self.attn.output(o, dtype), carry.x_BSND, mix))
        carry, routing, _ = self.feed_forward(carry, mix, tokens, None, dtype)
        return carry, self.load(routing, tokens)


def _core(
    cfg: ModelConfig,
    q_BsHK: jax.Array,
    own_BsK: jax.Array,
    anchors: Anchors,
    context_BSK: jax.Array,
    sink_H: jax.Array,
) -> jax.Array:
    """Attend from one device's slots to their context and to the slots of the same draft: [B, s, H, K]."""
    (B, A), n, W = anchors.position_BA.shape, cfg.dspark_block_size, cfg.window_size
    S, K = context_BSK.shape[1], cfg.head_dim
    # Slots rotate by their position in the document. The anchor may come just after the row's last token.
    place_BAn = (anchors.position_BA - anchors.first_BA)[..., None] + jnp.arange(n)
    angles = compute_rotation(compute_frequencies(cfg, compressed=False), place_BAn)
    heads = jax.tree.map(lambda a: a[:, :, :, None], angles)
    q_BAnHK = rotate(q_BsHK.reshape(B, A, n, cfg.n_heads, K), heads)
    own_BAnK = quantize_window(cfg, rotate(own_BsK.reshape(B, A, n, K), angles))
    # The context: the W positions before the anchor, as far as they are in its document.
    seen_BAW = anchors.position_BA[..., None] - W + jnp.arange(W)
    allowed_BAW = seen_BAW >= jnp.maximum(anchors.first_BA, 0)[..., None]
    context_BAWK = jax.vmap(lambda x, i: x[i])(context_BSK, jnp.clip(seen_BAW, 0, S - 1))
    # One softmax over context [B, A, n, H, W] and slots [B, A, n, H, n].
    logit = lambda keys: jnp.einsum("banhk,bauk->banhu", q_BAnHK, keys, preferred_element_type=jnp.float32) * K**-0.5
    far = jnp.where(allowed_BAW[:, :, None, None], logit(context_BAWK), -jnp.inf)
    p_far, p_near = softmax_with_sink((far, logit(own_BAnK)), sink_H)
    read = lambda p, keys: jnp.einsum("banhu,bauk->banhk", p.astype(keys.dtype), keys)
    o_BAnHK = read(p_far, context_BAWK) + read(p_near, own_BAnK)
    return rotate(o_BAnHK, heads, inverse=True).reshape(B, A * n, cfg.n_heads, K)


class Drafts(NamedTuple):
    """Outputs of the drafter for every slot.

    Attributes:
        u_BAnD: collapsed streams before the last norm, which the confidence head reads.
        h_BAnD: the same after the norm, for the LM head.
        loads: tokens of every expert of each block (see `Block.load`).
    """

    u_BAnD: jax.Array
    h_BAnD: jax.Array
    loads: list[jax.Array]


def compute_memory(model: Any, layers: Sequence[LayerReport]) -> jax.Array:
    """Compute what all draft blocks read of the backbone, [B, S, D], from the reports of its layers.

    Raises:
        ValueError: if `features` were not collected, or the model has no draft blocks.
    """
    cfg, block = model.cfg, model.mtp[0] if model.mtp else None
    features = [x for i in cfg.dspark_target_layer_ids if (x := layers[i].collected.features) is not None]
    if not features or block is None:
        raise ValueError("drafts need model.dspark_target_layer_ids and a pass with collect = ['features']")
    read_BSF = jnp.concatenate(features, axis=-1)
    return rms_norm(linear(read_BSF, block.main_proj, cfg.dtype), cfg.norm_eps, block.main_norm)


def compute_drafts(
    model: Any, read: Callable[[int, DraftBlock], jax.Array], anchors: Anchors, embed: Any, dtype: jnp.dtype
) -> Drafts:
    """Run the draft blocks for all anchors at once.

    Args:
        model: the model; the blocks are its `mtp`.
        read: function that gives the rotated keys [B, S, K] of the context of a block with its number. The anchors'
            positions count from the first of them.
        anchors: tokens to start from; the devices of `context` must divide A.
        embed: function that embeds ids [B, A n].
        dtype: type of the large products.
    """
    cfg, blocks = model.cfg, list(model.mtp)
    B, A = anchors.position_BA.shape
    n = cfg.dspark_block_size
    # The slots as tokens [B, A n]: the anchor, then noise; padding where there is no anchor.
    first = jnp.arange(n) == 0
    ids_BAn = jnp.where(first, anchors.token_BA[..., None], cfg.dspark_noise_token_id)
    real_BAn = jnp.broadcast_to((anchors.position_BA >= 0)[..., None], (B, A, n))
    flat = lambda x: jnp.reshape(x, (B, A * n), out_sharding=act_spec(2))
    tokens = Tokens(flat(ids_BAn), None, flat(real_BAn))
    carry, loads = start_carry(cfg, embed(tokens.ids_BS), dtype), []
    for number, block in enumerate(blocks):

        def run(block: DraftBlock, carry: Carry, number: int = number) -> tuple[Carry, jax.Array]:
            return block.draft(carry, read(number, block), anchors, tokens, dtype)

        carry, load = apply_remat(run, cfg.remat)(block, carry)
        loads.append(load)
    last = blocks[-1]
    u = collapse_streams(last, carry)
    split = lambda x: jnp.reshape(x, (B, A, n, cfg.dim), out_sharding=act_spec(4))
    return Drafts(split(u), split(rms_norm(u, cfg.norm_eps, last.norm)), loads)


def compute_slot_logits(model: Any, h: jax.Array, before: jax.Array) -> jax.Array:
    """Compute the logits fp32 [..., V] of slots with normed states h [..., D], after the tokens `before` [...]."""
    markov = model.mtp[-1].markov_head
    return head_logits(h, whole(model.head)) + head_logits(_before(model, before), whole(markov.head))


def compute_confidence(model: Any, u: jax.Array, before: jax.Array) -> jax.Array:
    """Compute the logits [...] of acceptance of slots with streams u [..., D], after the tokens `before` [...]."""
    x = jnp.concatenate([u.astype(jnp.float32), _before(model, before)], axis=-1)
    return head_logits(x, whole(model.mtp[-1].confidence_head.proj))[..., 0]


def _before(model: Any, before: jax.Array) -> jax.Array:
    """Look up the Markov embeddings [..., R] of tokens [B, A, ...]."""
    table = whole(model.mtp[-1].markov_head.embed)
    return table.at[before].get(out_sharding=act_spec(before.ndim + 1))


class Proposal(NamedTuple):
    """Drafted tokens.

    Attributes:
        token_BAn: ids.
        logits_BAnV: fp32 logits that the tokens were drawn from.
        confidence_BAn: logits of the probability that each is accepted, given that those before are.
    """

    token_BAn: jax.Array
    logits_BAnV: jax.Array
    confidence_BAn: jax.Array


def propose(
    model: Any,
    made: Drafts,
    anchors: Anchors,
    draw: Callable[[jax.Array, jax.Array], jax.Array] = lambda logits_BAV, _: jnp.argmax(logits_BAV, axis=-1),
) -> Proposal:
    """Draw the tokens of the slots one after another, each given the one before.

    Args:
        model: the model.
        made: outputs of the drafter.
        anchors: tokens that the drafts start from.
        draw: function that draws tokens [B, A] from logits [B, A, V] of the slot of the given number.
    """

    def slot(before_BA: jax.Array, xs: tuple[jax.Array, ...]):
        h_BAD, u_BAD, k = xs
        logits_BAV = compute_slot_logits(model, h_BAD, before_BA)
        token_BA = draw(logits_BAV, k).astype(before_BA.dtype)
        return token_BA, Proposal(token_BA, logits_BAV, compute_confidence(model, u_BAD, before_BA))

    slots = (jnp.moveaxis(x, 2, 0) for x in (made.h_BAnD, made.u_BAnD))
    _, proposals = jax.lax.scan(slot, anchors.token_BA, (*slots, jnp.arange(made.h_BAnD.shape[2])))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), proposals)
