# SPDX-License-Identifier: Apache-2.0
"""Define the device mesh, the rules that place arrays on it, and helpers for code inside `shard_map`.

The mesh has three axes: `data` splits the rows of a batch, `expert` splits rows and the experts of a layer, and
`context` splits positions. Parameters are split over `data` and `context` as in ZeRO-3, experts over `expert` too. All
axes are Explicit, so that a forgotten spec is an error at tracing time. One device has a 1 x 1 x 1 mesh and finds the
same errors.
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
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"

# Logical axis of a parameter -> mesh axes that split it. A logical axis without an entry is never split.
RULES = {"experts": ("expert",), "rows": AXES} | dict.fromkeys(("embed", "heads", "vocab"), ("data", "context"))

# Compiler options for CPU: compile in three quarters of the default time, run as fast (docs/results.md).
# Barriers stay until the program runs. XLA would remove them before it fuses operations, which then computes again what
# a barrier keeps: the gradient of the residual streams four times in every layer, and values of the forward pass.
QUICK_CPU = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_disable_hlo_passes": "cse_barrier_expander",
}
# Compiler options for programs that run only a few times on CPU: half of QUICK_CPU's compile time, twice its run time.
ONCE_CPU = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # the older emitter has no MLIR passes for each fusion; later versions lack it
    ONCE_CPU |= {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


def make_mesh(data: int = 1, expert: int = 1, context: int = 1) -> jax.sharding.Mesh:
    """Make a mesh of the first `data` x `expert` x `context` devices with Explicit axes.

    Raises:
        ValueError: if there are fewer devices; the message names both numbers.
    """
    need = data * expert * context
    if need > jax.device_count():
        raise ValueError(f"a mesh of {data} x {expert} x {context} needs {need} devices, found {jax.device_count()}")
    return jax.make_mesh((data, expert, context), AXES, (AxisType.Explicit,) * 3, devices=jax.devices()[:need])


def start_devices(cpu_devices: int = 0, distributed: str = "", deterministic: bool = False) -> None:
    """Apply the settings that JAX reads when it starts its devices; call it before anything uses a device.

    Args:
        cpu_devices: number of emulated CPU devices; 0: JAX chooses the platform. It has no effect if JAX has started
            its devices already.
        distributed: how to join the other processes: `HOST:PORT,COUNT,NUMBER`, or `auto` to let JAX detect the
            cluster; empty: one process.
        deterministic: whether XLA must choose deterministic operations on GPUs.

    Raises:
        ConfigError: if `distributed` cannot be parsed, JAX is in use already, or the other processes do not answer.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if deterministic and _DETERMINISTIC not in flags.split():
        os.environ["XLA_FLAGS"] = f"{flags} {_DETERMINISTIC}".strip()
    if cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        with contextlib.suppress(RuntimeError):  # JAX has started its devices: `use_mesh` checks their number
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
    """Set the mesh of a run or a stage over all devices, replacing the current mesh.

    Arrays made on an earlier mesh stay on it.

    Raises:
        ConfigError: if `data` x `expert` x `context` is not the number of devices.
    """
    current = jax.sharding.get_abstract_mesh()
    if not current.empty and dict(current.shape) == dict(zip(AXES, (data, expert, context), strict=True)):
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


def use_first_devices(data: int, expert: int, context: int) -> None:
    """Set a mesh over the first `data` x `expert` x `context` devices, replacing the current mesh.

    Raises:
        ConfigError: if there are fewer devices, or a number is below 1.
    """
    if min(data, expert, context) < 1:
        raise ConfigError(f"mesh.data, mesh.expert and mesh.context must be 1 or above, found {data, expert, context}")
    try:
        jax.set_mesh(make_mesh(data, expert, context))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def ensure_mesh() -> contextlib.AbstractContextManager[Any]:
    """Set a 1 x 1 x 1 mesh of the first device if no mesh is set.

    Enter the returned context around the code that needs a mesh. Outside traced functions the mesh is set for good and
    the context does nothing. Inside a traced function JAX cannot set a mesh, so the context provides an abstract one
    for the code inside it.
    """
    if jax.sharding.get_abstract_mesh().empty:
        try:
            jax.set_mesh(make_mesh())
        except ValueError:  # inside jit, JAX permits only an abstract mesh
            return abstract_mesh(1, 1, 1)
    return contextlib.nullcontext()


def abstract_mesh(data: int, expert: int, context: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context with an abstract mesh, whose devices need not exist, to compute shapes and shardings."""
    mesh = jax.sharding.AbstractMesh((data, expert, context), AXES, axis_types=(AxisType.Explicit,) * 3)
    return jax.sharding.use_abstract_mesh(mesh)


def current_mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """Return the current mesh: the concrete one, or inside `abstract_mesh` the abstract one."""
    mesh, abstract = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
    return mesh if mesh.abstract_mesh == abstract else abstract


def on_cpu() -> bool:
    """Return whether programs traced now run on CPU."""
    return current_platform() == "cpu"


def current_platform() -> str:
    """Return the platform that programs traced now run on: of the current mesh's devices, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def emulated() -> bool:
    """Return whether programs traced now are for more than one emulated CPU device.

    There a loop that contains collectives can deadlock: XLA's CPU runtime may start a later, independent collective
    while the loop still runs, at a different iteration on each device.
    """
    return on_cpu() and jax.sharding.get_abstract_mesh().size > 1


def param_spec(axes: tuple[str, ...], shape: tuple[int, ...]) -> jax.P:
    """Return the partition spec of a parameter: `RULES` applied to its logical `axes`, each mesh axis used once.

    If the mesh axes of a rule do not divide the size in `shape`, or one is already used, the last of them is dropped
    until the others fit. An axis that is left with none is replicated.
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
    """Return the spec of an activation [B, S, ...]: rows over `data` and `expert`, positions over `context`."""
    return jax.P(BATCH, "context", *(None,) * (rank - 2))


def row_spec(rank: int) -> jax.P:
    """Return the spec of an array [B, ...] split by rows only, such as a document table: positions stay whole."""
    return jax.P(BATCH, *(None,) * (rank - 1))


def varying(x: jax.Array, *like: jax.Array) -> jax.Array:
    """Mark `x` as varying over every mesh axis that an array of `like` varies over, inside `shard_map`.

    Loop carries and hand-written gradients need operands that vary over the same axes. The values do not change. The
    transpose sums over those axes. Outside `shard_map` this returns `x`.
    """

    def axes_of(a: jax.Array) -> frozenset[str]:
        return jax.typeof(a).manual_axis_type.varying

    axes = frozenset().union(*map(axes_of, like)) - axes_of(x)
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
