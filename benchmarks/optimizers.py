# SPDX-License-Identifier: Apache-2.0
"""What the optimizers cost: Newton-Schulz against optax's and a plain loop, Sinkhorn against rewriting.

    python benchmarks/optimizers.py [--step]

All forms of Newton-Schulz run the same ten steps in fp32, to equal accuracy. `--step` also compiles the
tiny model's training step with AdamW and with Muon, which takes minutes.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import fastest

from dsv4_jax import optim

SHAPES = [(40, 64, 128), (16, 256, 1024), (16, 1024, 256), (8, 512, 1280), (4, 768, 768)]


def newton_schulz_sides(x: jax.Array) -> dict:
    """Directions of a stack of matrices by each implementation, as compiled programs."""

    def loop(x):
        def one(m):
            m = m / (jnp.linalg.norm(m) + 1e-7)
            for a, b, c in optim.HYBRID:
                gram = m @ m.T
                m = a * m + (b * gram + c * gram @ gram) @ m
            return m

        return jnp.stack([one(m) for m in x])

    dims = optax.contrib.MuonDimensionNumbers(1, 2)
    theirs = optax.contrib.scale_by_muon(
        ns_coeffs=optim.HYBRID, ns_steps=10, beta=0.0, nesterov=False, weight_dimension_numbers=dims
    )
    sides = {
        "ours": optim.newton_schulz,
        "Gram form": lambda x: optim.newton_schulz(x, gram=True),
        "in fours": lambda x: optim.newton_schulz(x, batch_size=4),
        "optax": lambda x: theirs.update(x, theirs.init(x))[0],
        "plain loop": loop,
    }
    return {name: jax.jit(side).lower(x).compile() for name, side in sides.items()}


def newton_schulz() -> None:
    print("| stack | form | seconds | over ours | GFLOP | temporary MiB |\n|---|---|---|---|---|---|")
    for shape in SHAPES:
        x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
        programs = newton_schulz_sides(x)
        reference = programs["ours"](x)
        for name, program in programs.items():
            assert np.abs(program(x) - reference).max() < 1e-3, name
        seconds = fastest({name: (lambda p=program, x=x: p(x)) for name, program in programs.items()}, 3)
        for name, program in programs.items():
            flops = "" if name in ("in fours", "optax") else f"{program.cost_analysis()['flops'] / 1e9:.1f}"
            temp = program.memory_analysis().temp_size_in_bytes / 2**20
            ratio = seconds[name] / seconds["ours"]
            print(
                f"| {' x '.join(map(str, shape))} | {name} | {seconds[name]:.3f} | {ratio:.2f} | {flops} | {temp:.0f} |"
            )


def sinkhorn() -> None:
    """Two vectors against eleven rewritings of the table."""
    x = jax.random.normal(jax.random.key(0), (200_000, 512))

    def rewriting(x):
        rho = jnp.linalg.norm(x, axis=1, keepdims=True)
        u = jnp.where(rho > 1e-3 * rho.mean(), x, 0)
        rows = lambda u: u / (jnp.linalg.norm(u, axis=1, keepdims=True) + 1e-20)
        columns = lambda u: u / (jnp.linalg.norm(u, axis=0, keepdims=True) + 1e-20)
        return jax.lax.fori_loop(0, 5, lambda _, u: rows(columns(u)), rows(u)) * (0.18 * 512**0.5)

    ours = lambda x: optim.scale_by_sinkhorn().update(x, optax.EmptyState())[0]
    programs = {"two vectors": jax.jit(ours).lower(x).compile(), "rewriting": jax.jit(rewriting).lower(x).compile()}
    np.testing.assert_allclose(programs["two vectors"](x)[:99], programs["rewriting"](x)[:99], atol=1e-4)
    seconds = fastest({name: (lambda p=program: p(x)) for name, program in programs.items()}, 3)
    print("\n| Sinkhorn, 200,000 x 512 | seconds | temporary MiB |\n|---|---|---|")
    for name, program in programs.items():
        print(f"| {name} | {seconds[name]:.2f} | {program.memory_analysis().temp_size_in_bytes / 2**20:.0f} |")


def training_step() -> None:
    """The tiny model's step with AdamW and with Muon."""
    from dsv4_jax.config.files import load_config
    from dsv4_jax.mesh import act_spec, ensure_mesh
    from dsv4_jax.train.programs import POLICY
    from dsv4_jax.train.state import init_state
    from dsv4_jax.train.step import make_train_step

    ensure_mesh()
    sides = {}
    for name in ("adamw", "deepseek_v4", "deepseek_v41"):
        cfg = load_config("configs/tiny_v4.py", ["--optim.name", name])
        ids = np.random.default_rng(0).integers(0, 256, (cfg.data.batch_size, cfg.data.seq_len), np.int32)
        batch = dict(ids=ids, segment_ids=np.ones_like(ids), targets=ids, mtp_targets=ids)
        batch = jax.tree.map(lambda x: jax.device_put(x, act_spec(2)), batch)
        state = jax.jit(lambda cfg=cfg: init_state(cfg), compiler_options=POLICY.once)()
        program = jax.jit(make_train_step(cfg)).lower(state, batch).compile(compiler_options=POLICY.cpu)
        sides[name] = lambda program=program, state=state, batch=batch: program(state, batch)
    seconds = fastest(sides, 5)
    print("\n| tiny step | seconds | over AdamW |\n|---|---|---|")
    for name, value in seconds.items():
        print(f"| {name} | {value:.3f} | {value / seconds['adamw']:.2f} |")


if __name__ == "__main__":
    newton_schulz()
    sinkhorn()
    if "--step" in sys.argv:
        training_step()
