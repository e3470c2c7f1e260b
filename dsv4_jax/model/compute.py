# SPDX-License-Identifier: Apache-2.0
"""How a model is computed: the keys of its configuration that leave its parameters alone."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from dsv4_jax.mesh import on_cpu
from dsv4_jax.section import Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig(Section):
    """The part of `ModelConfig` that may change during a run and between a checkpoint and its use.

    A stage may set any of these keys, a resumed run may have other ones, and parameters load whatever they are. All
    other keys of `ModelConfig` are the model's identity.

    Raises:
        ConfigError: for a value that cannot work, naming the key.
    """

    attention: Literal["dense", "warmup", "sparse"] = "sparse"
    """Which compressed entries CSA and CSA2 layers attend to. `dense`: every visible one, without computing the
    indexer. `warmup`: every visible one, and only the indexer is trained. `sparse`: the top-k of the indexer."""
    yarn: bool = True
    """Apply YaRN in layers with a compression ratio above 0. The released weights need it."""
    recall: bool = False
    """Also measure the indexer's recall: the share of full attention mass that its top-k covers. Evaluation always
    measures it. Ignored when attention is dense."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the operands of large matrix products. `auto`: bfloat16 on accelerators, float32 on CPU."""
    remat: Literal["save_block_outputs", "full", "none"] = "save_block_outputs"
    """What each layer keeps for the backward pass. `save_block_outputs`: its input and its large products; norms,
    hyper-connections and attention weights are recomputed. `full`: its input only. `none`: everything."""
    attention_block: int = 128
    """Number of queries of a row that attention handles at a time. Fewer take less memory."""
    select: Literal["auto", "masked", "gathered"] = "auto"
    """How a query reads its top-k entries. `masked`: all entries under a mask. `gathered`: a copy of the selected ones.
    `auto`: gathered if a row has more than 3 x index_topk entries."""
    expert_matmul: Literal["auto", "blocked", "ragged", "pallas"] = "auto"
    """Grouped matrix product of the experts. `blocked`: a loop over blocks of rows. `ragged`: XLA's `ragged_dot`, which
    computes the gradient of the weights densely. `pallas`: kernels for TPU, which compute only each row's own product.
    `auto`: blocked on CPU, pallas on TPU, ragged on GPU."""
    expert_exchange: Literal["auto", "gather", "ragged"] = "auto"
    """How tokens reach experts on other devices of mesh.expert. `gather`: every device takes all tokens. `ragged`: each
    token is sent to its experts only. `auto`: ragged if expert_waves is above 1, or on accelerators if mesh.expert is
    above n_activated_experts; else gather."""
    expert_waves: int = 1
    """Number of parts in which the rows that a device receives are exchanged and computed, so that exchange and
    computation can overlap. Above 1 it needs the ragged exchange."""
    expert_gradients: Literal["float32", "bfloat16"] = "float32"
    """Type in which devices send each other the experts' gradients, to be summed in fp32. `bfloat16` rounds
    stochastically and halves the traffic."""
    quantize: tuple[Literal["experts", "index", "window", "entries"], ...] = ()
    """What to round to its published format, with a straight-through gradient (quantisation-aware training,
    docs/weights.md). `experts`: weights of the routed experts. `index`: queries and keys of the indexer. `window`: keys
    of the sliding window. `entries`: compressed entries."""

    def _check(self) -> None:
        self.need_positive("attention_block expert_waves")
        only = "must be 1 with expert_exchange = 'gather', which has no waves"
        self.need("expert_waves", self.expert_exchange != "gather" or self.expert_waves == 1, only)

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the operands of large matrix products, on the devices of the mesh that is set."""
        name = self.compute_dtype
        if name == "auto":
            name = "float32" if on_cpu() else "bfloat16"
        return jnp.dtype(name)


COMPUTE_KEYS = frozenset(field.name for field in dataclasses.fields(ComputeConfig))
