# SPDX-License-Identifier: Apache-2.0
"""Configure a DeepSeek model: every size and constant, under the official field names.

The field names are those of the `inference/config.json` published with the weights, so that file can be read next to
this one. `layer_specs` turns the fields into one `LayerSpec` for each layer. The model reads those and never a
version. Keys of how the model is computed are in `compute.py`.
"""

import dataclasses
from typing import Literal

from dsv4_jax.model.compute import ComputeConfig
from dsv4_jax.section import ConfigError

CSA_RATIO = 4  # the official code turns overlap and indexer on for this ratio and for no other


Mode = Literal["window", "csa", "hca", "full", "reindex", "reuse"]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The kind of one layer: all that decides which tensors it has and what it computes.

    Attributes:
        mode: kind of attention. `window` sees the sliding window only. `csa` and `hca` (V4) and `full` (CSA2) make
            compressed entries. `csa`, `full` and `reindex` select among entries with an indexer of their own.
            `reindex` and `reuse` read the entries of the last `full` layer; `reuse` also takes the last selection.
        ratio: tokens per compressed entry; 0 for a window layer.
        hashed: whether experts are looked up by token id.
        engram: number of the layer's Engram; -1 for none.
        candidates: `source` if the layer makes the pool that later indexers select from, `user` if it selects from it.
        decoder: whether it is in the causal decoder, which starts at the last layer that makes entries (V4.1
            section 2.2).
    """

    mode: Mode
    ratio: int = 0
    hashed: bool = False
    engram: int = -1
    candidates: Literal["", "source", "user"] = ""
    decoder: bool = False

    @property
    def indexed(self) -> bool:
        """Return whether the layer has an indexer."""
        return self.mode in ("csa", "full", "reindex")

    @property
    def name(self) -> str:
        """Describe the kind in a few words, for the table that start-up prints."""
        kind = self.mode if self.mode == "window" else f"{self.mode}/{self.ratio}"
        extra = (" engram" if self.engram >= 0 else "") + (f" {self.candidates}" if self.candidates else "")
        return f"{kind} {'hash' if self.hashed else 'learned'}{extra}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ComputeConfig):
    """A DeepSeek model. Defaults are DeepSeek-V4-Flash without its sizes.

    Raises:
        ConfigError: for a value that cannot work, naming the key.
    """

    vocab_size: int
    """Number of token ids V: rows of the embedding and columns of the head."""
    dim: int
    """Model width D."""
    n_layers: int
    """Number of layers, draft blocks not counted."""
    n_heads: int
    """Number of query heads H. All share one key-value head."""
    head_dim: int
    """Width K of a head, of the shared key-value vector and of a compressed entry."""
    rope_head_dim: int
    """Number of channels at the end of a head that RoPE rotates. Must be even."""
    q_lora_rank: int
    """Width of the query latent."""
    o_groups: int
    """Number of groups of heads in the output projection. Must divide n_heads."""
    o_lora_rank: int
    """Width of each group's output latent."""
    moe_inter_dim: int
    """Width F of an expert, routed or shared."""
    n_routed_experts: int
    """Number of routed experts E in a layer."""
    n_activated_experts: int
    """Number of routed experts that a token uses (top-k)."""
    compress_ratios: tuple[int, ...]
    """Compression ratio (tokens per compressed entry) of every layer, then of every draft block. 0: sliding window
    only. 4: CSA (overlapping windows and an indexer). Any other: HCA. If kv_source_layers is set, all above 0 are CSA2.
    Draft blocks have 0."""
    kv_source_layers: tuple[int, ...] = ()
    """CSA2: numbers of the layers that make compressed entries and index keys. The compressed layers after each of
    them, up to the next, read those. Empty: no CSA2."""
    index_source_layers: tuple[int, ...] = ()
    """CSA2: numbers of the layers with an indexer. Must include all kv_source_layers. The compressed layers after each
    of them, up to the next, reuse its selection."""
    candidate_source_layer: int = -1
    """CSA2: number of the layer that makes the pool of candidate entries, from which later indexers select. -1: no
    pool, as in pre-training."""
    candidate_topk_blocks: int = 2048
    """CSA2: maximum number of blocks of entries in a query's pool of candidates."""
    candidate_block_size: int = 8
    """CSA2: number of consecutive entries in a block of candidates."""
    n_hash_layers: int = 3
    """Number of leading layers with hash routing (experts looked up by token id)."""
    n_mtp_layers: int = 1
    """Number of draft blocks after the last layer. Multi-token prediction: 0 or 1. DSpark (dspark_target_layer_ids is
    set): 1 or more."""
    window_size: int = 128
    """Length of the sliding window in tokens, the query's own included."""
    index_n_heads: int = 64
    """Number of heads of the lightning indexer."""
    index_head_dim: int = 128
    """Width of an indexer head. Must be at least rope_head_dim."""
    index_topk: int = 512
    """Maximum number of compressed entries that the indexer selects for a query."""
    route_scale: float = 1.5
    """Factor of the routing weights, after they have been normalised to sum to 1."""
    swiglu_limit: float = 10.0
    """Clamp of the experts' SwiGLU: the gate to at most this, the other factor to plus or minus this. 0: no clamp."""
    rope_theta: float = 10000.0
    """RoPE base of layers without compression."""
    compress_rope_theta: float = 160000.0
    """RoPE base of layers with compression."""
    original_seq_len: int = 65536
    """YaRN: context length before the extension, in tokens."""
    rope_factor: float = 16.0
    """YaRN: factor by which the context is extended."""
    beta_fast: float = 32.0
    """YaRN: frequencies with more rotations than this over the original context stay as they are."""
    beta_slow: float = 1.0
    """YaRN: frequencies with fewer rotations than this over the original context are divided by rope_factor. Those in
    between are interpolated."""
    hc_mult: int = 4
    """Number of residual streams N of the hyper-connections."""
    hc_sinkhorn_iters: int = 20
    """Number of Sinkhorn-Knopp iterations that make the stream mixing matrix doubly stochastic."""
    hc_eps: float = 1e-6
    """Epsilon of the hyper-connections' gates and of their Sinkhorn-Knopp iterations."""
    hc_single_pass: bool = False
    """Weight the streams for a sublayer's input by gates that the sublayer before computed (V4.1). False: every
    sublayer computes its own (V4)."""
    query_norm: bool = True
    """Apply RMSNorm to every query head (V4). False: only to the query latent (V4.1)."""
    modality_bias: bool = False
    """Give image tokens a balance bias of their own in the router (V4.1). False: one bias for all tokens."""
    gate_temp: float = 1.0
    """Temperature of the router, which divides its logits."""
    engram_layer_ids: tuple[int, ...] = ()
    """Numbers of the layers with an Engram memory before their attention. Empty: none."""
    engram_vocab_size: int = 16000000
    """Engram: lower bound of the table sizes, in rows. Each table takes the next unused prime >= this as its number of
    rows."""
    engram_max_ngram_size: int = 4
    """Engram: length of the longest n-gram, in tokens. The shortest is 2."""
    engram_n_heads: int = 8
    """Engram: number of tables for each length of n-gram."""
    engram_head_dim: int = 256
    """Engram: width of a table's rows."""
    engram_num_embeddings: tuple[int, ...] = ()
    """Engram: number of rows of all tables of each Engram together. The keys above determine these numbers; given ones
    are only checked. Empty: no check."""
    engram_token_map: str = "identity"
    """Engram: which token ids count as the same in an n-gram. `identity`: none. Path to a tokenizer.json: tokens that
    differ only in case, accents, and repeated or outer spaces. Path to an .npy file with an integer for each token id:
    ids with the same integer."""
    engram_compressed_vocab_size: int = 0
    """Engram: number of different ids after the token map. 0: vocab_size."""
    engram_pad_id: int = 2
    """Engram: token id that replaces missing tokens of an n-gram. Tokens before the start of the document are missing,
    and so are the nearest image token and all before it."""
    vision_n_layers: int = 0
    """Number of layers of the vision tower. 0: no vision tower, no images."""
    vision_dim: int = 1024
    """Width of the vision tower."""
    vision_n_heads: int = 16
    """Number of attention heads of the vision tower."""
    vision_inter_dim: int = 2816
    """Width of the vision tower's SwiGLU."""
    vision_patch_size: int = 14
    """Side of an image patch, in pixels."""
    vision_downsample_ratio: int = 3
    """Side of the square of patches that becomes one position in the sequence, in patches."""
    vision_rope_theta: float = 10000.0
    """RoPE base of the vision tower."""
    vision_max_n_token: int = 1024
    """Maximum number of positions that an image takes in the sequence, delimiters included. Larger images are
    reduced."""
    vision_min_pixels: int = 295936
    """Minimum area of an image, in pixels. Smaller images are enlarged to it."""
    vision_max_wh_ratio: float | None = None
    """Maximum ratio of width to height of the area that an image gets. A wider image is reduced to fit, with grey bars
    above and below. None: no limit."""
    image_token_id: int = 129264
    """Token id of every position of an image."""
    dspark_target_layer_ids: tuple[int, ...] = ()
    """DSpark: numbers of the layers whose input, the mean of the residual streams, the draft blocks read. Empty: draft
    blocks are multi-token prediction."""
    dspark_block_size: int = 5
    """DSpark: number of tokens in a draft."""
    dspark_noise_token_id: int = 128799
    """DSpark: token id that the draft blocks read at every position of a draft but the first, which is a known
    token."""
    dspark_markov_rank: int = 256
    """DSpark: rank of the Markov head, a matrix that adds to the logits by the token before."""
    dspark_n_routed_experts: int = 128
    """DSpark: number of routed experts in a draft block."""
    dspark_n_activated_experts: int = 3
    """DSpark: number of routed experts that a token uses in a draft block."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices and tables."""
    hc_init_scale: float = 0.01
    """Initial value of `hc_*_scale`, the factors of the token-dependent part of the hyper-connections' gates."""
    hash_seed: int = 0
    """Seed of the hash-routing tables of a new model."""

    def _check(self) -> None:
        super()._check()
        self.need_positive(
            """vocab_size dim n_layers n_heads head_dim rope_head_dim q_lora_rank o_groups o_lora_rank
            moe_inter_dim n_routed_experts n_activated_experts window_size index_n_heads index_head_dim
            index_topk hc_mult hc_sinkhorn_iters original_seq_len rope_theta
            compress_rope_theta rope_factor norm_eps hc_eps init_std route_scale"""
        )
        need = self.need
        need("swiglu_limit", self.swiglu_limit >= 0, "must be 0 (off) or above")
        need("n_heads", self.n_heads % self.o_groups == 0, f"must be a multiple of o_groups = {self.o_groups}")
        need("rope_head_dim", self.rope_head_dim % 2 == 0, "must be even")
        for key in ("head_dim", "index_head_dim"):
            enough = getattr(self, key) >= self.rope_head_dim
            need(key, enough, f"must be at least rope_head_dim = {self.rope_head_dim}")
        fits = self.n_activated_experts <= self.n_routed_experts
        need("n_activated_experts", fits, f"must be at most n_routed_experts = {self.n_routed_experts}")
        need("n_hash_layers", 0 <= self.n_hash_layers <= self.n_layers, f"must be 0 to n_layers = {self.n_layers}")
        dspark = bool(self.dspark_target_layer_ids)
        need("n_mtp_layers", dspark or self.n_mtp_layers in (0, 1), "must be 0 or 1")
        need("beta_fast", self.beta_fast > self.beta_slow > 0, f"must be above beta_slow = {self.beta_slow} > 0")
        ratios, blocks = self.compress_ratios, self.n_layers + self.n_mtp_layers
        if len(ratios) != blocks:
            raise ConfigError(
                f"model.compress_ratios has {len(ratios)} entries, expected {blocks}: one for each of "
                f"n_layers = {self.n_layers} layers, then n_mtp_layers = {self.n_mtp_layers} for the draft blocks"
            )
        need("compress_ratios", min(ratios) >= 0, "must hold no negative ratio")
        last = ratios[self.n_layers :]
        need("compress_ratios", not any(last), "must end with 0: MTP and draft blocks have no compressor")
        mixed = "index" in self.quantize and not self.kv_source_layers and CSA_RATIO in ratios
        fits = not mixed or self.index_head_dim.bit_count() == 1
        need("index_head_dim", fits, "must be a power of two for quantize = index, whose Hadamard matrix has that size")
        for key in ("kv_source_layers", "index_source_layers", "engram_layer_ids", "dspark_target_layer_ids"):
            numbers = getattr(self, key)
            fits = all(0 <= i < self.n_layers for i in numbers) and list(numbers) == sorted(set(numbers))
            need(key, fits, f"must be layer numbers below {self.n_layers} in order")
        self._check_csa2()
        if self.engram_layer_ids:
            self.need_positive("engram_vocab_size engram_n_heads engram_head_dim")
            need("engram_max_ngram_size", self.engram_max_ngram_size >= 2, "must be at least 2")
            need("engram_pad_id", 0 <= self.engram_pad_id < self.vocab_size, "must be a token id")
        if self.vision_n_layers:
            self.need_positive(
                """vision_dim vision_n_heads vision_inter_dim vision_patch_size vision_downsample_ratio
                vision_rope_theta vision_max_n_token vision_min_pixels"""
            )
            whole = self.vision_dim % (4 * self.vision_n_heads) == 0
            need("vision_dim", whole, f"must be a multiple of 4 x vision_n_heads = {4 * self.vision_n_heads}")
            need("image_token_id", 0 <= self.image_token_id < self.vocab_size, "must be a token id")
        if dspark:
            self.need_positive("n_mtp_layers dspark_block_size dspark_markov_rank dspark_n_activated_experts")
            fits = self.dspark_n_activated_experts <= self.dspark_n_routed_experts
            need("dspark_n_activated_experts", fits, "must be at most dspark_n_routed_experts")
            need("dspark_noise_token_id", 0 <= self.dspark_noise_token_id < self.vocab_size, "must be a token id")

    def _check_csa2(self) -> None:
        """Check that every compressed layer has entries of its ratio, and a selection, at or before it."""
        kv, index, ratios = self.kv_source_layers, self.index_source_layers, self.compress_ratios
        if not kv:
            self.need("index_source_layers", not index, "needs kv_source_layers")
            self.need("candidate_source_layer", self.candidate_source_layer < 0, "needs kv_source_layers")
            return
        self.need("kv_source_layers", set(kv) <= set(index), "must be among index_source_layers")
        for i in (i for i in range(self.n_layers) if ratios[i]):
            source = max((j for j in kv if j <= i), default=None)
            found = source is not None and ratios[source] == ratios[i]
            need = f"must hold, for layer {i} of ratio {ratios[i]}, a layer of the same ratio as the last one up to it"
            self.need("kv_source_layers", found, need)
        self.need("index_source_layers", all(ratios[i] for i in index), "must hold layers with a ratio only")
        source = self.candidate_source_layer
        self.need("candidate_source_layer", source == -1 or source in kv, "must be -1 or in kv_source_layers")
        if source >= 0:
            self.need_positive("candidate_topk_blocks candidate_block_size")
            enough = self.candidate_topk_blocks * self.candidate_block_size >= self.index_topk
            self.need("candidate_topk_blocks", enough, "x candidate_block_size must be at least index_topk")
            later = [i for i in kv if i > source]
            self.need("candidate_source_layer", not later, f"must be the last of kv_source_layers, found {later} after")

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Return the spec of each of the `n_layers` layers."""
        return tuple(self._spec(i, ratio) for i, ratio in enumerate(self.compress_ratios[: self.n_layers]))

    def _spec(self, i: int, ratio: int) -> LayerSpec:
        mode: Mode
        if not ratio:
            mode = "window"
        elif not self.kv_source_layers:
            mode = "csa" if ratio == CSA_RATIO else "hca"
        elif i in self.kv_source_layers:
            mode = "full"
        else:
            mode = "reindex" if i in self.index_source_layers else "reuse"
        source, candidates = self.candidate_source_layer, ""
        if source >= 0 and mode in ("full", "reindex") and i >= source:
            candidates = "source" if i == source else "user"
        return LayerSpec(
            mode,
            ratio,
            hashed=i < self.n_hash_layers,
            engram=self.engram_layer_ids.index(i) if i in self.engram_layer_ids else -1,
            candidates=candidates,
            decoder=bool(self.kv_source_layers) and i >= self.kv_source_layers[-1],
        )
