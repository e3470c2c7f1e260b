# SPDX-License-Identifier: Apache-2.0
"""Folders between here and transformers 5.24: each side reads what the other writes and computes the same logits.

Transformers runs in an environment of its own: that of `make bench-peers`, or of the Python that TRANSFORMERS_PYTHON
names.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import ROOT
from support.golden_models import forward, ruled_model, small_config

import dsv4_jax as ds

PYTHON = Path(os.environ.get("TRANSFORMERS_PYTHON", ROOT / ".cache" / "peers" / "transformers" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with transformers and torch: make bench-peers"),
]
# Every kind of layer of V4, and an MTP block, which transformers leaves out.
CONFIG = small_config(
    vocab_size=96, dim=64, n_layers=3, n_heads=4, head_dim=32, rope_head_dim=8, q_lora_rank=16, o_lora_rank=16,
    moe_inter_dim=32, n_routed_experts=8, compress_ratios=(0, 4, 8, 0), n_hash_layers=1, window_size=8,
    index_head_dim=16, index_topk=4, rope_factor=4.0, remat="none",
)  # fmt: skip
FORMATS = ("f32", "bf16", "hf")
THEIRS = """
import sys
import numpy as np
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

torch.set_num_threads(1)
root, formats = sys.argv[1], sys.argv[2:]
ids = torch.tensor(np.load(f"{root}/ids.npy").astype(np.int64))
for name in formats:
    model, report = DeepseekV4ForCausalLM.from_pretrained(
        f"{root}/{name}", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    left = {kind: sorted(names) for kind, names in report.items() if names and kind != "unexpected_keys"}
    left["unexpected"] = [key for key in report["unexpected_keys"] if "mtp." not in key]
    assert not any(left.values()), (name, left)
    with torch.no_grad():
        np.save(f"{root}/{name}.npy", model.eval()(ids).logits.numpy())
model.save_pretrained(f"{root}/saved")
"""


def test_logits_are_those_of_transformers_both_ways(tmp_path):
    """In fp32, in bf16, and under the names of its modules; then what `save_pretrained` writes is read here."""
    model, ids = ruled_model(CONFIG), np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 40)).astype(np.int32)
    np.save(tmp_path / "ids.npy", ids)
    for name in FORMATS:
        ds.save_checkpoint(model, tmp_path / name, name)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [str(PYTHON), "-c", THEIRS, str(tmp_path), *FORMATS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]
    run = forward()
    for name in (*FORMATS, "saved"):
        logits = np.asarray(run(ds.load_checkpoint(tmp_path / name, remat="none"), ids).logits)
        theirs = np.load(tmp_path / f"{name if name != 'saved' else FORMATS[-1]}.npy")
        assert np.abs(theirs).max() > 1
        np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-4, err_msg=name)
