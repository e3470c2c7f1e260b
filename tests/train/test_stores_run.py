# SPDX-License-Identifier: Apache-2.0
"""A run directory at an address: the same run as in a local folder, whatever fails on the way."""

import json
import os
import shutil
import socket
import time

import pytest
from support.buckets import Bucket
from support.checkpoints import names, restore, state_of
from support.runs import metrics, small, timeless, train

import dsv4_jax as ds
from dsv4_jax import cli
from dsv4_jax.section import ConfigError, RunError
from dsv4_jax.train import mirror
from dsv4_jax.train.checkpoint import CheckpointError, Checkpoints, load_model
from dsv4_jax.train.mirror import Mirror, fetch_run, work_folder

RUN = "bucket://runs/a"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "cache"))
    Bucket.clear()
    yield Bucket()
    Bucket.clear()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Return a function that makes this another machine: without local copies."""
    count = iter(range(100))
    return lambda: monkeypatch.setenv("DSV4_CACHE", str(tmp_path / f"cache{next(count)}"))


def save(*steps, keep=2, keep_every=0, said=None):
    """Save states of these steps in a run at the address."""
    with Mirror(RUN, (said if said is not None else []).append, keep_every) as there:
        with Checkpoints(there.folder / "checkpoints", keep, keep_every) as checkpoints:
            checkpoints.publish = there.publish
            for step in steps:
                (there.folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
                checkpoints.save(step, state_of(step), {"tokens": step * 100})


def in_store(bucket):
    return {name.partition("/")[0] for name in bucket.names("runs/a/checkpoints")}


def restored():
    return restore(fetch_run(RUN) / "checkpoints")[0]


def test_a_checkpoint_is_the_same_from_another_machine(bucket, elsewhere):
    save(3, 5, 8)
    assert in_store(bucket) == {"5", "8"} and not bucket.exists("/runs/a/lock")
    elsewhere()
    with Mirror(RUN, print) as there:
        assert names(there.folder / "checkpoints") == {"5", "8"}
        assert restore(there.folder / "checkpoints")[0] == 8
        assert (there.folder / "metrics.jsonl").read_text() == '{"step": 8}\n'
    elsewhere()
    assert restored() == 8


def test_what_is_in_the_store_counts(bucket, elsewhere):
    """A local checkpoint that the store has not, or has otherwise, is not taken for the run's."""
    save(5)
    with Mirror(RUN, print) as there:
        folder = there.folder
    save(8)
    shutil.copytree(folder / "checkpoints" / "8", folder / "checkpoints" / "9")
    (folder / "checkpoints" / "5" / "manifest.json").write_text("other")
    (folder / "metrics.jsonl").write_text("other")
    with Mirror(RUN, print) as there:
        assert names(there.folder / "checkpoints") == {"5", "8"} and restore(there.folder / "checkpoints")[0] == 8
        assert (there.folder / "metrics.jsonl").read_text() == '{"step": 8}\n'


@pytest.mark.parametrize("after", range(0, 16, 2))
def test_a_kill_while_a_step_is_replaced_loses_nothing(bucket, elsewhere, after):
    """Whichever write or deletion is the last one, the store holds a whole checkpoint of the step."""
    save(5, keep=1)
    count = iter(range(1000))

    def fails(operation, path):
        if "checkpoints" in path and operation != "read" and next(count) >= after:
            raise ConnectionError("killed")

    Bucket.fails = staticmethod(fails)
    with pytest.raises((RunError, CheckpointError), match="killed"):
        save(5, keep=1)
    Bucket.fails = staticmethod(lambda operation, path: None)
    elsewhere()
    assert restored() == 5
    save(6, keep=1)
    assert in_store(bucket) == {"6"}


