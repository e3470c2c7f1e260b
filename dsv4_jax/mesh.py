# SPDX-License-Identifier: Apache-2.0
"""The device mesh, the rules that place arrays on it, and the few helpers manual code needs.

Axes: `data` (rows of the batch), `expert` (rows, and the experts of a layer) and `context` (positions).
Parameters are split over `data` and `context`, ZeRO-3 style, and experts over `expert` too. All axes are
Explicit: a forgotten spec is an error when a function is traced, also on one device, where the mesh is
1 x 1 x 1.
"""

import contextlib
import math
import os
from typing import Any

import jax
from jax.sharding import AxisType

from dsv4_jax.section import ConfigError

AXES = ("data", "expert", "context")
BATCH = ("data", "expert")

# Logical axis of a parameter -> mesh axes. Axes that are not named here are never split.
RULES = {"experts": ("expert",), "rows": AXES} | dict.fromkeys(("embed", "heads", "vocab"), ("data", "context"))

# Compiler options for a program on CPU: it compiles in three quarters of the time and runs as fast (docs/results.md).
QUICK_CPU = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
# For a program that runs a few times on CPU: it compiles in half the time of QUICK_CPU and takes twice as long to run.
ONCE_CPU = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # the older emitter has no MLIR passes for each fusion; later versions lack it
    ONCE_CPU |= {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


def make_mesh(data: int = 1, expert: int = 1, context: int = 1) -> jax.sharding.Mesh:
    """A mesh of `data` x `expert` x `context` devices with Explicit axes.

    Raises:
        ValueError: if there are fewer devices, naming both numbers.
    """
    need = data * expert * context
    if need > jax.device_count():
        raise ValueError(f"a mesh of {data} x {expert} x {context} needs {need} devices, found {jax.device_count()}")
    return jax.make_mesh((data, expert, context), AXES, (AxisType.Explicit,) * 3, devices=jax.devices()[:need])


def start_devices(cpu_devices: int = 0, distributed: str = "", deterministic: bool = False) -> None:
    """Settings that must stand before JAX has devices; see `TrainConfig`.

    Raises:
        ConfigError: if JAX has started already with other ones, or the other processes cannot be found.
    """
    if deterministic:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    if cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        with contextlib.suppress(RuntimeError):  # there are devices already: `use_mesh` counts them
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    if distributed and not jax.distributed.is_initialized():
        address, _, numbers = distributed.partition(",")
        try:
            if numbers:
                count, number = map(int, numbers.split(","))
                jax.distributed.initialize(address, count, number)
            else:
                jax.distributed.initialize()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"train.distributed = {distributed!r}: {error}") from error


def use_mesh(data: int, expert: int, context: int) -> None:
    """Set the mesh of a run, or of a stage, on all devices, in place of another one.

    Arrays of an earlier run keep the mesh that they were made on.

    Raises:
        ConfigError: if the product is not the number of devices.
    """
    found = jax.sharding.get_abstract_mesh()
    if not found.empty and dict(found.shape) == dict(zip(AXES, (data, expert, context), strict=True)):
        return
    need, count = data * expert * context, jax.device_count()
    if need != count:
        platform = jax.devices()[0].platform
        restart = "; JAX starts its devices once: another train.cpu_devices needs a new process" * (platform == "cpu")
        raise ConfigError(
            f"mesh.data x mesh.expert x mesh.context = {data} x {expert} x {context} = {need}, "
            f"but there are {count} devices ({platform}){restart}"
        )
    jax.set_mesh(make_mesh(data, expert, context))


def ensure_mesh() -> contextlib.AbstractContextManager[Any]:
    """Sets a 1 x 1 x 1 mesh of the default device if no mesh has been set.

    Enter the result around the code that needs it: inside a traced function, where a mesh cannot be
    set, it holds the mesh for that code only.
    """
    if jax.sharding.get_abstract_mesh().empty:
        try:
            jax.set_mesh(make_mesh())
        except ValueError:  # inside jit, where only an abstract mesh may be entered
            return abstract_mesh(1, 1, 1)
    return contextlib.nullcontext()


def abstract_mesh(data: int, expert: int, context: int) -> contextlib.AbstractContextManager[Any]:
    """Enter a mesh of devices that need not exist, to compute shapes and shardings."""
    mesh = jax.sharding.AbstractMesh((data, expert, context), AXES, axis_types=(AxisType.Explicit,) * 3)
    return jax.sharding.use_abstract_mesh(mesh)


def current_mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """Return the mesh that is set: the abstract one where its devices need not exist."""
    mesh, abstract = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
    return mesh if mesh.abstract_mesh == abstract else abstract


def on_cpu() -> bool:
    """Return whether programs traced now are for CPUs: those of the mesh that is set, else JAX's default devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform if device else jax.default_backend()) == "cpu"


def emulated() -> bool:
    """Return whether programs traced now are for more than one emulated CPU device.

    There a loop that contains collectives can deadlock: XLA's CPU runtime may start a later, independent collective
    while the loop still runs, at a different iteration on each device.
    """
    return on_cpu() and jax.sharding.get_abstract_mesh().size > 1


def param_spec(axes: tuple[str, ...], shape: tuple[int, ...]) -> jax.P:
    """Return the spec of a parameter: `RULES` applied to its logical axes, each mesh axis used once.

    An axis that its mesh axes do not divide is split over the first of them that do, or replicated.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    spec: list[tuple[str, ...]] = []
    for axis, size in zip(axes, shape, strict=True):
        names = RULES.get(axis, ())
        while names and (size % math.prod(sizes[name] for name in names) or any(set(names) & set(s) for s in spec)):
            names = names[:-1]
        spec.append(names)
    return jax.P(*(names if len(names) > 1 else next(iter(names), None) for names in spec))


def act_spec(rank: int) -> jax.P:
    """Spec of an activation [B, S, ...]: rows over `data` and `expert`, positions over `context`."""
    return jax.P(BATCH, "context", *(None,) * (rank - 2))


def row_spec(rank: int) -> jax.P:
    """Spec of an array [B, ...] whose positions are whole on every device: document tables."""
    return jax.P(BATCH, *(None,) * (rank - 1))


def varying(x: jax.Array, *like: jax.Array) -> jax.Array:
    """`x` marked as differing between devices wherever an array of `like` does (in `shard_map`).

    Loop carries and hand-written gradients need operands of one such type. Outside manual code this
    is `x`. The transpose is the sum over the devices.
    """

    def axes_of(a: jax.Array) -> frozenset[str]:
        return jax.typeof(a).manual_axis_type.varying

    axes = frozenset().union(*map(axes_of, like)) - axes_of(x)
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
