# SPDX-License-Identifier: Apache-2.0
"""What one balance bias for both modalities and what one for each makes of the experts' loads.

python benchmarks/modality_bias.py      # about eleven minutes; draws docs/images/modality_bias.png

Trains configs/modality_bias.py three times from the same seed: without balance, with one bias and with two. Then
counts, on the same held-out rows, the text tokens and the image tokens that every expert gets.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.data.batch import put_batch
from dsv4_jax.data.packing import ORIGIN
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.train.checkpoint import load_model
from dsv4_jax.train.feed import read_data, streams
from dsv4_jax.train.run import run

ROOT = Path(__file__).parent.parent
FIGURE = ROOT / "docs" / "images" / "modality_bias.png"
CASES = {"no bias": (0.0, False), "one bias": (1.0, False), "two biases": (1.0, True)}  # speed, a bias for each
KINDS = {"text": "#0072b2", "images": "#d55e00"}


def loads(cfg: ds.Config, name: str, speed: float, two: bool) -> np.ndarray:
    """Loads [layers, 2, E] of text and images after training."""
    cfg = dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, modality_bias=two),
        routing=dataclasses.replace(cfg.routing, bias_speed=speed * cfg.routing.bias_speed),
        train=dataclasses.replace(cfg.train, run_dir=f"{cfg.train.run_dir}/{name.replace(' ', '_')}"),
    )
    run(cfg)

    @jax.jit
    def count(model: ds.DeepSeek, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.stack([report.load for report in model.hidden(Inputs.of(batch)).layers])

    model = load_model(cfg)
    with streams(cfg, read_data(cfg)[0], ORIGIN) as (stream, evaluation):
        return np.sum([count(model, put_batch(b, stream.own, cfg.data.batch_size)) for b in evaluation], axis=0)


def fullest(load_2E: np.ndarray) -> dict[str, np.ndarray]:
    """Load of the fullest expert over the mean, of loads [..., 2, E]: of all tokens, of text, of images."""
    kinds = {"both": load_2E.sum(-2), "text": load_2E[..., 0, :], "images": load_2E[..., 1, :]}
    return {kind: x.max(-1) / x.mean(-1) for kind, x in kinds.items()}


def draw(found: dict[str, np.ndarray]) -> None:
    """A panel for every run and layer, with the experts in the order of their images."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    layers, _, E = next(iter(found.values())).shape
    figure, panels = plt.subplots(layers, len(found), figsize=(9, 2 * layers), sharey=True, layout="constrained")
    for (name, load), column in zip(found.items(), panels.T, strict=True):
        column[0].set_title(name)
        for panel, load_2E in zip(column, load, strict=True):
            order = np.argsort(-load_2E[1], kind="stable")
            for i, (kind, color) in enumerate(KINDS.items()):
                height = load_2E[i, order] / load_2E[i].mean()
                panel.bar(np.arange(E) + 0.4 * i - 0.2, height, 0.4, color=color, label=kind)
            said = "max/mean\n" + "\n".join(f"{kind} {x:.1f}" for kind, x in fullest(load_2E).items())
            panel.text(0.98, 0.94, said, fontsize="small", transform=panel.transAxes, ha="right", va="top")
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set_xticks([])
    for layer, panel in enumerate(panels[:, 0]):
        panel.set_ylabel(f"layer {layer}\nload / mean")
    for panel in panels[-1]:
        panel.set_xlabel("experts, most images first")
    panels[0, 0].legend(loc="upper center", fontsize="small")
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    cfg = ds.load_config(ROOT / "configs" / "modality_bias.py", sys.argv[1:])
    found = {name: loads(cfg, name, *case) for name, case in CASES.items()}
    for name, load in found.items():
        said = (f"{kind} {np.mean(x):.2f}" for kind, x in fullest(load).items())
        print(f"{name:<10} max/mean, mean of layers: {', '.join(said)}")
    draw(found)


if __name__ == "__main__":
    main()