def test_a_failed_upload_is_a_failed_save(bucket, elsewhere):
    save(5)

    def fails(operation, path):
        if operation == "write" and "/checkpoints/8/" in path:
            raise ConnectionError("no route to the store")

    Bucket.fails = staticmethod(fails)
    with Mirror(RUN, print) as there, Checkpoints(there.folder / "checkpoints", 2) as checkpoints:
        checkpoints.publish = there.publish
        checkpoints.save(8, state_of(8), {})
        checkpoints._saving[1].exception(60)
        assert "saving checkpoint 8 failed: ConnectionError: no route to the store" in checkpoints.failed()
        checkpoints._settle()
        Bucket.fails = staticmethod(lambda operation, path: None)
        checkpoints.save(9, state_of(9), {"tokens": 900})
    elsewhere()
    assert restored() == 9


def test_a_store_that_is_out_of_date_at_the_end_is_a_failure(bucket):
    def fails(operation, path):
        if operation == "write" and path.endswith("metrics.jsonl"):
            raise ConnectionError("no route to the store")

    with pytest.raises(RunError, match=r"bucket:.*/runs/a is not up to date: ConnectionError: no route"):
        with Mirror(RUN, print) as there:
            (there.folder / "metrics.jsonl").write_text("{}")
            Bucket.fails = staticmethod(fails)
    assert not bucket.exists("/runs/a/lock")


def test_metrics_are_copied_and_the_lock_kept_fresh_on_the_way(bucket, monkeypatch):
    monkeypatch.setattr(mirror, "_BEAT", 0.02)
    monkeypatch.setattr(mirror, "_EVERY", 0.02)
    said = []
    with Mirror(RUN, said.append) as there:
        first = json.loads(bucket.cat_file("/runs/a/lock"))["time"]
        for text in ("1", "2"):
            (there.folder / "metrics.jsonl").write_text(text)
            wait(lambda text=text: bucket.exists("/runs/a/metrics.jsonl") and there_is(bucket) == text)
        assert json.loads(bucket.cat_file("/runs/a/lock"))["time"] > first

        def fails(operation, path):
            if operation == "write":
                raise ConnectionError("no route")

        Bucket.fails = staticmethod(fails)
        wait(lambda: said)
        Bucket.fails = staticmethod(lambda operation, path: None)
        wait(lambda: len(said) == 2)
    assert "cannot be written: ConnectionError: no route; trying again" in said[0] and "again" in said[1]


def there_is(bucket):
    return bucket.cat_file("/runs/a/metrics.jsonl").decode()


def wait(ready):
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def lock_of(process, host=None, age=0.0):
    return json.dumps(
        {"host": host or socket.gethostname(), "process": process, "time": time.time() - age, "nonce": "x"}
    ).encode()


def test_a_second_process_is_refused(bucket):
    with Mirror(RUN, print):
        with pytest.raises(RunError, match=rf"runs/a is in use by process {os.getpid()} on {socket.gethostname()}"):
            with Mirror(RUN, print):
                pass
        assert bucket.exists("/runs/a/lock")


@pytest.mark.parametrize(
    ("process", "host", "age", "free"),
    [
        (1, "another", 0, False),
        (1, "another", 1000, True),  # nobody keeps it fresh
        (0, None, 0, False),  # this process
        (2**22 + 1, None, 0, True),  # no process of this host has that number
    ],
)
def test_the_lock_of_a_process_that_has_ended_is_taken(bucket, process, host, age, free):
    holder = lock_of(process or os.getpid(), host, age)
    bucket.pipe_file("/runs/a/lock", holder)
    if free:
        save(5)
        assert in_store(bucket) == {"5"} and not bucket.exists("/runs/a/lock")
    else:
        with pytest.raises(RunError, match="is in use by process"):
            save(5)
        assert bucket.cat_file("/runs/a/lock") == holder


def test_a_run_that_was_taken_over_writes_no_more(bucket):
    said = []
    with pytest.raises(RunError, match="was taken over by process 1 on another"):
        with Mirror(RUN, said.append) as there:
            (there.folder / "metrics.jsonl").write_text("{}")
            bucket.pipe_file("/runs/a/lock", lock_of(1, "another"))
    assert bucket.names("runs/a") == ["lock"]


