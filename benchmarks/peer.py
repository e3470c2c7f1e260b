# SPDX-License-Identifier: Apache-2.0
"""One model of 14 million parameters, written once, and its training measured here or in a peer's framework.

    python benchmarks/peer.py ours 4 512                  # forward and backward pass of 4 rows of 512 tokens
    python benchmarks/peer.py ours 4 512 --step           # the whole step with AdamW
    .cache/peers/transformers/bin/python benchmarks/peer.py transformers 4 512

Each run measures one framework and one shape in a process of its own, on one core, and prints one line of JSON. A peer
runs in an environment of its own, so nothing of this project is imported for it. `benchmarks/peers.py` runs both sides
in turn.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

# The model, under the official names. The rest has the defaults of the published V4 models.
PEER: dict[str, Any] = dict(
    vocab_size=8192,
    dim=256,
    n_layers=5,
    n_heads=8,
    head_dim=64,
    rope_head_dim=16,
    q_lora_rank=128,
    o_groups=4,
    o_lora_rank=64,
    moe_inter_dim=128,
    n_routed_experts=16,
    n_activated_experts=4,
    compress_ratios=(0, 0, 4, 128, 4),
    n_hash_layers=3,
    n_mtp_layers=0,
    window_size=128,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=64,
    hc_mult=4,
)
SHAPES = ((4, 512), (1, 2048), (1, 4096))

# Runs once and returns the loss; the second value counts the parameters.
Side = tuple[Callable[[], float], int]


def ours(rows: int, length: int, whole_step: bool, optimizer: str = "adamw") -> Side:
    """Make the gradient or the whole step of this project, compiled with the options of a run on CPU."""
    import jax
    import numpy as np

    from dsv4_jax.config import Config, DataConfig, LossConfig, ModelConfig, OptimConfig, TrainConfig
    from dsv4_jax.mesh import act_spec, ensure_mesh
    from dsv4_jax.model.counts import parameter_counts
    from dsv4_jax.train.objectives import objective_of
    from dsv4_jax.train.optimizer import split_trained
    from dsv4_jax.train.programs import POLICY
    from dsv4_jax.train.state import init_state
    from dsv4_jax.train.step import make_loss, make_train_step

    ensure_mesh()
    cfg = Config(
        model=ModelConfig(**PEER, yarn=False),
        data=DataConfig(seq_len=length, batch_size=rows),
        loss=LossConfig(mtp=0.0),
        optim=OptimConfig(name=optimizer),
        train=TrainConfig(steps=1000),
    )
    ids = np.random.default_rng(0).integers(0, PEER["vocab_size"], (rows, length), np.int32)
    following = np.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    batch = dict(ids=ids, segment_ids=np.ones_like(ids), targets=following, mtp_targets=following)
    batch = jax.tree.map(lambda x: jax.device_put(x, act_spec(2)), batch)
    state = jax.jit(lambda: init_state(cfg), compiler_options=POLICY.once)()
    parameters = parameter_counts(cfg.model)[0]
    if whole_step:
        step = jax.jit(make_train_step(cfg), donate_argnums=0, compiler_options=POLICY.repeated)

        def once() -> float:
            nonlocal state
            state, metrics = step(state, batch)
            return float(metrics["loss"])

        return once, parameters
    objective = objective_of(cfg)
    loss = make_loss(cfg, objective)

    def both(state, batch):
        batch = objective.prepare(batch, state.step)
        count = objective.denominators(batch)
        trained, others = split_trained(cfg, state.params)
        return jax.value_and_grad(loss, has_aux=True)(trained, others, state.buffers, batch, count)

    program = jax.jit(both, compiler_options=POLICY.repeated)

    def gradient() -> float:
        (_, (losses, _)), grads = program(state, batch)
        jax.block_until_ready(grads)
        return float(losses["loss"])

    return gradient, parameters


def transformers(rows: int, length: int, whole_step: bool) -> Side:
    """Make the forward and backward pass of transformers' model, in training mode and with its default kernels."""
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=PEER["vocab_size"],
        hidden_size=PEER["dim"],
        num_hidden_layers=PEER["n_layers"],
        num_attention_heads=PEER["n_heads"],
        head_dim=PEER["head_dim"],
        partial_rotary_factor=PEER["rope_head_dim"] / PEER["head_dim"],
        q_lora_rank=PEER["q_lora_rank"],
        o_groups=PEER["o_groups"],
        o_lora_rank=PEER["o_lora_rank"],
        moe_intermediate_size=PEER["moe_inter_dim"],
        n_routed_experts=PEER["n_routed_experts"],
        num_experts_per_tok=PEER["n_activated_experts"],
        compress_ratios=list(PEER["compress_ratios"]),
        num_hash_layers=PEER["n_hash_layers"],
        num_nextn_predict_layers=PEER["n_mtp_layers"],
        sliding_window=PEER["window_size"],
        index_n_heads=PEER["index_n_heads"],
        index_head_dim=PEER["index_head_dim"],
        index_topk=PEER["index_topk"],
        hc_mult=PEER["hc_mult"],
        use_cache=False,
    )
    model = DeepseekV4ForCausalLM(config).float().train()
    # Hash routing: an even table, or every token would go to the experts of a table of zeros.
    generator = torch.Generator().manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            order = torch.rand(buffer.shape[0], config.n_routed_experts, generator=generator).argsort(1)
            buffer.copy_(order[:, : buffer.shape[1]])
    ids = torch.randint(0, PEER["vocab_size"], (rows, length), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters()) if whole_step else None

    def once() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if optimizer:
            optimizer.step()
        return float(loss.detach())

    return once, sum(p.numel() for p in model.parameters())


def measure(side: Callable[[int, int, bool], Side], rows: int, length: int, whole_step: bool, repeats: int) -> dict:
    """Measure one side in this process.

    Returns:
        `tokens_per_cpu_s` of the fastest of `repeats` runs after the first, `compile_cpu_s` (what the first run took
        longer: tracing and compiling), `peak_bytes` of the process, `loss` and `parameters`.
    """
    once, parameters = side(rows, length, whole_step)
    start = time.process_time()
    loss = once()
    first = time.process_time() - start
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        once()
        seconds.append(time.process_time() - start)
    return {
        "tokens_per_cpu_s": rows * length / min(seconds),
        "compile_cpu_s": first - min(seconds),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "loss": loss,
        "parameters": parameters,
    }


def main() -> None:
    sides = {"ours": ours, "transformers": transformers}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("side", choices=sides)
    parser.add_argument("rows", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--step", action="store_true", help="the whole step with AdamW, not only the gradient")
    parser.add_argument("--repeats", type=int, default=3, help="runs after the first (default 3)")
    args = parser.parse_args()
    # One core for this process and all its threads: CPU-seconds then mean the same on both sides.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps(measure(sides[args.side], args.rows, args.length, args.step, args.repeats)))


if __name__ == "__main__":
    main()
