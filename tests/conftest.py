# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before jax is imported, the mesh of all tests, and the golden models.

Eight emulated devices for everybody, so that any process can run any test; cheap compilation, since most
of the time of these tests is compiling; and a cache of what was compiled before, shared by the two
processes that run the tests, a file each at a time.
"""

import importlib.metadata
import os
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2 * 2**30),  # bytes; with a limit, files are locked while they are written
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
if importlib.metadata.version("jax").startswith("0.10."):  # later ones have no other way to make CPU code
    SETTINGS["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"  # compiles in half the time
for _key, _value in SETTINGS.items():
    os.environ.setdefault(_key, _value)

import jax  # noqa: E402
import pytest  # noqa: E402
from golden_models import Golden  # noqa: E402
from hypothesis import settings  # noqa: E402

from dsv4_jax.mesh import make_mesh  # noqa: E402

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("default")


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
