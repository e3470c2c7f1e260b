# SPDX-License-Identifier: Apache-2.0
"""The keys of how a model is computed: they leave its parameters alone, so a stage or a resumed run may change them."""

import dataclasses
import typing

from flax import nnx

import dsv4_jax as ds
from dsv4_jax.config.keys import changeable
from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.compute import COMPUTE_KEYS, ComputeConfig
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import trace_structure

CONFIG = ds.load_config("configs/tiny_v4.py")


def other_value(name: str, hint: type, value: object) -> object:
    """A value of the key that is not its default."""
    if name == "expert_exchange":  # the only one that has waves
        return "ragged"
    if name == "quantize":
        return ("experts", "index", "window", "entries")
    if choices := typing.get_args(hint):
        return next(choice for choice in choices if choice not in (value, "auto"))
    return not value if hint is bool else int(value) * 2


def test_another_computation_has_the_same_parameters():
    default = CONFIG.model
    hints = typing.get_type_hints(ComputeConfig)
    other = {name: other_value(name, hints[name], getattr(default, name)) for name in COMPUTE_KEYS}
    assert all(value != getattr(default, name) for name, value in other.items())

    def tensors(cfg: ModelConfig) -> dict:
        state = nnx.to_flat_state(nnx.state(trace_structure(cfg)))
        return {path: (type(v), v.get_value().shape, v.get_value().dtype, v.get_metadata()) for path, v in state}

    with ensure_mesh():
        assert tensors(dataclasses.replace(default, **other)) == tensors(default)


def test_a_stage_may_change_how_a_model_is_computed_and_nothing_else_of_it():
    keys = {key.removeprefix("model.") for key in changeable(CONFIG) if key.startswith("model.")}
    assert keys == COMPUTE_KEYS
    assert COMPUTE_KEYS < {field.name for field in dataclasses.fields(ModelConfig)}
    assert not COMPUTE_KEYS & {"dim", "n_layers", "compress_ratios", "query_norm", "hc_single_pass"}
