# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: bit-exact on any mesh, every damage found and named, nothing lost by a failed save."""

import dataclasses
import hashlib
import json
import pickle
import shutil
import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp
from support.checkpoints import abstract_of, bits_of, flip, names, restore, save, state_of

from dsv4_jax.mesh import make_mesh
from dsv4_jax.section import ConfigError
from dsv4_jax.train import manifests
from dsv4_jax.train.checkpoint import CheckpointError, Checkpoints
from dsv4_jax.train.state import TrainState


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the steps 5 and 8; tests copy it."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 5, 8)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_round_trip(folder):
    with Checkpoints(folder, 10) as checkpoints:
        assert checkpoints.latest() == 8
    step, state, said = restore(folder)
    assert (step, said) == (8, [])
    assert jax.tree.structure(state) == jax.tree.structure(state_of(0))
    arrays = manifests.read(folder / "8")["arrays"]
    assert (
        arrays["params.groups.0.wq"] == "float32[16,8]" and arrays["opt_state.1.mu.groups.0.norm"] == "bfloat16[4,16]"
    )
    assert arrays["step"] == "int32[]" and len(arrays) == 7


def test_nothing_there_is_no_checkpoint(tmp_path):
    assert restore(tmp_path / "none") == (None, None, [])
    (tmp_path / "notes.txt").write_text("not ours")
    assert restore(tmp_path) == (None, None, [])


@pytest.mark.parametrize("there, here", [((1, 1, 1), (2, 2, 2)), ((2, 2, 2), (4, 1, 2)), ((4, 2, 1), (1, 1, 1))])
def test_another_mesh(tmp_path, there, here):
    with jax.set_mesh(make_mesh(*there)):
        save(tmp_path, 3)
    with jax.set_mesh(make_mesh(*here)):
        step, state, _ = restore(tmp_path)
        assert step == 3
        assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(state_of(0))]


def test_part_of_the_state(folder):
    whole = abstract_of(state_of(0))
    part = TrainState(whole.params, whole.buffers, None, whole.step, whole.skipped)
    with Checkpoints(folder, 10) as checkpoints:
        step, state, _ = checkpoints.restore(part, print, part=True)
        assert step == 8 and state.opt_state is None
        assert bits_of(state.params) == bits_of(state_of(8).params)
        with pytest.raises(ConfigError, match=r"opt_state\.1\.mu\.groups\.0\.norm: bfloat16\[4,16\] there only"):
            checkpoints.restore(part, print)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\n")


def test_every_damage_of_every_file(saved, tmp_path):
    """Each file in turn is damaged in each way; the older checkpoint comes back and the file is named."""
    found = sorted(path.relative_to(saved) for path in (saved / "8").rglob("*") if path.is_file())
    assert len(found) > 8
    tried = 0
    for name in found:
        for harm in (flip, halve, empty, lengthen, lambda path: path.unlink()):
            folder = shutil.copytree(saved, tmp_path / str(tried))
            before = (folder / name).read_bytes()
            harm(folder / name)
            if (folder / name).exists() and (folder / name).read_bytes() == before:
                shutil.rmtree(folder)
                continue  # it was empty
            step, _, said = restore(folder)
            assert step == 5, (name, harm)
            assert len(said) == 1 and said[0].startswith(f"checkpoint 8 is skipped: {name.relative_to('8')} "), said
            shutil.rmtree(folder)
            tried += 1
    assert tried > 40


def test_every_byte_of_the_manifest_counts(folder):
    path = folder / "8" / manifests.NAME
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert manifests.damage(folder / "8", content=False).startswith("manifest.json ")
    path.write_bytes(whole)
    assert manifests.damage(folder / "8") is None


def test_what_is_said(folder):
    data = next(path for path in sorted((folder / "8/state/d").iterdir()))
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[:10])
    assert restore(folder)[2] == [
        f"checkpoint 8 is skipped: state/d/{data.name} is truncated (found 10 bytes, expected {size})"
    ]
    with Checkpoints(folder, 10) as checkpoints:
        assert checkpoints.latest() == 5


@pytest.mark.parametrize(
    "manifest, message", [({"format": 3}, "is not of format 2"), ([1], "is not of format 2"), (None, "is missing")]
)
def test_manifest_of_another_format(folder, manifest, message):
    path = folder / "8/manifest.json"
    path.unlink() if manifest is None else path.write_text(json.dumps(manifest))
    step, _, said = restore(folder)
    assert step == 5 and said == [said[0]] and f"checkpoint 8 is skipped: manifest.json {message}" in said[0]


