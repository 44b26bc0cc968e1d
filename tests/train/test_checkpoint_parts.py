"""Checkpoints that several processes save together, each its own layers: whole for any number of readers, or an error that all
get. Most processes are threads here."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.errors import LOST, CheckpointError
from jaxpipe.launch import Launch
from jaxpipe.runtime.processes import Processes
from jaxpipe.train.checkpoint import CheckpointStore, load_params, newest, read_manifest
from jaxpipe.train.checkpoints import contents
from jaxpipe.train.checkpoints.contents import write_checkpoint
from jaxpipe.train.checkpoints.leaves import Fragment
from tests.runtime.test_processes import HOST, free_port, run_in_threads
from tests.support.checkpoint_cases import (
    META,
    assert_same,
    make_optimizer,
    make_params,
    rewrite_manifest,
    save_in_columns,
    save_two,
)

pytestmark = pytest.mark.compiles
"""A little, in threads, with jax 0.12."""

OWNERS = {"embed": (0,), "h.0": (1,), "dropout": (2,), "head": (0, 2)}
"""The processes that have each layer."""


def make_all_params(step: float) -> dict[str, Any]:
    return make_params(step) | {"head": {"scale": np.full(5, step, np.float32), "none": np.zeros((0, 3), np.float32)}}


def save_part(store: CheckpointStore, step: int, **options: Any) -> None:
    process, params = store.processes.mine, make_all_params(step)
    mine_params = {layer: params[layer] for layer, owners in OWNERS.items() if process in owners}
    extra = {"averages": {layer: tree for layer, tree in mine_params.items() if tree}, "seen": 7}
    store.save(
        step,
        mine_params,
        make_optimizer(mine_params),
        META if process == 0 else {},
        process or None,
        extra=extra,
        **options,
    )


def saved_by(number: int, directory: Path, do: Callable[[CheckpointStore], Any]) -> list[Any]:
    """Run ``do`` with the store of each process and return what it returns or raises."""

    def one(processes: Processes) -> Any:
        with CheckpointStore(directory, keep_last=2, processes=processes) as store:
            return do(store)

    return run_in_threads(number, one)


def save_both(store: CheckpointStore) -> None:
    for step in (10, 20):
        save_part(store, step)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide checkpoints of steps 10 and 20 of three processes."""
    directory = tmp_path_factory.mktemp("saved")
    assert saved_by(3, directory, save_both) == [None] * 3
    return directory


def same_error(errors: list[Any]) -> str:
    """Return the one line that all processes got."""
    assert {type(error) for error in errors} <= {CheckpointError, contents.DamagedCheckpointError}
    assert len({str(error) for error in errors}) == 1
    assert "\n" not in str(errors[0])
    return str(errors[0])


def test_one_process_reads_what_several_have_saved(saved: Path) -> None:
    params, store = make_all_params(20), CheckpointStore(saved)
    optimizer, averages = make_optimizer(params), {layer: tree for layer, tree in params.items() if tree}
    like = {"params": params, "optimizer": optimizer, "extra": {"averages": averages, "seen": 0}}
    checkpoint = store.load(like=like)
    assert_same((checkpoint.params, checkpoint.optimizer, checkpoint.extra["averages"]), (params, optimizer, averages))
    assert (checkpoint.extra["seen"], checkpoint.meta, checkpoint.eval_loss, checkpoint.step) == (7, META, None, 20)
    assert_same(load_params(saved, step=10), make_all_params(10))
    assert store.latest_intact().step == 20
    parts = {"SHA256SUMS", "checkpoint.json", "part0", "part1", "part2"}
    assert {path.name for path in store.path(20).iterdir()} == parts
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=store.path(20)).returncode == 0
    assert_same(load_params(store.path(20) / "part1"), {"h.0": params["h.0"]})
    assert {leaf.layer: leaf.pieces[0].part for leaf in read_manifest(saved).leaves["params"]} == {
        "embed": 0,
        "head": 0,
        "h.0": 1,
    }


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("writers", [1, 3])
def test_any_number_of_processes_reads_some_layers_each(saved: Path, tmp_path: Path, writers: int, number: int) -> None:
    if writers == 1:
        save_two(tmp_path)
    directory, params = (tmp_path, make_params(20)) if writers == 1 else (saved, make_all_params(20))

    def read(store: CheckpointStore) -> Any:
        layers = list(params)[store.processes.mine :: number]
        assert store.latest_intact().step == 20
        return layers, store.load(like={"params": params}, layers=layers)

    for layers, checkpoint in saved_by(number, directory, read):
        assert_same(checkpoint.params, {layer: params[layer] for layer in layers})
        assert checkpoint.optimizer.keys() == set(layers)


