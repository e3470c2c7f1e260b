# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of two processes: each hashes its share, any failure is known to both; and folders must be shared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from test_distributed import free_port

from dsv4_jax.train import manifests

# What both processes do; each prints what it found as JSON.
SCRIPT = """
import json, sys
from pathlib import Path
import jax
from dsv4_jax.cli import exit_on_error
from dsv4_jax.mesh import make_mesh, start_devices
from dsv4_jax.train import manifests
from dsv4_jax.train.checkpoint import CheckpointError, Checkpoints
from dsv4_jax.train.processes import check_shared
from support.checkpoints import abstract_of, flip, state_of

address, process, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
start_devices(2, f"{address},2,{process}")
jax.set_mesh(make_mesh(2, 2, 1))
exit_on_error(lambda: check_shared(folder))
hashed, hash_file, found = [], manifests._hash, {}

def counted(path):
    hashed.append(path.relative_to(folder).as_posix())
    return hash_file(path)

def taken():
    names = sorted(hashed)
    hashed.clear()
    return names

def broken(path):
    raise OSError(5, "Input/output error")

manifests._hash = counted
with Checkpoints(folder, 2) as checkpoints:
    checkpoints.save(3, state_of(3), {})
    checkpoints.wait()
    found["saved"] = taken()
    checkpoints.save(4, state_of(4), {})
    checkpoints.wait()
    taken()
    step, state, _ = checkpoints.restore(abstract_of(state_of(0)), print)
    found["restored"], found["read"] = step, taken()
    same = jax.jit(lambda a, b: sum(((x == y) | (x != x)).all() for x, y in zip(a, b)))
    found["same"] = int(same(jax.tree.leaves(state), jax.tree.leaves(state_of(4))))
    if process:
        manifests._hash = broken
    checkpoints.save(6, state_of(6), {})
    try:
        checkpoints.wait()
    except CheckpointError as error:
        found["failed"] = str(error)
    manifests._hash = counted
    if not process:
        flip(max((folder / "4").rglob("ocdbt.process_1/d/*"), key=lambda path: path.stat().st_size))
    said = []
    found["back"] = checkpoints.restore(abstract_of(state_of(0)), said.append)[0]
    found["said"] = said
print(json.dumps(found))
"""


def run_both(folders, tmp_path):
    address = f"localhost:{free_port()}"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | {"PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, address, str(number), str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
        )
        for number, folder in enumerate(folders)
    ]  # fmt: skip
    return [(*process.communicate(timeout=120), process.returncode) for process in processes]


def test_two_processes_share_the_hashing_and_every_failure(tmp_path):
    (first, second), folder = run_both([tmp_path / "run"] * 2, tmp_path), tmp_path / "run"
    assert first[2] == second[2] == 0, (first[1][-3000:], second[1][-3000:])
    a, b = (json.loads(out.splitlines()[-1]) for out, _, _ in (first, second))
    files = [f"3/{name}" for name in manifests.read(folder / "3")["files"]]
    # Saved: each hashes what it wrote and compares with what the disk gives back; together everything twice.
    assert sorted(a["saved"] + b["saved"]) == sorted(name.replace("3/", "3.new/", 1) for name in files * 2)
    assert not any("process_1" in name for name in a["saved"]) and any("process_1" in name for name in b["saved"])
    # Restored: everything once, half of it by each.
    assert sorted(a["read"] + b["read"]) == sorted(name.replace("3/", "4/", 1) for name in a["read"] + b["read"])
    assert abs(len(a["read"]) - len(b["read"])) <= 1 and not set(a["read"]) & set(b["read"])
    assert a["restored"] == b["restored"] == 4 and a["same"] == b["same"] == 7
    # A disk error of process 1 is known to both; damage that either finds is skipped by both.
    for found in (a, b):
        assert "saving checkpoint 6 failed" in found["failed"] and "Input/output error" in found["failed"]
        assert found["back"] == 3 and len(found["said"]) == 1
        assert found["said"][0].startswith("checkpoint 4 is skipped: state/ocdbt.process_1/d/")
    assert not list((folder / "3").rglob("*.part*")) and not (folder / ".shared").exists()


def test_a_run_directory_that_is_not_shared_is_refused(tmp_path):
    for out, err, status in run_both([tmp_path / "here", tmp_path / "there"], tmp_path):
        assert status == 2 and "{" not in out, (out, err[-3000:])
        assert "is not shared: process 1 of 2 found another folder at this path" in err and "Traceback" not in err
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("count", [1, 4, 16])
def test_what_a_process_hashes_does_not_grow_with_the_number_of_processes(tmp_path, monkeypatch, count):
    """As many bytes for each process as its devices hold: each has written 4 files of 1000 bytes, and 3 are common."""
    writers = [f"state/ocdbt.process_{number}/d/{name}" for number in range(count) for name in "abcd"]
    for name in [*writers, "state/manifest.ocdbt", "state/_METADATA", "_CHECKPOINT_METADATA"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() + bytes(1000 if name in writers else 10))
    names, files = manifests.list_files(tmp_path), {}
    for process in range(count):
        own = manifests.written_by(names, process, count)
        assert {*own} >= {name for name in writers if f"process_{process}/" in name} and len(own) <= 4 + 3
        files |= manifests.hash_files(tmp_path, own)
    assert sorted(files) == names
    manifests.write(tmp_path, {"step": 1}, files)
    hashed, hash_file = [], manifests._hash
    monkeypatch.setattr(manifests, "_hash", lambda path: (hashed.append(path), hash_file(path))[1])
    Path(tmp_path / writers[-1]).write_bytes(b"x" * (tmp_path / writers[-1]).stat().st_size)
    faults = []
    for process in range(count):
        hashed.clear()
        faults.append(manifests.damage(tmp_path, process=process, count=count))
        assert len(hashed) <= 5 + (3 if count == 1 else 0)
    assert [fault for fault in faults if fault] == [f"{writers[-1]} is damaged (its checksum differs)"]
