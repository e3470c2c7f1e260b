# SPDX-License-Identifier: Apache-2.0
"""What a DeepSeek model is: every size and constant, under the official field names.

The field names are those of the `inference/config.json` published with the weights, so that file can
be read next to this one. `layer_specs` turns the fields into one `LayerSpec` a layer; the model looks
at those and never at a version.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dsv4_jax.validate import ConfigError, Section, from_fields

CSA_RATIO = 4  # the official code turns overlap and indexer on for this ratio and for no other


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer is: its compression ratio (0 = sliding window only) and how it routes."""

    ratio: int
    hashed: bool

    @property
    def name(self) -> str:
        """The layer's kind in a word or two, as start-up prints it."""
        kind = {0: "window", CSA_RATIO: f"csa/{CSA_RATIO}"}.get(self.ratio, f"hca/{self.ratio}")
        return f"{kind} {'hash' if self.hashed else 'learned'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A DeepSeek-V4 model. Defaults are DeepSeek-V4-Flash without its sizes.

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
    """Tokens per compressed entry of every layer and of the MTP block, which comes last:
    0 sliding window only, 4 CSA (overlapping windows and an indexer), anything above 0 else HCA."""
    n_hash_layers: int = 3
    """First layers, whose experts follow from the token id."""
    n_mtp_layers: int = 1
    """Multi-token-prediction blocks: 0 or 1."""
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
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    attention: Literal["dense", "warmup", "sparse"] = "sparse"
    """Stage of the CSA layers: `dense` attends to every visible entry and leaves the indexer alone,
    `warmup` does so and trains the indexer only, `sparse` attends to the indexer's top-k."""
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
        need("n_mtp_layers", self.n_mtp_layers in (0, 1), "must be 0 or 1")
        need("beta_fast", self.beta_fast > self.beta_slow > 0, f"must be above beta_slow = {self.beta_slow} > 0")
        ratios, blocks = self.compress_ratios, self.n_layers + self.n_mtp_layers
        if len(ratios) != blocks:
            raise ConfigError(
                f"model.compress_ratios has {len(ratios)} entries, expected {blocks}: one for each of "
                f"n_layers = {self.n_layers} layers, then n_mtp_layers = {self.n_mtp_layers} for the MTP block"
            )
        need("compress_ratios", min(ratios) >= 0, "must hold no negative ratio")
        need("compress_ratios", not any(ratios[self.n_layers :]), "must end with 0: the MTP block has no compressor")

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """One spec for each of the `n_layers` layers."""
        ratios = self.compress_ratios[: self.n_layers]
        return tuple(LayerSpec(ratio=r, hashed=i < self.n_hash_layers) for i, r in enumerate(ratios))


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
    for key, value in fields.items():
        if key in _FIXED:
            if value != _FIXED[key]:
                raise ConfigError(f"{key} = {value!r} is not supported, expected {_FIXED[key]!r}")
        elif key not in _STORAGE:
            values[key] = tuple(value) if key == "compress_ratios" else value
    return from_fields(ModelConfig, values, "the official configuration")