def test_layers_that_are_not_asked_for_are_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_part, layers_read = contents._read_part, dict[str, Any]()

    def read(folder: Path, name: str, pieces: Any, sums: Any, whole: bool) -> Any:
        layers_read[name] = [*dict.fromkeys(leaf.layer for leaf, _ in pieces)]
        return read_part(folder, name, pieces, sums, whole=whole)

    monkeypatch.setattr(contents, "_read_part", read)
    CheckpointStore(saved).load(20, layers=["head"])
    extra = {"part0/extra": ["averages", "seen"], "part1/extra": ["averages"]}
    assert layers_read == {"part0/params": ["head"], "part0/optimizer": ["head"], **extra}


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 2), (2, 2), (2, 3), (3, 2)])
def test_a_run_that_goes_on_reads_each_byte_once(tmp_path: Path, writers: int, readers: int) -> None:
    names = [f"h.{k}" for k in range(6)]

    def layers(processes: Processes, number: int) -> list[str]:
        return names[len(names) * processes.mine // number : len(names) * (processes.mine + 1) // number]

    def save(store: CheckpointStore) -> None:
        params = {x: np.random.default_rng(k).random(1 << 18) for k, x in enumerate(names)}
        mine = {layer: params[layer] for layer in layers(store.processes, writers)}
        store.save(1, mine, {layer: (array, array[:5]) for layer, array in mine.items()}, META)

    def resume(store: CheckpointStore) -> Any:
        own = layers(store.processes, readers)
        assert newest(store, pytest.fail) == 1
        return store.load(1, layers=own).params.keys() == set(own)

    def bytes_read() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]

    assert saved_by(writers, tmp_path, save) == [None] * writers
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    before = bytes_read()
    assert saved_by(readers, tmp_path, resume) == [True] * readers
    assert (bytes_read() - before) / size < 1.05
    # A flipped bit is found before anything is trained, also in a file that several read.
    victim = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.seek(1_234_567)
        (byte,) = file.read(1)
        file.seek(1_234_567)
        file.write(bytes([byte ^ 8]))
    error = same_error(
        saved_by(readers, tmp_path, lambda store: store.load(1, layers=layers(store.processes, readers)))
    )
    assert re.search(f"is damaged: .*{victim.name}.*checksum|is damaged: .*(params|optimizer): h[^ ]* is not", error)


# -- columns --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide checkpoints of steps 10 and 20 of five processes that all have all layers."""
    directory = tmp_path_factory.mktemp("pieces")
    for step in (10, 20):
        params = make_all_params(step)
        trees = {"params": params, "optimizer": make_optimizer(params)}
        sizes = save_in_columns(directory / f"{step:08d}", step, [trees] * 5)
        assert max(sizes) - min(sizes) <= 2 * 8, "a number of each group is not divided"
    return directory


def test_columns_of_a_row_write_equal_shares(pieces: Path) -> None:
    params, store = make_all_params(20), CheckpointStore(pieces)
    checkpoint = store.load(like={"params": params, "optimizer": make_optimizer(params)})
    assert_same((checkpoint.params, checkpoint.optimizer), (params, make_optimizer(params)))
    assert_same(store.load(layers=["head"]).params, {"head": params["head"]})
    assert_same(load_params(pieces), params)
    body = json.loads((store.path(20) / contents.MANIFEST).read_text())
    divided = [leaf for leaves in body["leaves"].values() for leaf in leaves if "pieces" in leaf]
    assert body["format"] == 3
    assert 1 <= len(divided) <= 2 * 4, "cuts of two groups"
    with pytest.raises(
        CheckpointError, match=r"part0 is incomplete: params: .*: elements \d+ to \d+ of \d+ are missing"
    ):
        load_params(store.path(20) / "part0")


