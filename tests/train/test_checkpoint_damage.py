"""Damage, kills and failing disks: a checkpoint loads as it was saved, or an error says what is wrong and what is intact."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint import Checkpoint, CheckpointStore, load_params, read_manifest
from jaxpipe.train.checkpoints import contents, orbax_trees
from jaxpipe.train.checkpoints.leaves import Snapshot
from tests.support.checkpoint_cases import (
    META,
    assert_same,
    make_params,
    one_line,
    rewrite_manifest,
    save_losses,
    swap_arrays,
    without_privileges,
)
from tests.support.forks import start_python


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
    intact = store.latest_intact()
    assert intact.step == 10, what
    assert len(intact.warnings) == 1
    assert intact.warnings[0].startswith("passed over step 20"), what


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
    sums = store.path(20) / contents.SUMS
    lines = sums.read_text().splitlines(keepends=True)
    for suffix in ("x", "\n", lines[0].rstrip("\n")):
        sums.write_text("".join([*lines, suffix]))
        assert_damage_is_seen(store, f"{suffix!r} after {contents.SUMS}")
    for count in range(len(lines)):
        sums.write_text("".join(lines[:count]))
        assert_damage_is_seen(store, f"{count} lines of {contents.SUMS}")


def test_files_of_others_are_ignored(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    (store.path(20) / ".DS_Store").write_text("?")
    assert_same(store.load().params, make_params(20))


def test_arrays_are_verified_after_decoding(saved: Path, tmp_path: Path) -> None:
    """Files that match their checksums are not enough; what is advised is another checkpoint."""
    store = damage_copy(saved, tmp_path)
    swap_arrays(store.path(20), store.path(10))
    with pytest.raises(CheckpointError, match=r"embed/table.*10 ") as info:
        store.load(20)
    one_line(info)
    assert store.latest_intact(before=20).step == 10


def test_arrays_that_do_not_decode_leave_no_traceback(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Reads that Orbax had under way when its first one failed end later, on threads of its own."""
    store = damage_copy(saved, tmp_path)
    sums = store.path(20) / contents.SUMS
    for path in [p for p in store.path(20).rglob("*") if p.parent.name == "d"]:
        path.write_bytes(path.read_bytes()[:-20] + bytes(20))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        name = path.relative_to(store.path(20)).as_posix()
        sums.write_text(re.sub(f"[0-9a-f]+(?=  {name}\n)", digest, sums.read_text()))
    for _ in range(10):
        with pytest.raises(CheckpointError, match="Orbax can't read params"):
            store.load(20)
    assert capfd.readouterr().err == ""


