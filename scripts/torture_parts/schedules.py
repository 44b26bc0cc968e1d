"""R4 and R5: valid schedules are accepted, and of damaged files none that a second opinion refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from torture_parts import mutate, referee
from torture_parts.trial import Bench, Case, FailedError, Trial, ask

_TIMES = ["--offload-time", "1"]
_FAMILIES = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "chimera", "v-zb", "hanayo", "dualpipe-v", "stp", "po-h")


def valid(bench: Bench) -> Iterator[Case]:
    """R4."""
    for _ in range(bench.count(600, 40)):
        yield Case("random schedule", _valid)


def _valid(trial: Trial) -> None:
    """Accepted, and the same in every form that can say it."""
    text = referee.random_text(trial.rng)
    path, other = trial.folder / "valid.sched", trial.folder / "valid.json"
    path.write_text(text, encoding="utf-8")
    if problems := referee.problems(referee.read_text(text)):
        raise FailedError(f"the second opinion refuses what is valid ({problems[0]}):\n{text}")
    answer = ask(["simulate", str(path), *_TIMES, "-o", str(other)])
    if answer.code:
        raise FailedError(f"a valid schedule is refused ({answer.err.strip()}):\n{text}")
    if referee.read_json(other.read_text(encoding="utf-8")) != referee.read_text(text):
        raise FailedError(f"another schedule is written as JSON than was read:\n{text}")


def damaged(bench: Bench) -> Iterator[Case]:
    """R5."""
    folder = bench.make("mutants")
    for suffix, full, quick in (("sched", 500, 40), ("json", 350, 30), ("csv", 250, 20)):
        for k in range(bench.count(full, quick)):
            yield Case(
                f"damaged .{suffix}", lambda t, k=k, suffix=suffix: _mutant(t, _family(folder, k, suffix), suffix)
            )
    for k in range(bench.count(200, 15)):
        yield Case("damaged timeline", lambda t, k=k: _timeline(t, _family(folder, k, "sched")))


def _family(folder: Path, k: int, suffix: str) -> Path | None:
    """Return a file of a family, made once; None for a random schedule."""
    name = _FAMILIES[k % len(_FAMILIES)]
    if k % 2 and suffix != "csv":
        return None
    name = "1f1b" if suffix == "csv" and name in ("stp", "po-h") else name
    path = folder / f"{name}.{suffix}"
    if not path.exists():
        answer = ask(["schedule", name, "--ranks", "4", "--microbatches", "4", *_TIMES, "-o", str(path)])
        if answer.code:
            raise FailedError(f"{name} can't be made: {answer.err.strip()}")
    return path


def _mutant(trial: Trial, source: Path | None, suffix: str) -> None:
    if source is None:
        source = trial.folder / f"random.{suffix}"
        sched = trial.folder / "random.sched"
        sched.write_text(referee.random_text(trial.rng), encoding="utf-8")
        if suffix != "sched" and (answer := ask(["simulate", str(sched), *_TIMES, "-o", str(source)])).code:
            raise FailedError(f"a valid schedule can't be written: {answer.err.strip()}")
    text = source.read_text(encoding="utf-8")
    if suffix == "json" and trial.rng.random() < 0.7:
        content = mutate.as_json(mutate.value(json.loads(text), trial.rng))
    else:
        content = mutate.as_bytes(mutate.text(text, trial.rng))
    path = trial.folder / f"mutant.{suffix}"
    path.write_bytes(content)
    if ask(["simulate", str(path), *_TIMES]).code:
        return
    try:
        problems = referee.problems(referee.read(path.name, content.decode()))
    except (referee.RefusedError, ValueError, KeyError, TypeError) as error:
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise FailedError(f"accepted, and the second opinion refuses it ({problems[0]}):\n{content[:2000]!r}")


def _timeline(trial: Trial, source: Path | None) -> None:
    from jaxpipe.schedule import CostProfile, read_schedule, simulate
    from jaxpipe.schedule.files import write_timeline
    from jaxpipe.schedule.text import parse_schedule

    schedule = parse_schedule(referee.random_text(trial.rng)) if source is None else read_schedule(source)
    path = trial.folder / "timeline.json"
    write_timeline(simulate(schedule, CostProfile.uniform(schedule.num_stages)), path)
    text = path.read_text(encoding="utf-8")
    if trial.rng.random() < 0.7:
        content = mutate.as_json(mutate.value(json.loads(text), trial.rng))
    else:
        content = mutate.as_bytes(mutate.text(text, trial.rng))
    path.write_bytes(content)
    if ask(["plot", str(path), "-o", str(trial.folder / "picture.trace.json")]).code:
        return
    try:
        problems = referee.timeline_problems(content.decode())
    except (referee.RefusedError, ValueError, KeyError, TypeError) as error:
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise FailedError(f"drawn, and the second opinion refuses it ({problems[0]}):\n{content[:2000]!r}")
