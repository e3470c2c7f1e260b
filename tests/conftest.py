# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before jax is imported, the mesh of all tests, and the golden models.

Eight emulated devices for everybody, so that any process can run any test; cheap compilation, since most
of the time of these tests is compiling; and a cache of what was compiled before, shared by the two
processes that run the tests, a file each at a time. (One of them may find a file that the other still
writes: JAX then compiles, and its warning is ignored.)
"""

import gc
import importlib.metadata
import os
import signal
from typing import Any

from support import ROOT

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # where an operation was written would cost a tenth of the time
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
if importlib.metadata.version("jax").startswith("0.10."):  # later ones have no other way to make CPU code
    # Half the time to compile; and a tenth less of all where each of the two processes has one core.
    SETTINGS["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
for _key, _value in SETTINGS.items():
    os.environ.setdefault(_key, _value)

# A shell starts a command in the background with SIGINT ignored, and the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(100_000, 50, 100)  # traces are many objects that stay: looking through them costs a tenth too

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from support.golden_models import Golden, golden_v41  # noqa: E402

from dsv4_jax.mesh import make_mesh  # noqa: E402

settings.register_profile("default", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("thorough", deadline=None, max_examples=50)
settings.load_profile("default")


_PROGRAMS = {}
LONGEST = [
    *("test_mesh.py", "test_train.py", "test_kill.py", "test_golden.py", "test_dspark.py", "test_v41.py"),
    *("test_experts.py", "test_vision.py", "test_engram.py"),
]


def pytest_collection_modifyitems(items):
    """The files that take longest first, so that neither process ends up alone with one of them."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def mesh():
    """One device under the three axes; tests of other meshes enter their own inside it."""
    with jax.set_mesh(make_mesh()) as one:
        yield one


@pytest.fixture(scope="session")
def flash() -> Golden:
    """Window, CSA and HCA layers, two of them hashed, and an MTP block."""
    return Golden("v4_flash_tiny")


@pytest.fixture(scope="session")
def pro() -> Golden:
    """Starts with HCA layers; its SwiGLU limit of 1 makes the clamp work. Nothing is computed twice."""
    return Golden("v4_pro_tiny", remat="none")


@pytest.fixture(scope="session", params=["flash", "pro"])
def golden(request) -> Golden:
    """Each golden model."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def v41(tmp_path_factory) -> dict[str, Any]:
    """The golden model of V4.1, its numbers, and what a call gives."""
    return golden_v41(tmp_path_factory.mktemp("v41"))


@pytest.fixture(scope="module")
def cheap_compilation():
    """Few steps are run here: what the loop asks of XLA on CPU would not pay; and equal programs are made once."""
    from dsv4_jax.train import programs, step

    compiled = programs.Programs.compiled

    def once(self, stage, name, state, batch):
        train = stage.cfg.train
        train = (train.objective, train.metrics, train.seed, train.steps, train.accumulate, train.frozen)
        shapes = sorted((n, x.shape, str(x.sharding)) for n, x in batch.items())
        sections = [getattr(stage.cfg, name) for name in ("model", "data", "optim", "loss", "mesh")]
        sections.append(stage.cfg.routing.bias_speed)
        makers = programs.make_train_step, programs.make_eval_step, programs.make_route, step.make_loss
        key = repr((sections, train, stage.clock.batch, stage.clock.segments, name, shapes)), makers
        if key not in _PROGRAMS:
            _PROGRAMS[key] = compiled(self, stage, name, state, batch)
        return _PROGRAMS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "POLICY", programs.CompilePolicy(cpu=programs.POLICY.once))
        patch.setattr(programs.Programs, "compiled", once)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of short texts."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"The quick brown fox number {i} jumps over the lazy dog. " * (i % 7 + 1))
    return str(folder)
