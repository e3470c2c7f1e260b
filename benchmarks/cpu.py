# SPDX-License-Identifier: Apache-2.0
"""Measure figures of training on CPU, on one core.

    python benchmarks/cpu.py                      # the names
    python benchmarks/cpu.py start                # one of them: a line of JSON for each figure

`benchmarks/run.py cpu` runs them all, a process each. Times are CPU-seconds.
"""

import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from peer import ours
from results import ROOT, Line

GIB = 2**30


def _peer(rows: int, length: int, *flags: str, cache: str = "") -> dict[str, float]:
    """Measure one shape of the peer configuration in a process of its own (`benchmarks/peer.py`)."""
    command = [sys.executable, str(ROOT / "benchmarks" / "peer.py"), "ours", str(rows), str(length), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": str(bool(cache)).lower()}
    env |= {"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}
    return json.loads(_output(command, env).splitlines()[-1])


def _output(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def gradient() -> Iterator[Line]:
    """Forward and backward pass of the peer configuration: rates, and time and memory by length."""
    found = {}
    for rows, length in ((4, 512), (1, 1024), (1, 4096), (1, 16384)):
        found[length] = _peer(rows, length, "--repeats", "1" if length == 16384 else "3")
        rate, peak = found[length]["tokens_per_cpu_s"], found[length]["peak_bytes"] / GIB
        note = f"peak memory {peak:.1f} GiB, compiler included"
        yield Line(f"forward and backward, {rows} x {length}", rate, "tokens per CPU-s", note=note)
    per_token = found[1024]["tokens_per_cpu_s"] / found[16384]["tokens_per_cpu_s"]
    yield Line("time per token, 16K positions over 1K", per_token, "x", 1.3)
    memory = found[16384]["peak_bytes"] / found[4096]["peak_bytes"] / 4
    yield Line("peak memory per token, 16K positions over 4K", memory, "x", 1.0)


def step() -> Iterator[Line]:
    """The whole step with AdamW: rates, trace and compile, and a second start."""
    with tempfile.TemporaryDirectory() as folder:
        cold = _peer(4, 512, "--step", cache=folder)
        warm = _peer(4, 512, "--step", "--repeats", "1", cache=folder)
    yield Line("step with AdamW, 4 x 512", cold["tokens_per_cpu_s"], "tokens per CPU-s")
    yield Line("step with AdamW, 1 x 2048", _peer(1, 2048, "--step")["tokens_per_cpu_s"], "tokens per CPU-s")
    yield Line("trace and compile of the step", cold["compile_cpu_s"], "CPU-s", 20, note="without a cache")
    yield Line("the same with the cache of compiled programs", warm["compile_cpu_s"], "CPU-s", 8)


def shares() -> Iterator[Line]:
    """Share of the step that the hyper-connections and Muon take, 16K tokens, from parts measured alone."""
    import jax
    import peer
    from flax import nnx

    from dsv4_jax.config import ModelConfig
    from dsv4_jax.mesh import ensure_mesh
    from dsv4_jax.model import hyper
    from dsv4_jax.model.params import Params
    from dsv4_jax.train.programs import POLICY

    ensure_mesh()
    cfg, tokens = ModelConfig(**peer.PEER, yarn=False), 4096
    weights = hyper.make_connection(Params(nnx.Rngs(0), cfg.init_std), cfg)
    x = jax.random.normal(jax.random.key(0), (1, tokens, 4, cfg.dim))

    def sublayer(x, weights):  # all that a sublayer's connection computes, with the collapsed streams as its output
        mix = hyper.compute_mix(x, *weights, cfg)
        return hyper.expand(hyper.collapse(x, mix.pre_BSN), x, mix)

    alone = jax.jit(
        jax.grad(lambda x, weights: (sublayer(x, weights) ** 2).sum(), (0, 1)), compiler_options=POLICY.repeated
    )
    connections = _fastest(lambda: jax.block_until_ready(alone(x, weights))) * 2 * cfg.n_layers / tokens
    seconds = {}
    for name, whole, length in (("gradient", False, 4096), ("muon", True, 512)):
        once, _ = peer.ours(1, length, whole, "deepseek_v4")
        seconds[name] = _fastest(once), length
    small, _ = peer.ours(1, 512, False)
    muon, per_token = seconds["muon"][0] - _fastest(small), seconds["gradient"][0] / 4096
    total = 16384 * per_token + muon
    note = f"{connections * 1e6:.0f} of {per_token * 1e6:.0f} microseconds per token of the gradient"
    yield Line("hyper-connections' share of a step, 16K tokens", 16384 * connections / total, "", 0.1, note=note)
    yield Line("Muon's share of a step, 16K tokens", muon / total, "", 0.15, note=f"{muon:.1f} CPU-s of {total:.0f}")


def _fastest(once: Callable[[], object], repeats: int = 2) -> float:
    """CPU-seconds of the fastest of several runs, after one to warm up."""
    once()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        once()
        times.append(time.process_time() - start)
    return min(times)


def matmul() -> Iterator[Line]:
    """Share of the core's own matmul rate that a step's gradient reaches, 100M parameters at 1024 positions."""
    import jax
    import jax.numpy as jnp
    import peer

    from dsv4_jax.config import ModelConfig
    from dsv4_jax.model.counts import operations_per_token

    sizes = dict(dim=768, n_heads=12, q_lora_rank=384, o_lora_rank=192, moe_inter_dim=384, vocab_size=16384)
    peer.PEER |= sizes
    once, parameters = ours(1, 1024, whole_step=False)
    x = jnp.ones((2048, 2048))
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    rate = 2 * 2048**3 / _fastest(lambda: product(x).block_until_ready())
    seconds = _fastest(once)
    operations = sum(operations_per_token(ModelConfig(**peer.PEER, yarn=False), 1024)) * 1024
    note = f"{parameters / 1e6:.0f}M parameters; a product of 2048 x 2048 makes {rate / 1e9:.0f} GFLOP/s"
    share = operations / seconds / rate
    yield Line("share of the matmul rate, sequence 1024", share, "", 0.4, at_most=False, note=note)


def eager() -> Iterator[Line]:
    """A whole call of a small model outside jit."""
    import jax.numpy as jnp
    import peer
    from flax import nnx

    from dsv4_jax.config import ModelConfig
    from dsv4_jax.mesh import ensure_mesh
    from dsv4_jax.model.deepseek import DeepSeek

    ensure_mesh()
    cfg = dataclasses.replace(ModelConfig(**peer.PEER, yarn=False), n_layers=2, compress_ratios=(0, 4), n_hash_layers=1)
    model = DeepSeek(cfg, rngs=nnx.Rngs(0))
    start = time.process_time()
    model(jnp.zeros((1, 64), jnp.int32))
    note = "two layers, 64 positions"
    yield Line("a call of the model outside jit", time.process_time() - start, "CPU-s", 5, note=note)


def start() -> Iterator[Line]:
    """The default run, cold: to the end of its first step, and without what a run does at its end."""
    flags = ("--train.steps", "1", "--train.sample-tokens", "0")
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "train.py", "configs/tiny_v41.py", *flags, "--train.run-dir", folder]
        _output(command, os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    yield Line("start of `make train` to its first step, cold", seconds, "CPU-s", 40, note="a run of one step")


def devices() -> Iterator[Line]:
    """Steps on eight emulated devices against one, the same global batch."""
    code = """
import sys, time
sys.path.insert(0, 'benchmarks')
import dsv4_jax as ds, jax
from dsv4_jax.mesh import make_mesh, start_devices
from step import prepared
data, expert, context = map(int, sys.argv[1:])
n = data * expert * context
flags = ['--data.batch-size', '4', '--data.seq-len', '512', '--train.cpu-devices', str(n)]
cfg = ds.load_config('configs/tiny_v4.py', flags)
start_devices(n, '', False)
once, loss = prepared(cfg, make_mesh(data, expert, context))
best = 1e9
for _ in range(3):
    start = time.process_time()
    jax.block_until_ready(once())
    best = min(best, time.process_time() - start)
print(best)
"""
    seconds = []
    for shape in ("1 1 1", "2 2 2"):
        out = _output([sys.executable, "-c", code, *shape.split()], os.environ | {"PYTHONPATH": str(ROOT)})
        seconds.append(float(out.splitlines()[-1]))
    note = f"configs/tiny_v4.py, 4 x 512: {seconds[0]:.2f} and {seconds[1]:.2f} CPU-seconds"
    yield Line("2 x 2 x 2 emulated devices over one, a step", seconds[1] / seconds[0], "x", 1.7, note=note)


FIGURES: dict[str, Callable[[], Iterator[Line]]] = {
    f.__name__: f for f in (gradient, step, shares, matmul, eager, start, devices)
}


def main() -> None:
    names = sys.argv[1:]
    if not names or not {*names} <= {*FIGURES}:
        raise SystemExit(f"usage: python benchmarks/cpu.py FIGURE ..., of {', '.join(FIGURES)}")
    for name in names:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # XLA's threads then wait for none on another core
        for line in FIGURES[name]():
            print(json.dumps(dataclasses.asdict(line)), flush=True)


if __name__ == "__main__":
    main()