def test_a_store_that_cannot_create_a_lock_is_refused(bucket):
    def fails(operation, path):
        if operation == "write":
            raise PermissionError("read only")

    Bucket.fails = staticmethod(fails)
    with pytest.raises(RunError, match=r"lock cannot be created: PermissionError: read only"):
        with Mirror(RUN, print):
            pass


def test_checkpoints_that_are_kept_are_not_copied_back(bucket, elsewhere):
    save(4, 5, 6, 8, 9, keep=1, keep_every=4)
    assert in_store(bucket) == {"4", "8", "9"}
    elsewhere()
    with Mirror(RUN, print, keep_every=4) as there:
        assert names(there.folder / "checkpoints") == {"9"}
    assert in_store(bucket) == {"4", "8", "9"}
    assert fetch_run(RUN, 4).joinpath("checkpoints", "4", "manifest.json").exists()
    with pytest.raises(ConfigError, match="has no checkpoint of step 7; it has 9, 8, 4"):
        fetch_run(RUN, 7)


def test_later_checkpoints_go_with_a_rollback(bucket, elsewhere):
    save(3, 4, 5, 8, 9, keep=5, keep_every=4)
    with Mirror(RUN, print, keep_every=4) as there, Checkpoints(there.folder / "checkpoints", 5, 4) as checkpoints:
        checkpoints.publish = there.publish
        checkpoints.drop_after(5)
        checkpoints.save(5, state_of(5), {"tokens": 500})
    assert in_store(bucket) == {"3", "4", "5"}


@pytest.fixture(scope="module")
def local(corpus, tmp_path_factory):
    """A run in a local folder, to the end."""
    folder = tmp_path_factory.mktemp("local") / "run"
    train(small(corpus, folder))
    return folder


def at_address(corpus, **changes):
    return small(corpus, RUN, **changes)


@pytest.mark.slow
def test_a_run_at_an_address_is_that_in_a_folder(bucket, local, corpus, tmp_path, monkeypatch):
    """With its data there too; stopped in the middle, and resumed on another machine from what the store holds."""
    bucket.put(corpus, "/data", recursive=True)
    there = "bucket://data"
    publish, count = Mirror.publish, iter(range(100))

    def fails(self):
        if next(count):  # only the first checkpoint reaches the store
            raise ConnectionError("killed")
        publish(self)

    monkeypatch.setattr(Mirror, "publish", fails)
    monkeypatch.setattr(Mirror, "_release", lambda self: None)
    with pytest.raises(CheckpointError, match="killed"):
        train(at_address(there))
    monkeypatch.undo()
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "machine2"))
    with pytest.raises(RunError, match="is in use by process"):  # the lock is left, of a process that runs
        train(at_address(there))
    bucket.rm_file("/runs/a/lock")
    assert "resumed     bucket://runs/a at step 3" in train(at_address(there))
    copy = tmp_path / "copy"
    bucket.get("/runs/a", str(copy), recursive=True)
    assert timeless(metrics(copy)) == timeless(metrics(local))
    for name in ("config.json", "tensorboard"):
        assert (copy / name).exists()
    assert json.loads((copy / "config.json").read_text())["train"]["run_dir"] == RUN
    one, two = (ds.to_official(load_model(small(corpus, folder))) for folder in (copy, local))
    assert {name: array.tobytes() for name, array in one.items()} == {name: two[name].tobytes() for name in two}
    assert "the run is finished" in train(at_address(there))
    cli.main(["report", RUN, "--out", f"{RUN}/page.html"])
    assert b"<html" in bucket.cat_file("/runs/a/page.html")
    said = train(small(corpus, tmp_path / "new", steps=2, init_from=RUN + "@6"))
    assert "parameters  from bucket://runs/a@6" in said


def test_local_run_directories_are_used_as_they_are(tmp_path):
    assert work_folder("runs/a").as_posix() == "runs/a" and fetch_run(str(tmp_path)) == tmp_path
    assert work_folder(RUN) != work_folder(RUN + "b") and work_folder(RUN) == work_folder(RUN + "/")
