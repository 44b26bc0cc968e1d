"""Damage, kills and failing disks: a checkpoint loads as it was saved, or an error says what is wrong and what is intact."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxpipe.errors import CheckpointError
from jaxpipe.train import checkpoint_format as form
from jaxpipe.train.checkpoint import Checkpoint, CheckpointStore, load_params
from tests.checkpoint_cases import assert_same, make_params, one_line, save_losses, save_two


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path / "run", keep_last=3) as opened:
        yield opened


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 10 and 20, to be copied and damaged."""
    directory = tmp_path_factory.mktemp("saved")
    save_two(directory)
    return directory


def damage_copy(saved: Path, tmp_path: Path) -> CheckpointStore:
    shutil.copytree(saved, tmp_path / "copy")
    return CheckpointStore(tmp_path / "copy")


# Damage never loads.


@pytest.fixture(scope="module")
def files(saved: Path) -> list[str]:
    folder = saved / "00000020"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_damage_is_seen(store: CheckpointStore, what: str) -> None:
    with pytest.raises(CheckpointError) as info:
        store.load(20)
    message = one_line(info)
    assert str(store.path(20)) in message, what
    assert "step 10 is intact" in message, what
    found = store.latest_intact()
    assert found.step == 10, what
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("passed over step 20"), what


def test_flipped_bits_in_every_file(saved: Path, tmp_path: Path, files: list[str]) -> None:
    store = damage_copy(saved, tmp_path)
    rng = random.Random(0)
    for name in files:
        path = store.path(20) / name
        original = path.read_bytes()
        for _ in range(3):
            flipped = bytearray(original)
            flipped[rng.randrange(len(original))] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            assert_damage_is_seen(store, name)
        path.write_bytes(original)
    store.load(20)


@pytest.mark.soak
def test_flipped_bits_anywhere(saved: Path, tmp_path: Path, files: list[str]) -> None:
    store = damage_copy(saved, tmp_path)
    for name in files:
        path = store.path(20) / name
        original = path.read_bytes()
        for position in range(len(original)):
            flipped = bytearray(original)
            flipped[position] ^= 1 << (position % 8)
            path.write_bytes(flipped)
            assert_damage_is_seen(store, f"{name}: byte {position}")
        path.write_bytes(original)