def test_columns_must_fit_together(tmp_path: Path) -> None:
    def saved(name: str, *arrays: Any) -> str:
        with pytest.raises(ValueError, match="params: a") as info:
            save_in_columns(tmp_path / name, 1, [{"params": {"a": array}, "optimizer": {}} for array in arrays])
        return str(info.value)

    whole, half = np.arange(8.0), Fragment(np.arange(4.0), ((4, 8),), (8,))
    assert saved("a piece less", half, half) == "params: a: elements 0 to 3 of 8 are missing"
    assert saved("some twice", whole, Fragment(np.arange(4.0), ((2, 6),), (8,))) == (
        "params: a: elements 2 to 3 of 8 are in several pieces"
    )
    assert saved("other values", half, Fragment(np.ones(4), ((4, 8),), (8,))) == (
        "params: a of process 1 is not that of process 0"
    )
    assert saved("other shapes", whole, np.arange(9.0)) == "params: a of process 1 is not that of process 0"


def _divided_leaf(body: dict[str, Any]) -> dict[str, Any]:
    return next(leaf for leaf in body["leaves"]["params"] if "pieces" in leaf)


ODD_PIECES: dict[str, Callable[[dict[str, Any]], object]] = {
    "are missing": lambda leaf: leaf["pieces"].pop(),
    "are in several pieces": lambda leaf: leaf["pieces"].append(leaf["pieces"][0]),
    "of no leaf": lambda leaf: leaf.update(pieces=[]),
    "beyond the end": lambda leaf: leaf["pieces"][0].update(ranges=[[0, 10**6]]),
    "before the start": lambda leaf: leaf["pieces"][0].update(ranges=[[-1, 1]]),
    "backwards": lambda leaf: leaf["pieces"][0].update(ranges=[[2, 2]]),
    "text": lambda leaf: leaf["pieces"][0].update(ranges=["12"]),
    "a list": lambda leaf: leaf.update(pieces=[1]),
    "whole as well": lambda leaf: leaf["pieces"][0].pop("ranges"),
    "of another part": lambda leaf: leaf["pieces"][0].update(part=4),
    "of no part": lambda leaf: leaf["pieces"][0].update(part=77),
    "an odd split": lambda leaf: leaf.update(split=[0, 0]),
    "split beyond the axes": lambda leaf: leaf.update(split=[9, 1]),
    "split text": lambda leaf: leaf.update(split="01"),
}


