# SPDX-License-Identifier: Apache-2.0
"""Throughput of a configuration's training step on the devices at hand, and what part of their peak it uses.

python benchmarks/step.py configs/tiny_v4.py --model.compute-dtype bfloat16 --data.batch-size 16

The keys are those of train.py; the batch is random, full rows. With several devices the first loss is also
computed on the mesh 1 x 1 x 1, and both are printed.
"""

import sys

import jax
import numpy as np
from timing import fastest

import dsv4_jax as ds
from dsv4_jax.data.batch import abstract_batch
from dsv4_jax.mesh import make_mesh, start_devices
from dsv4_jax.model.counts import operations_per_token
from dsv4_jax.train.hardware import peak_flops
from dsv4_jax.train.state import init_state
from dsv4_jax.train.step import make_train_step


def prepared(cfg: ds.Config, mesh: jax.sharding.Mesh):
    """A function that makes one step on random rows, and the loss of the first."""
    with jax.set_mesh(mesh):
        random = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (cfg.data.batch_size, cfg.data.seq_len))
        shapes = abstract_batch(cfg, cfg.data.batch_size)
        rows = {name: np.zeros(x.shape, x.dtype) for name, x in shapes.items()}  # no images
        rows |= {name: random.astype(np.int32) for name in ("ids", "targets", "mtp_targets")}
        rows |= {
            name: np.full_like(rows["ids"], x) for name, x in (("segment_ids", 1), ("token_types", -1)) if name in rows
        }
        batch = {name: jax.device_put(x, shapes[name].sharding) for name, x in rows.items()}
        state = jax.jit(lambda: init_state(cfg))()
        step = jax.jit(make_train_step(cfg), donate_argnums=0).lower(state, batch).compile()
        state, metrics = step(state, batch)

    def once():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return once, float(metrics["loss"])


def main() -> None:
    cfg = ds.load_config(sys.argv[1], sys.argv[2:])
    start_devices(cfg.train.cpu_devices, cfg.train.distributed, cfg.train.deterministic)
    shape = (cfg.mesh.data, cfg.mesh.expert, cfg.mesh.context)
    once, loss = prepared(cfg, make_mesh(*shape))
    seconds = fastest({"step": once})["step"]
    tokens = cfg.data.batch_size * cfg.data.seq_len
    devices, kind = np.prod(shape), jax.devices()[0].device_kind
    operations = sum(operations_per_token(cfg.model, cfg.data.seq_len)) * tokens / seconds / devices
    print(f"{devices} x {kind}: {seconds:.3f} s a step, {tokens / seconds:,.0f} tokens/s")
    peak = peak_flops(cfg.train.peak_flops)
    print(f"model FLOP utilisation {operations / peak:.1%}" if peak else f"{operations:.3g} operations/s a device")
    if devices > 1:
        _, alone = prepared(cfg, make_mesh())
        print(f"first loss {loss:.7f} on {' x '.join(map(str, shape))}, {alone:.7f} on one device")


if __name__ == "__main__":
    main()
