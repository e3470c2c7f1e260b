# SPDX-License-Identifier: Apache-2.0
"""Attention core: all entries under a mask against each query's own gathered, and memory by length; the TPU compiler's
estimate of a block of queries.

    python benchmarks/attention.py
    JAX_PLATFORMS=cpu python benchmarks/attention.py v5p:2x2x1 csa:65536 window:65536 csa:1048576:64

The first prints time and temporary memory of one CSA layer's core with its gradient. GATHER_COST in
`dsv4_jax/ops/attention.py` is read off its first table: the M / k at which gathering starts to win.

The second compiles the core with the sizes of DeepSeek-V4-Flash for a TPU that need not exist (needs libtpu). A third
number is that of the devices along `context`: the core then has the last of so many chunks of the row's queries, and
all of its entries. It prints the estimate of a block of 128 queries, its largest operations, and those that the
compiler does not estimate (sorts, gathers, scatters).
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from timing import fastest

from dsv4_jax.ops.attention import Index, attend
from dsv4_jax.ops.documents import find_documents, find_windows
from dsv4_jax.ops.indexer import count_tile
from dsv4_jax.roofline import chip_of
from dsv4_jax.train.programs import POLICY

H, K, I, J, RATIO, WINDOW = 8, 64, 16, 32, 4, 128
# DeepSeek-V4-Flash: heads and widths; ratio and selected entries of each kind, None without an indexer.
FLASH = {"H": 64, "K": 512, "I": 64, "J": 128}
KINDS = {"window": (0, None), "hca": (128, None), "csa": (4, 512), "warmup": (4, 0)}
BLOCK = 128


def compiled(S: int, topk: int, select: str):
    at = find_windows(find_documents(jnp.ones((1, S), jnp.int32)), RATIO)
    first = jnp.zeros((1, S), jnp.int32)
    M = S // RATIO
    shapes = [(1, S, H, K), (1, S, K), (H,), (1, M, K), (1, S, I, J), (1, S, I), (1, M, J)]
    arrays = [
        jax.random.normal(key, shape) for key, shape in zip(jax.random.split(jax.random.key(0), 7), shapes, strict=True)
    ]

    def loss(q, kv, sink, entries, index_q, index_w, index_k):
        index = Index(index_q, index_w, index_k, topk)
        out = attend(
            q, kv, sink, first, window=WINDOW, entries_BMK=entries, windows=at, index=index, block=BLOCK, select=select
        )
        return (out.o_BSHK**2).sum() + out.kl_BS.sum()

    program = jax.jit(jax.grad(loss, tuple(range(7)))).lower(*arrays).compile()
    return program, lambda: program(*arrays)


def compile_for_tpu(kind: str, S: int, topology: str, gradient: bool, context: int = 1):
    """Compile the core of a layer of V4-Flash for the last chunk, of `context`, of a row of S positions.

    Returns:
        The program, its tiles of scores, and the chip.

    Raises:
        SystemExit: if the queries of a chunk take more than a quarter of the chip's memory.
    """
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    (H, K, I, J), (ratio, topk) = FLASH.values(), KINDS[kind]
    M, T, where = S // ratio if ratio else 0, S // context, jax.sharding.SingleDeviceSharding(device)
    chip = chip_of(device.device_kind)
    assert chip is not None, device.device_kind
    if (queries := T * H * K * 2) > chip.memory / 4:
        raise SystemExit(
            f"{kind}:{S}:{context}: the queries of {T} positions take {queries / 2**30:.0f} GiB of the chip's "
            f"{chip.memory / 2**30:.0f}; split the row over more devices, as in {kind}:{S}:64"
        )

    def array(*shape: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, *shape), dtype, sharding=where)

    index = (array(T, I, J), array(T, I, dtype=jnp.float32), array(M, J)) if topk is not None else None
    left = min(WINDOW - 1, S - T)  # keys of the chunk before
    x = (array(T, H, K), array(left + T, K), array(H, dtype=jnp.float32), array(M, K) if ratio else None, index)

    def core(x, segments):
        (q, kv, sink, entries, index), docs = x, find_documents(segments)
        windows = find_windows(docs, ratio) if ratio else None
        options = dict(window=WINDOW, offset=S - T, entries_BMK=entries, windows=windows)
        index = None if index is None else Index(*index, topk)
        out = attend(q, kv, sink[0], docs.first_BS[:, S - T :], index=index, block=BLOCK, **options)
        return out.o_BSHK, out.kl_BS

    def pull(x, segments, do):
        (_, kl), back = jax.vjp(lambda x: core(x, segments), x)
        return back((do, jnp.ones_like(kl)))

    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("x",))):
        tiles = -(-M // count_tile(jax.ShapeDtypeStruct((1, BLOCK, I, J), jnp.bfloat16)))
        traced = (
            jax.jit(pull).trace(x, array(S, dtype=jnp.int32), x[0])
            if gradient
            else jax.jit(core).trace(x, array(S, dtype=jnp.int32))
        )
        return traced.lower(lowering_platforms=("tpu",)).compile(compiler_options=POLICY.repeated), tiles, chip


def list_operations(program: str, tiles: int, clock: float) -> list[tuple[float | None, str]]:
    """List the estimated microseconds of all operations in the loops over blocks, for one block; None: no estimate.

    `clock` counts cycles a second. Loops inside are those over tiles of entries. Their operations count `tiles` times:
    the last block of a row scores all of them, the middle one half.
    """
    bodies: dict[str, list[str]] = {}
    for line in program.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line):
            lines = bodies.setdefault("ENTRY" if line.startswith("ENTRY") else head[1], [])
        elif line.startswith("  "):
            lines.append(line)

    def walk(name: str, times: int) -> list[tuple[float | None, str]]:
        found: list[tuple[float | None, str]] = []
        for line in bodies[name]:
            if body := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                found += walk(body[1], times * tiles if name != "ENTRY" else 1)
            elif name != "ENTRY" and (cycles := re.search(r'cycles":"(\d+)"', line)) and int(cycles[1]) < 1 << 50:
                found.append((times * int(cycles[1]) / clock * 1e6, line))
            elif name != "ENTRY" and re.search(r" (sort|scatter|gather|fusion)\(", line):
                found.append((None, line))
        return found

    return walk("ENTRY", 1)


def describe(line: str) -> str:
    """Return the shape and the source of an operation."""
    shape, source = re.search(r" = (\(?\w+\[[\d,]*\])", line), re.search(r'op_name="([^"]*)"', line)
    return f"{shape[1] if shape else '':28} {'/'.join(source[1].split('/')[-2:]) if source else ''}"


def estimate(topology: str, layers: list[str]) -> None:
    """Print the compiler's estimates of layers such as `csa:65536` or `csa:1048576:64`."""
    for layer in layers:
        kind, S, *context = layer.split(":")
        for gradient in (False, True):
            program, tiles, chip = compile_for_tpu(kind, int(S), topology, gradient, *map(int, context))
            operations = list_operations(program.as_text(), tiles, chip.clock)
            known = sorted(((us, line) for us, line in operations if us is not None), reverse=True)
            temporary = program.memory_analysis().temp_size_in_bytes
            print(
                f"{topology} {layer} {'gradient' if gradient else 'forward'}: "
                f"a block {sum(us for us, _ in known):.0f} us, temporary {temporary / 1e9:.2f} GB"
            )
            for us, line in known[:8]:
                print(f"    {us:6.0f} us  {describe(line)}")
            for line in (line for us, line in operations if us is None):
                print(f"    no estimate {describe(line)}", flush=True)


def main() -> None:
    if len(sys.argv) > 1:
        estimate(sys.argv[1], sys.argv[2:] or ["csa:65536"])
        return
    print(f"{jax.default_backend()}, jax {jax.__version__}; H {H}, K {K}, ratio {RATIO}, window {WINDOW}")
    for S, topk in ((2048, 128), (2048, 32), (4096, 64), (4096, 32), (8192, 64)):
        masked, gathered = compiled(S, topk, "masked"), compiled(S, topk, "gathered")
        t = fastest({"masked": masked[1], "gathered": gathered[1]}, repeats=2)
        print(
            f"S {S:5}  entries {S // RATIO:5}  k {topk:4}  M/k {S // RATIO // topk:3}  masked {t['masked']:.3f} s  "
            f"gathered {t['gathered']:.3f} s  gathered is {t['masked'] / t['gathered']:.2f}x as fast"
        )
    for select in ("masked", "gathered"):
        sizes = {S: compiled(S, 64, select)[0].memory_analysis().temp_size_in_bytes / 2**20 for S in (2048, 4096, 8192)}
        print(f"temporary MiB, {select}: " + ", ".join(f"S {S}: {m:.0f}" for S, m in sizes.items()))


if __name__ == "__main__":
    main()