@pytest.mark.parametrize("what", ODD_PIECES)
def test_pieces_that_jaxpipe_does_not_write(pieces: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(pieces, tmp_path / "copy")
    store = CheckpointStore(tmp_path / "copy")
    rewrite_manifest(store.path(20), lambda body: ODD_PIECES[what](_divided_leaf(body)))
    with pytest.raises(CheckpointError, match=rf"{store.path(20)} is (damaged|incomplete).*step 10 is intact") as info:
        store.load(20)
    assert ("elements" in str(info.value)) == what.startswith("are "), "what is missing is named"
    assert "\n" not in str(info.value)


# -- saves ----------------------------------------------------------------------------------------------------------------


def test_checkpoints_are_pruned_and_given_up_together(tmp_path: Path) -> None:
    def run(store: CheckpointStore) -> Any:
        for step in (1, 2, 3):
            save_part(store, step)
        store.wait()
        notes = store.discard_after(2)
        save_part(store, 3)
        save_part(store, 2)  # a failure
        assert store.poll() is None  # not before all know
        with pytest.raises(CheckpointError) as info:
            store.wait()
        save_part(store, 4)
        store.close()
        return notes, str(info.value), store.latest(), store.latest_intact().step

    (tmp_path / "00000001.tmp-77").mkdir()
    outcomes = saved_by(2, tmp_path, run)
    note = f"the checkpoint of step 3 was set aside as {tmp_path}/00000003.superseded"
    older = (
        f"can't save step 2 in {tmp_path}: process 0 (host {HOST}): step 2 is older than the newest checkpoint (3) in "
        f"{tmp_path}; resume from it, use another directory, or give up the later steps with discard_after(2); earlier "
        "checkpoints are as they were"
    )
    assert outcomes == [((note,), older, 4, 4)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000003.superseded", "00000004"]


def _fails_to_write(store: CheckpointStore) -> None:
    save_part(store, 2, wait=True)


def _can_not_be_stored(store: CheckpointStore) -> None:
    params = {"x": {"key": jax.random.key(0) if store.processes.mine else 0}}
    store.save(2, params, {}, {}, wait=True)


def _differs(store: CheckpointStore) -> None:
    params = {f"own {store.processes.mine}": {"a": 1}, "shared": {"a": np.float32(store.processes.mine)}}
    store.save(2, params, {}, {}, wait=True)


def _needs_room(store: CheckpointStore) -> None:
    store.save(2, {f"own {store.processes.mine}": np.zeros(1 << 17)}, {}, {}, wait=True)


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (_fails_to_write, f"process 1 (host {HOST}): no space left on device"),
        (_can_not_be_stored, f"process 1 (host {HOST}): params: x/key is a typed key<fry>; store jax.random.key_data(key) "
         "instead"),
        (_differs, "params: shared/a of process 1 is not that of process 0"),
        (_needs_room, "it needs 2.1 MB and the disk has 2 MB free; make room"),
    ],
)  # fmt: skip
def test_a_save_that_fails_in_one_process_fails_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: Callable[[CheckpointStore], None], reason: str
) -> None:
    CheckpointStore(tmp_path).save(1, {}, {}, {}, wait=True)

    def full(folder: Path, *args: Any) -> None:
        write_checkpoint(folder, *args)
        if folder.name == "part1":
            raise OSError("No space left on device")

    if do is _fails_to_write:
        monkeypatch.setattr("jaxpipe.train.checkpoints.contents.write_checkpoint", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    error = same_error(saved_by(2, tmp_path, do))
    assert error == f"can't save step 2 in {tmp_path}: {reason}; earlier checkpoints are as they were"
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


# -- processes that are some -----------------------------------------------------------------------------------------------


SAVE = """
import sys
import numpy as np
from jaxpipe.runtime.peers import find_peers
from jaxpipe.launch import Launch
from jaxpipe.errors import LOST
from jaxpipe.runtime.processes import ProcessGroup
processes = ProcessGroup(find_peers((None, None, None)), 600)
if sys.argv[2] == "jax":
    processes.start_jax()
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.checkpoints import contents
from jaxpipe.train.checkpoints.leaves import Fragment
mine, last, processes.columns = processes.mine, *map(int, sys.argv[3:])
def state(step):
    "A layer each; in columns one that both have and one of which each has half."
    array = np.full(1000, step, np.float32)
    half = Fragment(array[:500], ((500 * mine, 500 * mine + 500),), (1000,))
    return {str(mine): array} if processes.columns == 1 else {"0": array, "1": half}
with CheckpointStore(sys.argv[1], keep_last=2, processes=processes) as store:
    step = store.latest_intact().step or 0
    before = store.load(step).params if step else {"0": 0, "1": 0}
    assert {k: np.unique(a).tolist() for k, a in before.items()} == {"0": [step], "1": [step]}, before
    store.discard_after(step)
    while step < last:
        step += 1
        store.save(step, state(step), {}, {"step": step})
    store.wait()
    assert store.latest_intact().step == last
    read_part, parts = contents._read_part, set()
    def read(folder, name, pieces, sums, whole):
        parts.add(name.split("/")[0])
        return read_part(folder, name, pieces, sums, whole=whole)
    contents._read_part = read
    layers = [str(1 - mine)] if processes.columns == 1 else None
    values = {layer: np.unique(array).tolist() for layer, array in store.load(layers=layers).params.items()}
    assert values == dict.fromkeys(layers or "01", [last])
    assert processes.columns == 1 or parts == {f"part{mine}"}, "each reads its part, and gets the other from its neighbour"
processes.leave()
"""


def test_two_processes_of_jax(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Launch([sys.executable, "-c", SAVE, str(tmp_path / "run"), "jax", "2", "2"], 2, tmp_path) as started:
        exit_code = started.run(0)
    lines = [line for text in capfd.readouterr() for line in text.splitlines() if "[Gloo]" not in line]
    assert (exit_code, lines) == (0, []), "collectives on CPUs say more"
    params = load_params(tmp_path / "run")
    assert {layer: np.unique(np.asarray(a)).tolist() for layer, a in params.items()} == {"0": [2], "1": [2]}


@pytest.mark.soak
@pytest.mark.parametrize("columns", ["1", "2"])
def test_a_kill_of_any_process_at_any_moment(tmp_path: Path, columns: str) -> None:
    rng, port, least = random.Random(0), 0, 0
    for _ in range(20):
        port = free_port()
        run = {**os.environ, "JAXPIPE_COORDINATOR": f"127.0.0.1:{port}", "JAXPIPE_PROCESSES": "2"}
        command = [sys.executable, "-c", SAVE, str(tmp_path), "alone", "100000", columns]
        children = [subprocess.Popen(command, env={**run, "JAXPIPE_PROCESS": str(k)}) for k in (0, 1)]
        while max((int(p.name) for p in tmp_path.glob("[0-9]" * 8)), default=0) < least + 2:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.5))
        assert [child.poll() for child in children] == [None, None]
        rng.choice(children).kill()
        assert sorted(child.wait() for child in children) == [-signal.SIGKILL, LOST]
        intact = CheckpointStore(tmp_path).latest_intact()
        assert (intact.step or 0) >= least
        least = intact.step or 0
        assert intact.warnings == ()
    assert least >= 40


