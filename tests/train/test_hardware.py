# SPDX-License-Identifier: Apache-2.0
"""The compilation cache, the share of the devices' peak, and their memory."""

import os
import subprocess
import sys

import jax
import pytest
from support import ROOT
from support.runs import metrics, small, train

from dsv4_jax.config import TrainConfig
from dsv4_jax.model.counts import operations_per_token
from dsv4_jax.section import ConfigError
from dsv4_jax.train import hardware, programs

CACHED = """
import sys, jax
from dsv4_jax.train.programs import use_compile_cache
jax.jit(lambda x: x + 1)(1)
use_compile_cache(sys.argv[1])
jax.jit(lambda x: x * 2)(1).block_until_ready()
"""


@pytest.mark.parametrize("given", ["", "elsewhere"])
def test_programs_are_kept_in_the_folder_unless_jax_has_one(tmp_path, given):
    folders = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / given)} if given else {}
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    subprocess.run([sys.executable, "-c", CACHED, str(tmp_path / "own")], check=True, cwd=ROOT, env=kept | folders)
    own = list(tmp_path.glob("own/cpu-*/*multiply*")) + list(tmp_path.glob("own/cpu-*/*"))
    assert bool(own) == (not given) and (tmp_path / "own").exists() == (not given)
    assert not given or list((tmp_path / given).iterdir())


def test_an_empty_folder_is_no_cache(monkeypatch):
    changed = []
    monkeypatch.setattr(jax.config, "update", lambda *what: changed.append(what))
    programs.use_compile_cache("")
    assert not changed and TrainConfig(steps=1).compile_cache.startswith("~")


def test_utilisation_is_operations_over_the_peak_of_all_devices(corpus, tmp_path, cheap_compilation):
    cfg = small(corpus, tmp_path, steps=3, peak_flops=1e12)
    train(cfg)
    each = sum(operations_per_token(cfg.model, cfg.data.seq_len)) / (1e12 * jax.device_count())
    for line in metrics(tmp_path):
        assert line["perf/mfu"] == pytest.approx(line["tokens_per_s"] * each)
        assert "perf/memory_in_use" not in line  # CPUs do not report it
    assert hardware.utilisation_per_rate(small(corpus, tmp_path)) == 0  # the peak of a CPU is unknown
    assert hardware.utilisation_per_rate(small(corpus, tmp_path, peak_flops=1e12, frozen="embed")) == 0
    with pytest.raises(ConfigError, match="peak_flops"):
        TrainConfig(steps=1, peak_flops=-1.0)


def test_peaks_and_memory_by_device(monkeypatch):
    class Device:
        device_kind = "NVIDIA H200 NVL"

        def __init__(self, used):
            self.used = used

        def memory_stats(self):
            return {"bytes_in_use": self.used, "peak_bytes_in_use": 2 * self.used}

    monkeypatch.setattr(jax, "devices", lambda: [Device(1)])
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(3), Device(5)])
    assert hardware.peak_flops(0.0) == 989e12 and hardware.peak_flops(7.0) == 7.0
    assert hardware.device_memory() == {"perf/memory_in_use": 5, "perf/memory_peak": 10}