def test_compressed_arrays_as_early_versions_wrote_them(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = make_params(1)
    monkeypatch.setattr(orbax_trees, "_checkpointer", lambda **_: orbax_trees._orbax().PyTreeCheckpointer())
    store.save(1, params, {}, META, wait=True)
    assert_same(store.load(1, like={"params": params}).params, params)
    assert store.load(1, layers=["embed"]).params.keys() == {"embed"}


def test_what_is_no_file_is_damage(saved: Path, tmp_path: Path, files: list[str]) -> None:
    """A pipe, say, which would never end."""
    store = damage_copy(saved, tmp_path)
    for name in files:
        path = store.path(20) / name
        path.rename(tmp_path / "kept")
        os.mkfifo(path)
        assert_damage_is_seen(store, name)
        path.unlink()
        path.mkdir()
        assert_damage_is_seen(store, name)
        path.rmdir()
        (tmp_path / "kept").rename(path)
    store.load(20)


def test_no_intact_checkpoint_left(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    for step in (10, 20):
        (store.path(step) / contents.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint beside it is intact") as info:
        store.load()
    one_line(info)
    intact = store.latest_intact()
    assert intact.step is None
    assert len(intact.warnings) == 2


def test_parameters_alone_do_not_need_the_optimizer(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    victim = next(path for path in (store.path(20) / "optimizer").rglob("*") if path.is_file())
    victim.write_bytes(b"?")
    assert_same(load_params(store.directory), make_params(20))


def test_newer_format(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    rewrite_manifest(store.path(20), lambda body: body.update(format=99, jaxpipe="9.0"))
    for call in (store.load, store.latest_intact):  # neither damaged nor passed over for an older one
        with pytest.raises(CheckpointError, match=r"format 99, written by jaxpipe 9\.0") as info:
            call()
        one_line(info)


def _leaf(body: dict[str, Any]) -> dict[str, Any]:
    leaf: dict[str, Any] = body["leaves"]["params"][0]
    return leaf


ODD: dict[str, Callable[[dict[str, Any]], object] | str] = {
    "no object": "[1, 2]",
    "not JSON": "{'step': 20}",
    "nested too deeply": "[" * 100_000,
    "a huge number": "9" * 5000,
    "no format": lambda body: body.pop("format"),
    "format is a string": lambda body: body.update(format="1"),
    "format is null": lambda body: body.update(format=None),
    "meta is null": lambda body: body.update(meta=None),
    "no step": lambda body: body.pop("step"),
    "step is negative": lambda body: body.update(step=-20),
    "step is a string": lambda body: body.update(step="20"),
    "step is true": lambda body: body.update(step=True),
    "step is huge": lambda body: body.update(step=10**30),
    "loss is a string": lambda body: body.update(eval_loss="low"),
    "loss is huge": lambda body: body.update(eval_loss=10**400),
    "no version": lambda body: body.pop("jaxpipe"),
    "meta holds NaN": lambda body: body["meta"].update(lr=float("nan")),
    "meta and loss hold NaN": lambda body: (body["meta"].update(lr=float("inf")), body.update(eval_loss=float("nan"))),
    "no leaves": lambda body: body.update(leaves={}),
    "no groups": lambda body: body.update(leaves={}, layers={}),
    "leaves are a list": lambda body: body.update(leaves=[1]),
    "layers are numbers": lambda body: body["layers"].update(params=[1, 2]),
    "a layer less": lambda body: body["layers"]["params"].pop(0),
    "a leaf is null": lambda body: body["leaves"]["params"].append(None),
    "a path is text": lambda body: _leaf(body).update(path="ab"),
    "a key is no text": lambda body: _leaf(body).update(path=[["key", "\ud800"]]),
    "a shape is text": lambda body: _leaf(body).update(shape="34"),
    "a shape is negative": lambda body: _leaf(body).update(shape=[-3, 4]),
    "a shape is huge": lambda body: _leaf(body).update(shape=[0, 10**20]),
    "an unknown dtype": lambda body: _leaf(body).update(dtype="float7"),
    "a dtype of objects": lambda body: _leaf(body).update(dtype="finfo"),
    "an odd checksum": lambda body: _leaf(body).update(sha256=None),
    "an odd Python type": lambda body: _leaf(body).update(python="Path"),
    "a part is text": lambda body: _leaf(body).update(part="1"),
}


@pytest.mark.parametrize("what", ODD)
def test_manifests_that_jaxpipe_does_not_write(saved: Path, tmp_path: Path, what: str) -> None:
    store = damage_copy(saved, tmp_path)
    rewrite_manifest(store.path(20), ODD[what])
    assert_damage_is_seen(store, what)


def test_a_leaf_that_is_nowhere(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    rewrite_manifest(store.path(20), lambda body: _leaf(body).update(path=[["key", "elsewhere"]]))
    with pytest.raises(CheckpointError, match=r"embed/elsewhere.*10") as info:
        store.load(20)
    one_line(info)


def test_a_loss_that_is_not_finite_as_0_1_0_wrote_it(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    rewrite_manifest(store.path(20), lambda body: body.update(eval_loss=float("nan")))
    assert "NaN" in (store.path(20) / contents.MANIFEST).read_text()
    assert store.load(20).eval_loss is None


# What is not ours, or can't be read now.


def files_of(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_folders_of_others_are_left_alone(saved: Path, tmp_path: Path) -> None:
    """A dated backup, notes under a date, a name in other digits, and things that only look like leftovers."""
    store = damage_copy(saved, tmp_path)
    foreign = ["20251122", "20240101", "٠٠٠٠٠١٠٠", "000000030", "00000030.bak", "notes.tmp-1", "00000040"]
    for name in foreign:
        (store.directory / name).mkdir()
        (store.directory / name / "notes.txt").write_text(name)
    for name in ("20251122", "000000030"):
        shutil.copytree(store.path(20), store.directory / name, dirs_exist_ok=True)
    (store.directory / "20240102").write_text("a file")
    (store.directory / "20240103").symlink_to("nowhere")
    before = {name: files_of(store.directory / name) for name in foreign}
    assert store.steps() == (10, 20)
    intact = store.latest_intact()
    assert (intact.step, len(intact.warnings)) == (20, 1)
    assert "20251122 holds the checkpoint of step 20 under another number; it is left alone" in intact.warnings[0]
    assert store.discard_after(20) == ()
    with store:
        for step in (30, 31, 32, 33):
            store.save(step, {}, {}, {})
    assert store.steps() == (31, 32, 33)
    assert {name: files_of(store.directory / name) for name in foreign} == before
    assert (store.directory / "20240102").read_text() == "a file"
    assert (store.directory / "20240103").is_symlink()
    assert_same(load_params(store.directory / "20251122"), make_params(20))  # by its path it can be read
    with pytest.raises(CheckpointError, match=r"can't save step 40 in .*00000040 is in the way") as info:
        store.save(40, {}, {}, {}, wait=True)
    one_line(info)


def test_nothing_but_copies_is_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    for step, name in ((10, "00000015"), (20, "1000000000000")):
        store.path(step).rename(store.directory / name)
    intact = store.latest_intact()
    assert (intact.step, len(intact.warnings)) == (None, 2)
    with pytest.raises(CheckpointError, match=r".*00000015 holds.*10 under") as info:
        store.load()
    one_line(info)


@pytest.mark.parametrize("victim", ["checkpoint.json", "SHA256SUMS", "params/_METADATA", "optimizer", "."])
def test_what_can_not_be_read_now_is_not_passed_over(saved: Path, tmp_path: Path, victim: str) -> None:
    store = damage_copy(saved, tmp_path)
    path = store.path(20) / victim
    mode = path.stat().st_mode
    path.chmod(0)
    with without_privileges():
        with pytest.raises(CheckpointError, match=r"00000020 can't.*Permission.*move") as info:
            store.latest_intact()
        one_line(info)
        with pytest.raises(CheckpointError, match="can't be read now"):
            store.load()
    path.chmod(mode)
    store.load(20)


def test_pruning_deletes_only_what_it_can_read(saved: Path, tmp_path: Path) -> None:
    store = damage_copy(saved, tmp_path)
    (store.path(10) / contents.SUMS).write_text("?")
    store.path(20).chmod(0)
    with without_privileges(), store:
        save_losses(store, {30: None, 31: None, 32: None, 33: None})
        assert store.steps() == (10, 20, 31, 32, 33)
    store.path(20).chmod(0o700)
    store.load(20)


def test_an_error_of_the_disk_is_not_damage(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = damage_copy(saved, tmp_path)

    def failing(file: Any, algorithm: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", failing)
        with pytest.raises(CheckpointError, match=r"00000020 can't.*Input/output"):
            store.latest_intact()
    assert store.latest_intact().step == 20


def test_damaged_checkpoints_are_kept_aside(saved: Path, tmp_path: Path) -> None:
    """One flipped bit in the optimizer costs no parameters."""
    store = damage_copy(saved, tmp_path)
    for line in ("00000020.damaged", "00000020.damaged-1"):
        victim = next(path for path in (store.path(20) / "optimizer").rglob("*") if path.is_file())
        victim.write_bytes(b"?")
        intact = store.latest_intact().step
        assert intact == 10
        (note,) = store.discard_after(intact)
        assert note.startswith(f"the checkpoint of step 20 was set aside as {store.directory / line}")
        assert store.steps() == (10,)
        assert_same(load_params(store.directory / line), make_params(20))
        shutil.copytree(saved / "00000020", store.path(20))


# Reading while a run saves and prunes.


def check_readers(directory: Path, saves: int) -> None:
    """Load without pause while another thread saves and keeps one checkpoint only."""
    parts = {f"h.{i}": np.zeros((8, 8), np.float32) for i in range(3)}
    all_saved = threading.Event()

    def write() -> None:
        try:
            with CheckpointStore(directory, keep_last=1) as store:
                for step in range(1, saves):
                    store.save(step, {name: part + step for name, part in parts.items()}, {}, {}, eval_loss=1 / step)
        finally:
            all_saved.set()

    save_losses(CheckpointStore(directory), {0: 2.0})
    thread = threading.Thread(target=write)
    thread.start()
    reader, count = CheckpointStore(directory), 0
    while not all_saved.is_set():
        checkpoint = reader.load()
        assert all((leaf == checkpoint.step).all() for leaf in jax.tree.leaves(checkpoint.params))
        load_params(directory, step="best")
        assert read_manifest(directory).step >= checkpoint.step
        assert reader.latest() is not None
        count += 1
    thread.join()
    assert count > saves // 50
    assert reader.load().step == saves - 1


def test_readers_never_miss_the_newest(tmp_path: Path) -> None:
    check_readers(tmp_path, 20)


@pytest.mark.soak
def test_readers_never_miss_the_newest_often(tmp_path: Path) -> None:
    check_readers(tmp_path, 500)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_named_checkpoint_that_is_removed_meanwhile(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    store = damage_copy(saved, tmp_path)
    read_part, calls = contents._read_part, itertools.count()

    def remove_first(folder: Path, *args: Any, whole: bool) -> Any:
        if folder == store.path(20) and next(calls) == 0:
            folder.rename(tmp_path / "elsewhere")
            if replaced:
                shutil.copytree(store.path(10), folder)
                rewrite_manifest(folder, lambda body: body.update(step=20))
            raise contents.DamagedCheckpointError("some file is missing")
        return read_part(folder, *args, whole=whole)

    monkeypatch.setattr(contents, "_read_part", remove_first)
    if replaced:
        assert_same(store.load(20).params, make_params(10))
        return
    with pytest.raises(CheckpointError, match="00000020 was removed while being read, ") as info:
        store.load(20)
    assert "damaged" not in one_line(info)
    assert store.load().step == 10


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


def test_a_save_that_is_not_what_was_saved_costs_nothing(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is read back before an older one is removed for it."""
    save_losses(store, {1: 1.0, 2: 2.0})
    store.keep_last, store.keep_best = 1, 0
    write_arrays = contents._write_arrays

    def with_a_flipped_bit(folder: Path, content: Snapshot) -> None:
        write_arrays(folder, replace(content, arrays=tuple(array + 1 for array in content.arrays)))

    with monkeypatch.context() as patch:
        patch.setattr(contents, "_write_arrays", with_a_flipped_bit)
        for step in (2, 3):
            with pytest.raises(
                CheckpointError, match=rf"can't save step {step} in .*a is not the array that was"
            ) as info:
                store.save(step, {"a": np.float32(step)}, {}, {}, wait=True)
            one_line(info)
    assert sorted(path.name for path in store.directory.iterdir()) == ["00000001", "00000002"]
    assert store.load(2).params["a"] == 2
    save_losses(store, {3: None})
    assert store.steps() == (3,)


def test_too_little_room(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save_losses(store, {1: None})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=500_000))
    with pytest.raises(
        CheckpointError, match=r"can't save step 2 in .*: it needs 1\.05 MB and the disk has 500 KB free"
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
    with start_python(SAVER, str(directory)) as process:
        output = process.stdout
        assert output is not None
        for _ in range(3):
            assert output.readline(), "the saving process ended early"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        started = [int(line) for line in output]
    store = CheckpointStore(directory)
    checkpoint = store.latest_intact()
    assert checkpoint.warnings == ()
    assert checkpoint.step == store.latest()
    assert checkpoint.step is not None
    if started:
        assert checkpoint.step >= started[-1] - 2  # the last one printed was under way, or waited for the one before
    return store.load()


def check_kills(directory: Path, kills: int, rng: random.Random) -> None:
    for _ in range(kills):
        loaded = kill_while_saving(directory, rng.uniform(0.0, 0.15))
        assert loaded.meta == {"step": loaded.step}
        for group in (loaded.params, loaded.optimizer):
            assert all((array == loaded.step).all() for array in jax.tree.leaves(group))
    with CheckpointStore(directory, keep_last=2) as store:
        store.save(loaded.step + 1, {}, {}, {})
    assert sorted(path.name for path in directory.iterdir()) == [f"{loaded.step + i:08d}" for i in (0, 1)]


def test_kill_while_saving(tmp_path: Path) -> None:
    check_kills(tmp_path, 3, random.Random(1))


@pytest.mark.soak
def test_kill_while_saving_often(tmp_path: Path) -> None:
    check_kills(tmp_path, 60, random.Random())


def test_a_failed_save_prints_nothing_of_its_own(tmp_path: Path) -> None:
    """TensorStore's threads report to an event loop that the first error has ended; none of it is printed."""
    script = """
import resource, signal, sys
import numpy as np
from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint import CheckpointStore
layers = {name: {"w": np.arange(50_000.0)} for name in "abcd"}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
with CheckpointStore(sys.argv[1]) as store:
    for step in range(6):
        try:
            store.save(step, layers, {}, {}, wait=True)
        except CheckpointError:
            print("refused")
"""
    with start_python(script, str(tmp_path / "run")) as process:
        assert process.communicate() == ("refused\n" * 6, "")
    assert process.returncode == 0
