# SPDX-License-Identifier: Apache-2.0
"""The examples in deploy/: scripts run with stand-ins for the cluster's commands, and all their flags are parsed."""

import dataclasses
import math
import os
import re
import shlex
import subprocess

import pytest
import yaml
from support.pages import ROOT

from dsv4_jax.config.files import load_config

DEPLOY = ROOT / "deploy"
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >> "$RECORD"
[ "$(basename "$0")" != gcloud ] || [[ "$*" != *describe* ]] || cat "$STATE"
if [[ "$*" == *train.py* ]]; then exit "$(head -1 "$STATUSES"; sed -i 1d "$STATUSES")"; fi
"""


def training(text):
    """The configuration that the last training command in a text gives, `$` variables set to numbers."""
    words = shlex.split(re.sub(r"\$\w+", "3", text[text.rindex("train.py") :].partition("\n")[0]))
    cfg = load_config(ROOT / words[1], words[2:])
    assert cfg.train.run_dir.startswith("/shared/") and cfg.data.prepared.startswith("/shared/")
    return cfg, math.prod(dataclasses.astuple(cfg.resolved_stages[0].cfg.mesh))


def script(tmp_path, name, *words, statuses):
    """Run a script with stand-ins for commands of a cluster; `statuses` are those of its trainings in turn."""
    for command in ("gcloud", "srun", "scontrol", "sleep"):
        (tmp_path / command).write_text(STAND_IN)
        (tmp_path / command).chmod(0o755)
    (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    (tmp_path / "state").write_text("READY\n")
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env |= {name.upper(): str(tmp_path / name) for name in ("record", "state", "statuses")}
    command = ["bash", str(DEPLOY / name), *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, (tmp_path / "record").read_text()


@pytest.mark.parametrize("name", ["tpu_slice.sh", "slurm.sbatch"])
def test_scripts_are_valid(name):
    subprocess.run(["bash", "-n", str(DEPLOY / name)], check=True)


def test_slurm_requeues_after_a_saved_stop_only(tmp_path):
    for status, requeued in ((143, True), (0, False), (1, False), (2, False)):
        (tmp_path / "record").unlink(missing_ok=True)
        code, record = script(tmp_path, "slurm.sbatch", statuses=[status])
        assert code == status and ("scontrol requeue 7" in record) == requeued, record
    cfg, devices = training(record)
    options = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", (DEPLOY / "slurm.sbatch").read_text()))
    assert devices == int(options["nodes"]) * int(options["ntasks-per-node"])
    assert options["ntasks-per-node"] == options["gpus-per-node"]  # JAX gives each task of SLURM one GPU
    assert cfg.train.distributed == "auto" and options["signal"].startswith("TERM@")


def test_tpu_slice_trains_until_it_succeeds(tmp_path):
    code, record = script(tmp_path, "tpu_slice.sh", "name", "zone", "host:/share", statuses=[143, 1, 0])
    assert code == 0 and record.count("train.py") == 3 and "tpu-vm create" not in record
    cfg, devices = training(record)
    assert cfg.train.distributed == "auto" and 2 * devices == 1024  # the name v5p-1024 counts cores, two a chip
    code, record = script(tmp_path, "tpu_slice.sh", "name", "zone", "host:/share", statuses=[0])
    assert code == 0


@pytest.mark.parametrize("name", ["jobset_tpu.yaml", "jobset_gpu.yaml"])
def test_jobsets(name):
    jobset = yaml.safe_load((DEPLOY / name).read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    ((_, chips),) = container["resources"]["limits"].items()
    cfg, devices = training(" ".join([*container["command"], *container["args"]]))
    assert devices == job["replicas"] * spec["completions"] * chips
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2] and pod["restartPolicy"] == "Never"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    if cfg.train.distributed != "auto":
        address, count, _ = cfg.train.distributed.split(",")
        host, port = address.split(":")
        name = jobset["metadata"]["name"]
        assert host == f"{name}-{job['name']}-0-0.{name}" and int(count) == spec["completions"]
        assert int(port) in [p["containerPort"] for p in container["ports"]]
    else:
        topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        assert math.prod(map(int, topology.split("x"))) == devices


def test_the_image_copies_what_there_is():
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"(?m)^COPY (.*)", text):
        assert all((ROOT / name).exists() for name in line.split()[:-1])
    for name in ("tpu", "gpu", "text"):
        assert f"\n{name} = [" in (ROOT / "pyproject.toml").read_text()