def test_checkpoints_of_format_1_are_read_and_verified(folder):
    """Their checksums are BLAKE2b."""
    path = folder / "8"
    old = {key: value for key, value in manifests.read(path).items() if key != "checksum"} | {"format": 1}
    for name, entry in old["files"].items():
        entry["hash"] = hashlib.blake2b((path / name).read_bytes()).hexdigest()
    (path / manifests.NAME).write_bytes(manifests._render(old))
    assert restore(folder)[::2] == (8, [])
    data = next((path / "state" / "d").iterdir())
    flip(data)
    assert restore(folder)[::2] == (
        5,
        [f"checkpoint 8 is skipped: state/d/{data.name} is damaged (its checksum differs)"],
    )


def test_all_damaged(folder):
    flip(folder / "5/state/_METADATA")
    (folder / "8/state/manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError) as error:
        restore(folder)
    assert str(error.value).splitlines()[1:] == [
        "  checkpoint 8: state/manifest.ocdbt is missing",
        "  checkpoint 5: state/_METADATA is damaged (its checksum differs)",
    ]


def test_empty_step_folder(folder):
    (folder / "9").mkdir()
    assert restore(folder)[0] == 5 + 3
    assert restore(folder)[2] == ["checkpoint 9 is skipped: manifest.json is missing"]
    shutil.rmtree(folder / "8")
    shutil.rmtree(folder / "5")
    with pytest.raises(CheckpointError, match=r"checkpoint 9: manifest\.json is missing"):
        restore(folder)


def test_half_written_folders_do_not_count_and_go_with_the_next_save(folder):
    shutil.copytree(folder / "8", folder / "11.new")
    (folder / "12.new.orbax-checkpoint-tmp/state").mkdir(parents=True)
    shutil.copytree(folder / "8", folder / "3.gone")
    assert restore(folder)[0::2] == (8, [])
    save(folder, 10)
    assert names(folder) == {"5", "8", "10"}


def test_crash_while_a_step_is_replaced(folder):
    """Between the two renames only `8.old` is there; after them both are."""
    (folder / "8").rename(folder / "8.old")
    shutil.rmtree(folder / "5")
    assert restore(folder)[0] == 8
    save(folder, 8)
    assert names(folder) == {"8"}
    shutil.copytree(folder / "8", folder / "8.old")
    save(folder, 8)
    assert names(folder) == {"8"} and restore(folder)[0] == 8


def test_keep(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, keep=2, keep_every=2)
    assert names(tmp_path) == {"2", "4", "5"}
    save(tmp_path, 6, keep=1)
    assert names(tmp_path) == {"6"}


def test_fallen_back(folder):
    """8 is damaged, the run goes on at 5: 8 stays until it is replaced, and pushes nothing usable out."""
    flip(folder / "8/state/_METADATA")
    assert restore(folder)[0] == 5
    save(folder, 6, keep=1)
    assert names(folder) == {"6", "8"} and restore(folder)[0] == 6
    save(folder, 7, 8, keep=2)
    assert names(folder) == {"7", "8"} and restore(folder)[0::2] == (8, [])


def test_what_lies_behind_a_step_that_the_run_goes_back_to(folder):
    """The newest before a step is found, and the later ones go."""
    assert restore(folder, before=9)[0] == 8 and restore(folder, before=8)[0] == 5
    assert restore(folder, before=5) == (None, None, [])
    with Checkpoints(folder, 10) as checkpoints:
        checkpoints.drop_after(5)
    assert names(folder) == {"5"}


def test_replaced_step_has_the_new_values(folder):
    with Checkpoints(folder, 10) as checkpoints:
        checkpoints.save(8, state_of(9), {"epochs": [1, None, 0.1]})
        checkpoints.wait()
        _, state, host = checkpoints.restore(abstract_of(state_of(0)), print)
    assert bits_of(state) == bits_of(state_of(9)) and host == {"epochs": [1, None, 0.1]}
    assert names(folder) == {"5", "8"}


def test_another_structure(folder):
    other = state_of(0, dim=4)
    renamed = dataclasses.replace(other, buffers=nnx.State({"tables": other.buffers["bias"]}))
    with Checkpoints(folder, 10) as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.restore(abstract_of(renamed), pytest.fail)
    assert sorted(str(error.value).splitlines()[1:]) == [
        "  buffers.bias: int32[3] there only",
        "  buffers.tables: int32[3] here only",
        "  opt_state.1.mu.groups.0.wq: float32[16,8] there, float32[16,4] here",
        "  params.groups.0.wq: float32[16,8] there, float32[16,4] here",
    ]
    many = {"a": [jax.ShapeDtypeStruct((), jnp.int32)] * 25}
    with Checkpoints(folder, 10) as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.restore(many, pytest.fail)
    assert len(str(error.value).splitlines()) == 22 and str(error.value).endswith("and 12 more")


def die(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("owner, name", [(ocp, "save_async"), (manifests, "write"), (manifests, "damage")])
@pytest.mark.parametrize("ask", [lambda c: c.wait(), lambda c: c.close()])
def test_failed_save(folder, monkeypatch, owner, name, ask):
    checkpoints = Checkpoints(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        checkpoints.save(10, state_of(10), {"tokens": 1000})
        with pytest.raises(CheckpointError, match=r"saving checkpoint 10 failed: OSError: .*No space left"):
            ask(checkpoints)
    assert {"5", "8"} <= names(folder) and "10" not in names(folder) and restore(folder)[0] == 8
    checkpoints.close()
    save(folder, 12, keep=1)
    assert names(folder) == {"12"}


def test_failure_of_orbax_in_the_background(folder, monkeypatch):
    start = ocp.save_async

    class Failing:
        def __init__(self, *args, **options):
            start(*args, **options).result()

        result = die

    monkeypatch.setattr(ocp, "save_async", Failing)
    with pytest.raises(CheckpointError, match="saving checkpoint 10 failed"), Checkpoints(folder, 1) as checkpoints:
        checkpoints.save(10, state_of(10), {})
    assert names(folder) == {"5", "8", "10.new"} and restore(folder)[0] == 8


def test_damage_between_writing_and_reading_back(folder, monkeypatch):
    to_disk = manifests.to_disk

    def spoil(path):
        to_disk(path)
        if path.name == "_METADATA":
            flip(path)

    monkeypatch.setattr(manifests, "to_disk", spoil)
    with (
        pytest.raises(CheckpointError, match=r"saving checkpoint 10 failed: .*state/_METADATA is damaged"),
        Checkpoints(folder, 1) as checkpoints,
    ):
        checkpoints.save(10, state_of(10), {})
    assert restore(folder)[0] == 8


def test_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(1, state_of(1), {})
    with pytest.raises(CheckpointError, match="saving checkpoint 1 failed: FileExistsError"):
        checkpoints.close()


def test_exit_hides_no_error(folder, monkeypatch):
    monkeypatch.setattr(manifests, "write", die)
    with pytest.raises(KeyError) as error, Checkpoints(folder, 1) as checkpoints:
        checkpoints.save(10, state_of(10), {})
        raise KeyError("of the training")
    assert "saving checkpoint 10 failed" in error.value.__notes__[0]
    monkeypatch.undo()
    with pytest.raises(KeyError), Checkpoints(folder, 10) as checkpoints:
        checkpoints.save(10, state_of(10), {"tokens": 1000})
        raise KeyError("of the training")
    assert restore(folder)[0] == 10


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_saves_beside_the_training(tmp_path, monkeypatch, mesh):
    """`save` returns before anything counts; what is saved is what was there, though its memory is used again."""
    write, hold = manifests.write, threading.Event()
    monkeypatch.setattr(manifests, "write", lambda *args: (hold.wait(60), write(*args)))
    with jax.set_mesh(make_mesh(*mesh)):
        state = state_of(4)
        overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 1, s), donate_argnums=0)
        overwrite(state_of(3))  # compiled
        host = {"tokens": 400}
        with Checkpoints(tmp_path, 10) as checkpoints:
            checkpoints.save(4, state, host)
            host["tokens"] = 0
            for _ in range(3):
                state = jax.block_until_ready(overwrite(state))
            assert checkpoints.latest() is None
            hold.set()
            checkpoints.wait()
            assert checkpoints.latest() == 4
        assert restore(tmp_path)[0] == 4


def test_no_pickle(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickles")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert restore(folder)[0] == 8
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not any(path.read_bytes().startswith((b"\x80", b"(")) for path in files)
    assert not {path.suffix for path in files} & {".pkl", ".pickle", ".npy", ".npz", ".pt", ".bin"}