# -- damage ---------------------------------------------------------------------------------------------------------------


def _damaged(path: Path, how: str, rng: random.Random) -> None:
    data = path.read_bytes()
    at = rng.randrange(len(data))
    if how == "missing":
        path.unlink()
    elif how == "torn":
        path.write_bytes(data[:at])
    else:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])


@pytest.mark.parametrize("most", [15, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("of", ["saved", "pieces"])
def test_damage_is_named_and_never_loads(tmp_path: Path, most: int, of: str, request: pytest.FixtureRequest) -> None:
    shutil.copytree(request.getfixturevalue(of), tmp_path / "copy")
    store, rng = CheckpointStore(tmp_path / "copy"), random.Random(0)
    folder = store.path(20)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) > 60
    for path in rng.sample(files, min(most, len(files))):
        original = path.read_bytes()
        _damaged(path, rng.choice(["missing", "torn", "flipped"]), rng)
        intact = store.latest_intact()
        assert intact.step == 10, path
        name = path.relative_to(folder).as_posix()
        assert f"passed over step 20: checkpoint {folder} is " in intact.warnings[0]
        assert name in intact.warnings[0]
        if not (of == "saved" and name.startswith("part2/")) and name.count("/") != 1:  # else it is not read
            with pytest.raises(CheckpointError, match=rf"checkpoint {folder} is .*{name}.*; step 10 is intact: load "):
                store.load(20)
        path.write_bytes(original)
    for part in ("part0", "part2"):
        (folder / part).rename(tmp_path / part)
        with pytest.raises(
            CheckpointError, match=f"checkpoint {folder} is incomplete: {part}/.* is missing; step 10 is"
        ):
            store.load(20)
        (tmp_path / part).rename(folder / part)
    store.load(20)


@pytest.mark.parametrize("name", ["part1/params", "part0/optimizer/d", "part2/checkpoint.json", "checkpoint.json"])
def test_all_processes_pass_over_what_one_finds_damaged(saved: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    victim = tmp_path / "copy" / "00000020" / name
    victim = victim if victim.is_file() else next(path for path in sorted(victim.rglob("*")) if path.is_file())
    _damaged(victim, "flipped", random.Random(1))

    def read(store: CheckpointStore) -> Any:
        return store.latest_intact(), store.load(10, layers=[["embed"], ["h.0"], ["head"]][store.processes.mine]).step

    outcomes = saved_by(3, tmp_path / "copy", read)
    assert outcomes[1:] == outcomes[:1] * 2
    intact, step = outcomes[0]
    assert (intact.step, step, len(intact.warnings)) == (10, 10, 1)
    assert victim.relative_to(tmp_path / "copy" / "00000020").as_posix() in intact.warnings[0]


def test_an_error_of_one_reader_is_that_of_all(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    folder = tmp_path / "copy" / "00000020"
    _damaged(next(p for p in (folder / "part1" / "params").rglob("*") if p.is_file()), "flipped", random.Random(1))
    layers = [["embed"], ["h.0"], ["head"]]
    error = same_error(saved_by(3, tmp_path / "copy", lambda store: store.load(layers=layers[store.processes.mine])))
    assert error.startswith(f"checkpoint {folder} is damaged: part1/params/")
    assert error.endswith(f"; step 10 is intact: load {tmp_path / 'copy' / '00000010'}")
    none = same_error(saved_by(2, tmp_path / "none", lambda store: store.load()))
    assert none == f"no checkpoint in {tmp_path / 'none'}: it does not exist; train first, or correct the path"
