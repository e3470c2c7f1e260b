# SPDX-License-Identifier: Apache-2.0
"""What a DeepSeek model is: every size and constant, under the official field names.

The field names are those of the `inference/config.json` published with the weights, so that file can
be read next to this one. `layer_specs` turns the fields into one `LayerSpec` a layer; the model looks
at those and never at a version.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dsv4_jax.section import ConfigError, Section, from_fields

CSA_RATIO = 4  # the official code turns overlap and indexer on for this ratio and for no other


Mode = Literal["window", "csa", "hca", "full", "reindex", "reuse"]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer is: all that decides which tensors it has and what it computes.

    Attributes:
        mode: its attention. `window` sees the sliding window only. `csa` and `hca` (V4) and `full`
            (CSA2) make compressed entries; `csa`, `full` and `reindex` select among them with an
            indexer of their own; `reindex` and `reuse` read the entries of the last `full` layer, and
            `reuse` also the last selection.
        ratio: tokens per compressed entry, 0 without.
        hashed: experts follow from the token id.
        engram: number of the layer's Engram, -1 without.
        candidates: makes the pool that later indexers select from (`source`), or selects from it (`user`).
        decoder: lies in the causal decoder, from the last layer that makes entries on (V4.1 section 2.2).
    """

    mode: Mode
    ratio: int = 0
    hashed: bool = False
    engram: int = -1
    candidates: Literal["", "source", "user"] = ""
    decoder: bool = False

    @property
    def indexed(self) -> bool:
        """Whether the layer has an indexer."""
        return self.mode in ("csa", "full", "reindex")

    @property
    def name(self) -> str:
        """The layer's kind in a few words, as start-up prints it."""
        kind = self.mode if self.mode == "window" else f"{self.mode}/{self.ratio}"
        extra = (" engram" if self.engram >= 0 else "") + (f" {self.candidates}" if self.candidates else "")
        return f"{kind} {'hash' if self.hashed else 'learned'}{extra}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A DeepSeek model. Defaults are DeepSeek-V4-Flash without its sizes.

    Raises:
        ConfigError: for a value that cannot work, naming the key.
    """

    vocab_size: int
    """Rows of the embedding and of the head."""
    dim: int
    """Model width D."""
    n_layers: int
    """Layers, without the MTP block."""
    n_heads: int
    """Query heads H; they share one key-value head."""
    head_dim: int
    """Width K of a head, of the shared key-value vector and of a compressed entry."""
    rope_head_dim: int
    """Channels at the end of a head that rotate; even."""
    q_lora_rank: int
    """Width of the query latent."""
    o_groups: int
    """Groups of heads in the output projection."""
    o_lora_rank: int
    """Width of each group's output latent."""
    moe_inter_dim: int
    """Width F of an expert, routed or shared."""
    n_routed_experts: int
    """Routed experts E of a layer."""
    n_activated_experts: int
    """Routed experts a token uses."""
    compress_ratios: tuple[int, ...]
    """Tokens per compressed entry of every layer and of the draft blocks, which come last: 0 sliding
    window only, 4 CSA (overlapping windows and an indexer), anything above 0 else HCA; with
    `kv_source_layers` all above 0 are CSA2."""
    kv_source_layers: tuple[int, ...] = ()
    """CSA2: layers that make compressed entries and index keys; the layers after read them."""
    index_source_layers: tuple[int, ...] = ()
    """CSA2: layers with an indexer, those of kv_source_layers among them; the layers after reuse its choice."""
    candidate_source_layer: int = -1
    """CSA2: layer that makes the pool of candidate entries which later indexers select from. -1: no
    pool, as in pre-training."""
    candidate_topk_blocks: int = 2048
    """Blocks of entries in the pool."""
    candidate_block_size: int = 8
    """Entries of a block."""
    n_hash_layers: int = 3
    """First layers, whose experts follow from the token id."""
    n_mtp_layers: int = 1
    """Draft blocks: 0 or 1 of multi-token prediction or, with `dspark_target_layer_ids`, any of DSpark."""
    window_size: int = 128
    """Positions of the sliding window, the query included."""
    index_n_heads: int = 64
    """Heads of the lightning indexer."""
    index_head_dim: int = 128
    """Width of an indexer head; at least rope_head_dim."""
    index_topk: int = 512
    """Compressed entries that a query of a CSA layer attends to."""
    route_scale: float = 1.5
    """Factor of the normalised routing weights."""
    swiglu_limit: float = 10.0
    """Clamp of the SwiGLU: gate at most this, up within plus or minus this. 0 turns it off."""
    rope_theta: float = 10000.0
    """RoPE base of layers with ratio 0."""
    compress_rope_theta: float = 160000.0
    """RoPE base of layers with ratio above 0."""
    yarn: bool = True
    """YaRN in layers with ratio above 0 (the released weights need it)."""
    original_seq_len: int = 65536
    """YaRN: context length before extension, in tokens."""
    rope_factor: float = 16.0
    """YaRN: extension factor."""
    beta_fast: float = 32.0
    """YaRN: rotations over the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """YaRN: rotations over the original context below which a frequency is divided by the factor."""
    hc_mult: int = 4
    """Residual streams N of the hyper-connections."""
    hc_sinkhorn_iters: int = 20
    """Sinkhorn-Knopp iterations of the stream mixing matrix."""
    hc_eps: float = 1e-6
    """Epsilon of the hyper-connections' gates and of Sinkhorn."""
    hc_single_pass: bool = False
    """A sublayer's input mix is the one that the sublayer before computed (V4.1), not its own (V4)."""
    query_norm: bool = True
    """Every query head is RMS-normalised (V4)."""
    modality_bias: bool = False
    """Image tokens have a balance bias of their own (V4.1)."""
    gate_temp: float = 1.0
    """Divisor of the router's logits."""
    engram_layer_ids: tuple[int, ...] = ()
    """Layers with an Engram memory before them."""
    engram_vocab_size: int = 16000000
    """Each of an Engram's tables has the next unused prime from here on as its number of rows."""
    engram_max_ngram_size: int = 4
    """Longest n-gram that an Engram looks up; the shortest is 2."""
    engram_n_heads: int = 8
    """Tables for each length of n-gram."""
    engram_head_dim: int = 256
    """Width of a table's rows."""
    engram_num_embeddings: tuple[int, ...] = ()
    """Rows of all tables of each Engram, as a check; they follow from the keys above."""
    engram_token_map: str = "identity"
    """Which ids count as the same in an n-gram: `identity`, or a tokenizer.json whose tokens are
    compared without case, accents and repeated spaces, or an .npy file of one number for each id."""
    engram_compressed_vocab_size: int = 0
    """Numbers that the token map gives; 0: vocab_size."""
    engram_pad_id: int = 2
    """Token id that stands before a document's first token and for image tokens."""
    vision_n_layers: int = 0
    """Layers of the vision tower; 0: no images."""
    vision_dim: int = 1024
    """Width of the vision tower."""
    vision_n_heads: int = 16
    """Its heads."""
    vision_inter_dim: int = 2816
    """Width of its SwiGLU."""
    vision_patch_size: int = 14
    """Pixels of a patch's side."""
    vision_downsample_ratio: int = 3
    """Patches of the side of the square that becomes one token."""
    vision_rope_theta: float = 10000.0
    """RoPE base of the vision tower."""
    vision_max_n_token: int = 1024
    """Positions that an image takes at most, delimiters included."""
    vision_min_pixels: int = 295936
    """Smaller images are enlarged to this area."""
    vision_max_wh_ratio: float | None = None
    """Wider images are squeezed to this ratio of width to height; None: never."""
    image_token_id: int = 129264
    """Token id of every image position."""
    dspark_target_layer_ids: tuple[int, ...] = ()
    """DSpark: layers whose input the draft blocks read. Empty: the draft block is multi-token prediction."""
    dspark_block_size: int = 5
    """DSpark: tokens drafted at a time."""
    dspark_noise_token_id: int = 128799
    """DSpark: token id of the places to be drafted."""
    dspark_markov_rank: int = 256
    """DSpark: width of the Markov head."""
    dspark_n_routed_experts: int = 128
    """DSpark: routed experts of a draft block."""
    dspark_n_activated_experts: int = 3
    """DSpark: routed experts that a token uses there."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    attention: Literal["dense", "warmup", "sparse"] = "sparse"
    """Stage of the CSA layers: `dense` attends to every visible entry and leaves the indexer alone,
    `warmup` does so and trains the indexer only, `sparse` attends to the indexer's top-k."""
    recall: bool = False
    """Layers with an indexer also tell how much of the attention to all entries its top-k covers, for
    evaluation; unless attention is dense."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices."""
    hc_init_scale: float = 0.01
    """Initial `hc_*_scale`: how far the hyper-connections depend on the token at the start."""
    hash_seed: int = 0
    """Seed of the hash-routing tables."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the large matrix products. auto: bfloat16 on accelerators, float32 on CPU."""
    remat: Literal["save_block_outputs", "full", "none"] = "save_block_outputs"
    """What each layer keeps for the backward pass. save_block_outputs: its input and its large products;
    norms, hyper-connections and attention weights are computed again. full: its input alone. none: all."""
    expert_matmul: Literal["auto", "blocked", "ragged"] = "auto"
    """Grouped matrix product of the experts. auto: blocked on CPU, ragged_dot on accelerators."""
    expert_exchange: Literal["auto", "gather", "ragged"] = "auto"
    """How tokens reach experts on other devices of mesh.expert. gather: every device takes all tokens;
    ragged: each token is sent to its experts. auto: ragged on accelerators if the axis has more devices
    than a token has experts, or there are waves; else gather."""
    expert_waves: int = 1
    """Parts that a device's experts are exchanged and computed in, so that the two can overlap (ragged)."""
    expert_gradients: Literal["float32", "bfloat16"] = "float32"
    """Type in which the experts' gradients are added up over mesh.data; bfloat16 rounds at random."""
    attention_block: int = 128
    """Queries that attention handles at a time."""
    select: Literal["auto", "masked", "gathered"] = "auto"
    """How a query reads its top-k entries: all entries under a mask, or its own gathered. auto: by cost."""

    def _check(self) -> None:
        self.need_positive(
            """vocab_size dim n_layers n_heads head_dim rope_head_dim q_lora_rank o_groups o_lora_rank
            moe_inter_dim n_routed_experts n_activated_experts window_size index_n_heads index_head_dim
            index_topk hc_mult hc_sinkhorn_iters original_seq_len attention_block expert_waves rope_theta
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
        need("expert_waves", self.n_routed_experts % self.expert_waves == 0, "must divide n_routed_experts")
        only = "must be 1 with expert_exchange = 'gather', which has no waves"
        need("expert_waves", self.expert_exchange != "gather" or self.expert_waves == 1, only)
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
        """Every compressed layer needs entries of its ratio and a selection before it."""
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
        """One spec for each of the `n_layers` layers."""
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


# Fields of the official files that say how weights are stored or served, not what the model computes.
_STORAGE = ("dtype", "expert_dtype", "scale_fmt", "scale_dtype", "max_batch_size", "max_seq_len")
# Fields that have one value in every published model; the equations here are that value's.
_FIXED: dict[str, Any] = {
    "n_shared_experts": 1,
    "score_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
}


def model_config_from_official(fields: Mapping[str, Any]) -> ModelConfig:
    """The model of an official `inference/config.json`, given as a dict.

    Storage fields (`dtype`, `expert_dtype`, `scale_fmt`, ...) have no meaning here and are accepted;
    fields with one possible value are checked; any other unknown field is refused.

    Raises:
        ConfigError: naming the unknown, missing or unusable field.
    """
    values: dict[str, Any] = {}
    if "kv_source_layers" in fields:  # V4.1, whose files do not name what every such model has
        values = dict(hc_single_pass=True, query_norm=False, modality_bias=True, n_hash_layers=0)
    for key, value in fields.items():
        if key in _FIXED:
            if value != _FIXED[key]:
                raise ConfigError(f"{key} = {value!r} is not supported, expected {_FIXED[key]!r}")
        elif key not in _STORAGE:
            values[key] = tuple(value) if isinstance(value, list) else value
    return from_fields(ModelConfig, values, "the official configuration")