def test_truncated_and_missing_files(saved: Path, tmp_path: Path, files: list[str]) -> None:
    store = damage_copy(saved, tmp_path)
    for name in files:
        path = store.path(20) / name
        original = path.read_bytes()
        for length in {0, len(original) // 2, len(original) - 1}:
            path.write_bytes(original[:length])
            assert_damage_is_seen(store, f"{name}: {length} bytes")
        path.unlink()
        assert_damage_is_seen(store, f"{name} missing")
        path.write_bytes(original)
    sums = store.path(20) / form.SUMS
    lines = sums.read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        sums.write_text("".join(lines[:count]))
        assert_damage_is_seen(store, f"{count} lines of {form.SUMS}")


def test_files_of_others_are_ignored(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    (store.path(20) / ".DS_Store").write_text("?")
    assert_same(store.load().params, make_params(20))


def test_arrays_are_verified_after_decoding(saved: Path, tmp_path: Path) -> None:
    """Wrong data under right file checksums, as memory gone bad while Orbax wrote would leave it."""
    store = damage_copy(saved, tmp_path)
    folder = store.path(20)
    shutil.rmtree(folder / "params")
    shutil.copytree(store.path(10) / "params", folder / "params")
    ours = dict(line.split("  ")[::-1] for line in (folder / form.SUMS).read_text().splitlines())
    others = dict(line.split("  ")[::-1] for line in (store.path(10) / form.SUMS).read_text().splitlines())
    merged = {name: digest for name, digest in others.items() if name.startswith("params/")}
    merged |= {name: digest for name, digest in ours.items() if not name.startswith("params/")}
    (folder / form.SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in merged.items()))
    with pytest.raises(CheckpointError, match=r"params: embed/table is not the array that was saved; step ") as info:
        store.load(20)
    one_line(info)


def test_no_intact_checkpoint_left(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    for step in (10, 20):
        (store.path(step) / form.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint beside it is intact") as info:
        store.load()
    one_line(info)
    found = store.latest_intact()
    assert found.step is None
    assert len(found.warnings) == 2


def test_parameters_alone_do_not_need_the_optimizer(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    victim = next(path for path in (store.path(20) / "optimizer").rglob("*") if path.is_file())
    victim.write_bytes(b"?")
    assert_same(load_params(store.directory), make_params(20))


def test_newer_format(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    manifest = store.path(20) / form.MANIFEST
    body = json.loads(manifest.read_text()) | {"format": 99, "jaxpipe": "9.0"}
    old = hashlib.sha256(manifest.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(body))
    sums = store.path(20) / form.SUMS
    sums.write_text(sums.read_text().replace(old, hashlib.sha256(manifest.read_bytes()).hexdigest()))
    with pytest.raises(CheckpointError, match=r"format 99, written by jaxpipe 9\.0") as info:
        store.load()
    one_line(info)


# Saves that fail.


@contextmanager
def full_disk() -> Iterator[None]:
    """A limit on file size stands in for a full disk: writes fail half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


BIG = {"a": np.random.default_rng(0).random(1 << 17)}


def test_failed_save_leaves_what_was_there(store: CheckpointStore) -> None:
    save_losses(store, {1: None})
    with full_disk():
        store.save(2, BIG, {}, {})
        with pytest.raises(
            CheckpointError, match=r"can't save step 2 in .*; earlier checkpoints are as they were"
        ) as info:
            store.wait()
    assert len(one_line(info)) < 600
    assert [path.name for path in store.directory.iterdir()] == ["00000001"]
    save_losses(store, {2: None})
    assert store.steps() == (1, 2)


def test_too_little_room(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save_losses(store, {1: None})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=500_000))
    with pytest.raises(
        CheckpointError, match=r"can't save step 2 in .*: it needs 1\.0 MB and the disk has 0\.5 MB free"
    ) as info:
        store.save(2, BIG, {}, {}, wait=True)
    one_line(info)
    assert [path.name for path in store.directory.iterdir()] == ["00000001"]


def test_a_failed_save_stops_no_other(store: CheckpointStore) -> None:
    with full_disk():
        store.save(100, BIG, {}, {})
        store.save(200, BIG, {}, {})  # says nothing of step 100
        failure = store.poll()
        assert failure is not None
        assert "can't save step 100" in str(failure)
        with pytest.raises(CheckpointError, match="can't save step 200"):
            store.wait()
        assert store.poll() is None  # told once
        store.save(300, BIG, {}, {})
        store.save(300, {}, {}, {})  # the same step again
    store.close()  # the last save went well; that one before it failed is left to be asked for
    assert "can't save step 300" in str(store.poll())
    assert store.steps() == (300,)


def test_a_failure_that_was_asked_for_is_not_raised_again(store: CheckpointStore) -> None:
    with full_disk():
        store.save(1, BIG, {}, {})
        while (failure := store.poll()) is None:
            time.sleep(0.01)
    assert "can't save step 1" in str(failure)
    store.wait()
    store.close()
    store.save(1, {}, {}, {}, wait=True)  # a closed store opens again
    assert store.poll() is None
    assert store.steps() == (1,)


def test_closing_tells_of_a_failed_save(store: CheckpointStore) -> None:
    with full_disk():
        store.save(3, BIG, {}, {})
        with pytest.raises(CheckpointError, match="can't save step 3"):
            store.close()


def test_error_of_a_save_does_not_hide_another(store: CheckpointStore) -> None:
    with full_disk(), pytest.raises(ValueError, match="the user's") as info, store:
        store.save(1, BIG, {}, {})
        raise ValueError("the user's")
    assert "can't save step 1" in info.value.__notes__[0]


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(CheckpointError, match="can't be read: Not a directory") as info:
            CheckpointStore(path).save(1, {}, {}, {})
        one_line(info)


def test_two_writers_take_turns(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def write(value: int) -> None:
        try:
            with CheckpointStore(tmp_path, keep_last=9) as store:
                for _ in range(5):
                    store.save(7, {"a": np.full(1000, value)}, {}, {})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(np.unique(CheckpointStore(tmp_path).load().params["a"])) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["00000007"]


# A kill at any moment.

SAVER = """
import sys
import numpy as np
from jaxpipe.train.checkpoint import CheckpointStore
with CheckpointStore(sys.argv[1], keep_last=2) as store:
    step = (store.latest_intact().step or 0) + 1
    store.discard_after(step - 1)
    while True:
        tree = {f"h.{i}": {"w": np.full((64, 64), step, np.float32)} for i in range(4)}
        store.save(step, tree, tree, {"step": step})
        print(step, flush=True)
        step += 1
"""


def kill_while_saving(directory: Path, delay_s: float) -> Checkpoint:
    """Start a process that saves without pause, kill it ``delay_s`` after its third save began, and load what is left."""
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        for _ in range(3):
            assert output.readline(), "the saving process ended early"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        started = [int(line) for line in output]
    process.wait()
    store = CheckpointStore(directory)
    found = store.latest_intact()
    assert found.warnings == ()
    assert found.step == store.latest()
    assert found.step is not None
    if started:
        assert found.step >= started[-1] - 2  # the last one printed was under way, or waited for the one before
    return store.load()


def check_kills(directory: Path, kills: int, rng: random.Random) -> None:
    for _ in range(kills):
        loaded = kill_while_saving(directory, rng.uniform(0.0, 0.15))
        assert loaded.meta == {"step": loaded.step}
        for tree in (loaded.params, loaded.optimizer):
            assert all((array == loaded.step).all() for array in jax.tree.leaves(tree))
    with CheckpointStore(directory, keep_last=2) as store:
        store.save(loaded.step + 1, {}, {}, {})
    assert sorted(path.name for path in directory.iterdir()) == [f"{loaded.step + i:08d}" for i in (0, 1)]


def test_kill_while_saving(tmp_path: Path) -> None:
    check_kills(tmp_path, 3, random.Random(1))


@pytest.mark.soak
def test_kill_while_saving_often(tmp_path: Path) -> None:
    check_kills(tmp_path, 60, random.Random())
