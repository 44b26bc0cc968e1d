"""R3 and R14: what is damaged is reported and never loaded; what another version wrote is read, or refused in one line."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from torture_parts import mutate
from torture_parts.runs import files_of, flip
from torture_parts.trial import Bench, Case, FailedError, Trial, ask

_GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "checkpoint-0.1.0"
_AT_A_TIME = 20  # changes to one copy of a checkpoint

# R3


def damage(bench: Bench) -> Iterator[Case]:
    """R3: a checkpoint of step 20 is damaged, one of step 10 is beside it."""
    source = _two_checkpoints(bench)
    for kind, change, full, quick in (
        ("flipped bit", flip, 2000, 60),
        ("truncation", _truncate, 300, 20),
        ("file gone", _remove, 40, 20),
        ("file that is a folder", _as_folder, 40, 20),
        ("file that is a dangling link", partial(_as_link, target="nowhere"), 40, 20),
        ("file that is /dev/null", partial(_as_link, target="/dev/null"), 40, 20),
        ("bytes appended", _append, 40, 20),
    ):
        for _ in range(bench.count(full, quick) // _AT_A_TIME):
            yield Case(kind, partial(_damaged, source=source, change=change, kind=kind))
    for _ in range(bench.count(300, 40) // _AT_A_TIME):
        yield Case("line of SHA256SUMS", partial(_sums_damaged, source=source))


@cache
def _two_checkpoints(bench: Bench) -> Path:
    from jaxpipe.train.checkpoint import CheckpointStore

    folder = bench.folder / "two"
    with CheckpointStore(folder) as store:
        for step in (10, 20):
            params, optimizer = _trees(step)
            store.save(step, params, optimizer, {"data": {"position": step}}, eval_loss=1 / step)
    return folder


def _trees(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(step)
    params = {
        f"layer_{k}": {"kernel": rng.normal(size=(8, 8)).astype(np.float32), "bias": np.arange(8, dtype=np.int32) + k}
        for k in range(3)
    }
    return params, {
        name: {"mu": {"kernel": leaves["kernel"] / 2}, "count": np.int32(step)} for name, leaves in params.items()
    }


def _truncate(path: Path, rng: random.Random) -> str:
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def _remove(path: Path, rng: random.Random) -> str:
    path.unlink()
    return f"{path.name} gone"


def _as_folder(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return f"{path.name} is a folder"


def _as_link(path: Path, rng: random.Random, target: str) -> str:
    path.unlink()
    path.symlink_to(target)
    return f"{path.name} is a link to {target}"


def _append(path: Path, rng: random.Random) -> str:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 9)))
    return f"bytes appended to {path.name}"


def _damaged(trial: Trial, source: Path, change: Callable[[Path, random.Random], str], kind: str) -> None:
    copy = trial.folder / "copy"
    shutil.copytree(source, copy)
    files = files_of(copy / "00000020")
    for _ in range(_AT_A_TIME):
        path = trial.rng.choice(files)
        content = path.read_bytes()
        what = change(path, trial.rng)
        trial.tried[kind] += 1
        _check_seen(copy, what)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(content)
    if _loaded(copy) is not None:
        raise FailedError("a checkpoint whose files were all put back does not load")


def _check_seen(copy: Path, what: str) -> None:
    """Loading the damaged step is refused, and automatic resume takes the other or says why not, each in one line."""
    from jaxpipe.errors import CheckpointError
    from jaxpipe.train.checkpoint import CheckpointStore

    refusal = _loaded(copy)
    if refusal is None:
        raise FailedError(f"{what}: loaded without a word")
    try:
        intact = CheckpointStore(copy).latest_intact()
    except CheckpointError as error:
        messages = [refusal, str(error)]
    else:
        messages = [refusal, *intact.warnings]
        if intact.step != 10 or len(messages) != 2:
            raise FailedError(f"{what}: to go on from there is {intact}")
    if any("\n" in line or not line.strip() for line in messages):
        raise FailedError(f"{what}: not one line: {messages}")


def _loaded(copy: Path) -> str | None:
    """Return why step 20 does not load; None if it does, and is what was saved.

    Raises:
        FailedError: it loads as something else.
    """
    import jax

    from jaxpipe.errors import CheckpointError
    from jaxpipe.train.checkpoint import CheckpointStore

    try:
        checkpoint = CheckpointStore(copy).load(20)
    except CheckpointError as error:
        return str(error)
    expected = (*_trees(20), {"data": {"position": 20}}, 1 / 20)
    actual = (checkpoint.params, checkpoint.optimizer, checkpoint.meta, checkpoint.eval_loss)
    alike = jax.tree.map(
        lambda a, b: np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype, expected, actual
    )
    if not all(jax.tree.leaves(alike)):
        raise FailedError("another checkpoint is loaded than was saved")
    return None


def _sums_damaged(trial: Trial, source: Path) -> None:
    """Without its line a file is checked by what it holds: what loads is what was saved."""
    copy = trial.folder / "copy"
    shutil.copytree(source, copy)
    sums, rng = copy / "00000020" / "SHA256SUMS", trial.rng
    lines = sums.read_text(encoding="utf-8").splitlines(keepends=True)
    for _ in range(_AT_A_TIME):
        at = rng.randrange(len(lines))
        kind = rng.choice(("dropped", "doubled", "dropped, and its file flipped"))
        sums.write_text(
            "".join([*lines[:at], *([lines[at]] * 2 if kind == "doubled" else []), *lines[at + 1 :]]), encoding="utf-8"
        )
        path = copy / "00000020" / lines[at].split("  ", 1)[1].strip()
        content = path.read_bytes()
        if kind.endswith("flipped") and content:
            flip(path, rng)
        trial.tried[f"line of SHA256SUMS {kind}"] += 1
        _loaded(copy)
        path.write_bytes(content)


# R14


def versions(bench: Bench) -> Iterator[Case]:
    """R14: the kept checkpoint of 0.1.0, as it is and with another manifest."""
    yield Case("checkpoint of 0.1.0", _kept)
    for form in (0, 2, "1", None, 1.5, True, [], "nothing"):
        yield Case("other format", partial(_formatted, form=form))
    for change in _ODD:
        yield Case("odd manifest", partial(_odd, change=change))
    for _ in range(bench.count(200, 15)):
        yield Case("random manifest", partial(_odd, change=None))
    for path, value in (
        (("run", "no_such_key"), 3),
        (("no_such_section",), {"a": 1}),
        (("pipeline", "schedule"), "no-such-family"),
        (("optimizer", "lr"), "fast"),
        (("replan",), None),
    ):
        yield Case("setting of another version", partial(_other_settings, path=path, value=value))


_ODD: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda m: None,
    lambda m: [],
    lambda m: "text",
    lambda m: {},
    lambda m: m | {"meta": None},
    lambda m: m | {"meta": {}},
    lambda m: m | {"meta": m["meta"] | {"config": None}},
    lambda m: m | {"meta": m["meta"] | {"data": None}},
    lambda m: m | {"meta": m["meta"] | {"data": m["meta"]["data"] | {"position": 10**30}}},
    lambda m: m | {"step": 10**12},
    lambda m: m | {"step": 3},
    lambda m: m | {"step": "4"},
    lambda m: m | {"step": None},
    lambda m: m | {"eval_loss": "low"},
    lambda m: m | {"eval_loss": float("nan")},
    lambda m: m | {"leaves": {}},
    lambda m: m | {"leaves": {"params": []}},
    lambda m: m | {"leaves": {"params": [{}], "optimizer": [{}]}},
    lambda m: m | {"layers": {}},
    lambda m: m | {"layers": m["layers"] | {"params": ["x"]}},
    lambda m: {key: value for key, value in m.items() if key != "jaxpipe"},
)


def _copy(trial: Trial) -> tuple[Path, dict[str, Any]]:
    """A copy of the kept run, and its manifest, which names the data where they lie."""
    run = trial.folder / "run"
    shutil.copytree(_GOLDEN, run)
    manifest = json.loads((run / "checkpoints" / "00000004" / "checkpoint.json").read_text(encoding="utf-8"))
    manifest["meta"]["config"]["data"]["path"] = str(run / "ids.npy")
    return run, manifest


def _store(run: Path, manifest: Any) -> None:
    """Write a manifest, and its checksum."""
    folder = run / "checkpoints" / "00000004"
    content = mutate.as_json(manifest)
    (folder / "checkpoint.json").write_bytes(content)
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()[:-1]
    lines.append(f"{hashlib.sha256(content).hexdigest()}  checkpoint.json")
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _kept(trial: Trial) -> None:
    run, manifest = _copy(trial)
    _store(run, manifest)
    answer = ask(["eval", str(run), "--json"])
    expected = json.loads((_GOLDEN / "expected.json").read_text(encoding="utf-8"))["eval"]
    if answer.code or abs(json.loads(answer.out)["model"]["loss"] - expected) > 1e-5:
        raise FailedError(f"evaluates to something else than {expected}: {answer}")


def _formatted(trial: Trial, form: Any) -> None:
    run, manifest = _copy(trial)
    _store(
        run,
        {key: value for key, value in manifest.items() if key != "format"}
        | ({} if form == "nothing" else {"format": form}),
    )
    before = _contents(run)
    answer = ask(["eval", str(run)])
    if answer.code != 3 or _contents(run) != before:
        raise FailedError(f"format {form!r}: {answer}, or its files were changed")


def _odd(trial: Trial, change: Callable[[dict[str, Any]], Any] | None) -> None:
    run, manifest = _copy(trial)
    new = mutate.value(manifest, trial.rng) if change is None else change(manifest)
    _store(run, new)
    answer = ask(["eval", str(run), "--batches", "1"])
    if answer.code not in (0, 2, 3, 5):
        raise FailedError(f"exit code {answer.code}: {answer.err}")
    _resume(run)


def _resume(run: Path) -> None:
    """Resume as ``jaxpipe train`` does before it compiles. An error of ours is an answer, any other passes."""
    from jaxpipe.errors import JaxpipeError
    from jaxpipe.train.checkpoint import CheckpointStore
    from jaxpipe.train.config import load_config
    from jaxpipe.train.run import resume
    from jaxpipe.train.setup import prepare

    options = {"d_model": 4, "num_layers": 1, "num_heads": 2, "mlp_ratio": 2}
    settings = [f"data.path={run / 'ids.npy'}", "data.tokenizer=ids:11", "data.seq_len=4", "data.holdout=0.2"]
    sizes = ["pipeline.ranks=1", "pipeline.microbatches=2", "run.batch=4", "run.steps=8", "optimizer.warmup_steps=2"]
    config = load_config(None, [*settings, *sizes, *(f"model.options.{k}={v}" for k, v in options.items())])
    store = CheckpointStore(run / "checkpoints")
    try:
        resume.start_of(prepare(config), resume.choose(config.run, store, lambda text: None), store, lambda text: None)
    except JaxpipeError as error:
        if "\n" in str(error):
            raise FailedError(f"not one line: {error}") from error


def _other_settings(trial: Trial, path: tuple[str, ...], value: Any) -> None:
    """A setting that evaluation does not need keeps nobody from evaluating."""
    run, manifest = _copy(trial)
    node = manifest["meta"]["config"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    _store(run, manifest)
    answer = ask(["eval", str(run), "--batches", "1"])
    if answer.code:
        raise FailedError(f"{'.'.join(path)} = {value!r}: {answer.err}")
    _resume(run)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
