# SPDX-License-Identifier: Apache-2.0
"""Load and save a folder of weights on eight emulated devices: time against the bytes alone, memory beyond the arrays.

    python benchmarks/convert.py --gigabytes 8 --format bf16

The model has the widths of DeepSeek-V4-Flash, a layer of each kind, and as many experts as fill the folder. The folder
is made in a temporary directory and deleted. Arrays are fp32, so that a folder in bf16 needs twice its size in memory,
and one in 4 bits eight times. The file cache is warm on both sides. CPU seconds are those of one process.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parent.parent
GIB = 2**30


def measure(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run `work`; return its result, its wall and CPU seconds, and the bytes that its peak is above the start."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, cpu, wall = _memory("VmRSS"), time.process_time(), time.perf_counter()
    result = work()
    figures = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return result, figures | {"peak_bytes": _memory("VmHWM") - before}


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def read_bytes(folder: Path) -> int:
    """Read all files of a folder, 64 MiB at a time."""
    buffer, total = memoryview(bytearray(64 << 20)), 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as content:
            while size := content.readinto(buffer):
                total += size
    return total


def write_bytes(folder: Path, total: int) -> None:
    """Write a file of zeros, 64 MiB at a time, to the disk."""
    buffer = bytes(64 << 20)
    with (folder / "zeros").open("wb", buffering=0) as out:
        for start in range(0, total, len(buffer)):
            out.write(memoryview(buffer)[: total - start])
        os.fsync(out.fileno())
    (folder / "zeros").unlink()


def make_folder(folder: Path, size: int, storage: str) -> None:
    """Write random weights of about `size` bytes."""
    import numpy as np
    from flax import nnx

    import dsv4_jax as ds
    from dsv4_jax.mesh import ensure_mesh
    from dsv4_jax.weights.export import write_weights
    from dsv4_jax.weights.names import official_shapes

    flash = ds.load_config(str(ROOT / "configs" / "v4_flash.py")).model
    few = dict(n_layers=3, compress_ratios=(0, 4, 128), n_mtp_layers=0, n_hash_layers=0, vocab_size=16384)
    bits = {"f32": 32, "bf16": 16, "fp8": 8, "fp4": 4.25}[storage]
    experts = 8 * size / bits / 3 / (3 * flash.dim * flash.moe_inter_dim)
    cfg = dataclasses.replace(flash, **few, n_routed_experts=max(8, 8 * round(experts / 8)))
    with ensure_mesh():
        shapes = official_shapes(nnx.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0))))
    numbers = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32)

    class Random:
        weights: ClassVar[dict[str, Any]] = {}

        def read(self, name: str, rows: slice) -> np.ndarray:
            shape = (len(range(*rows.indices(shapes[name][0]))), *shapes[name][1:]) if shapes[name] else ()
            return np.resize(numbers, shape)

    write_weights(Random(), cfg, shapes, folder, storage)


def load_and_save(folder: Path, storage: str) -> dict[str, Any]:
    """Measure reading the bytes, loading the model, writing as many bytes, and saving the model."""
    import jax

    import dsv4_jax as ds
    from dsv4_jax.mesh import make_mesh

    mesh = make_mesh(8, 1, 1)  # every array is split over all devices where its sizes allow it
    jax.block_until_ready(jax.device_put(0.0))
    total = read_bytes(folder)
    _, reading = measure(lambda: read_bytes(folder))
    model, loading = measure(lambda: jax.block_until_ready(ds.load_checkpoint(folder, mesh)))
    arrays = sum(shard.data.nbytes for x in jax.tree.leaves(model) for shard in x.addressable_shards)
    _, writing = measure(lambda: write_bytes(folder.parent, total))
    _, saving = measure(lambda: ds.save_checkpoint(model, folder.parent / "again", storage))
    return {"bytes": total, "arrays": arrays, "read": reading, "load": loading, "write": writing, "save": saving}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--format", default="bf16", choices=("f32", "bf16", "fp8", "fp4"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the inner processes
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        if args.make:
            return make_folder(args.folder, int(args.gigabytes * 1e9), args.format)
        return print(json.dumps(load_and_save(args.folder, args.format)))
    with tempfile.TemporaryDirectory(dir=ROOT) as root:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", f"{root}/made"]
        subprocess.run([*command, "--make"], env=env, check=True)
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{found['bytes'] / 1e9:.2f} GB in {args.format}, {found['arrays'] / 1e9:.2f} GB of arrays on 8 devices")
    for name, plain in (("load", "read"), ("save", "write")):
        ours, alone = found[name], found[plain]
        beyond = (ours["peak_bytes"] - (found["arrays"] if name == "load" else 0)) / GIB
        print(
            f"{name}: {ours['wall_s']:.1f} s ({ours['cpu_s']:.1f} CPU), {plain} the bytes: {alone['wall_s']:.1f} s "
            f"({alone['cpu_s']:.1f} CPU), ratio {ours['wall_s'] / alone['wall_s']:.2f} (goal 1.5); "
            f"{beyond:.2f} GiB beyond the arrays (goal 1)"
        )


if __name__ == "__main__":
    main()
