"""R24b: job files of odd values. Each value reaches bash, sbatch or Kubernetes as it is, or is refused in one line."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.job_readers import ODD, STRAY, is_stray, pod_of, sbatch_options, srun_arguments
from torture_parts.trial import Bench, Case, FailedError, Trial, ask

_FLAGS = ("--nodes", "4", "--gpus-per-node", "1")


def values(bench: Bench) -> Iterator[Case]:
    """R24b."""
    for number in range(bench.count(2000, 20)):
        if number % 10 == 0:
            yield Case("batch script that bash runs", _script)
        yield Case("jobset" if number % 2 else "batch script", _jobset if number % 2 else _directives)


def _value(rng: random.Random) -> str:
    """Text of up to six odd pieces; one in four holds what no line can."""
    pieces = [*rng.choices(ODD, k=rng.randint(0, 6)), *map(chr, rng.choices(range(32, 0xD7FF), k=rng.randint(0, 2)))]
    if rng.random() < 0.25:
        pieces.append(rng.choice(STRAY))
    rng.shuffle(pieces)
    return "".join(pieces)


def _written(trial: Trial, where: list[str], words: list[str], values: list[str]) -> str | None:
    """The file, or None where it was refused, as it must be if a word or one of ``values`` holds a stray character."""
    file = trial.folder / "job"
    config = trial.folder / "run.toml"
    config.write_text(f"[run]\nout_dir = {json.dumps('/runs/' + _value(trial.rng).encode('ascii', 'ignore').decode())}")
    answer = ask(
        ["launch", *where, "-o", str(file), *_FLAGS, "--unchecked", "--", "train", "--config", str(config), *words]
    )
    case = f"{where} {words}: {answer.err}"
    if any(map(is_stray, [*words, *values])):
        if answer.code != 2 or file.exists():
            raise FailedError(f"not refused: {case!a}")
        return None
    if "null" in answer.err:  # a character that no setting may hold
        return None
    if answer.code:
        raise FailedError(f"refused: {case!a}")
    return file.read_text(encoding="utf-8")


def _words(rng: random.Random) -> list[str]:
    return [
        f"model.options.{rng.choice('ab')}={json.dumps(_value(rng))}"
        if rng.random() < 0.5
        else f"data.path=x{_value(rng)}"
    ]


def _slurm(trial: Trial) -> tuple[str | None, list[str], str]:
    words, option = _words(trial.rng), _value(trial.rng)
    return _written(trial, ["slurm", "--sbatch", f"comment={option}"], words, [option]), words, option


def _directives(trial: Trial) -> None:
    text, _, option = _slurm(trial)
    if (text is not None and (options := sbatch_options(text))[-1] != f"--comment={option}") or (
        text and len(options) != 11
    ):
        raise FailedError(f"sbatch reads {options}")


def _script(trial: Trial) -> None:
    text, words, _ = _slurm(trial)
    if text is None:
        return
    script = trial.folder / "job"
    srun_argv = srun_arguments(script, trial.folder)
    expected = [sys.executable, "-m", "jaxpipe", "train", "--config", str(trial.folder / "run.toml"), *words]
    if srun_argv != expected:
        raise FailedError(f"srun got {srun_argv}, not {expected}")
    allowed = {"job", "run.toml", "tools", "argv"}
    if extra := {path.name for path in trial.folder.iterdir()} - allowed:
        raise FailedError(f"the script made {extra}")


def _jobset(trial: Trial) -> None:
    words, image = _words(trial.rng), f"i{_value(trial.rng)}"
    text = _written(trial, ["k8s", "--image", image, "--claim", "runs:/runs"], words, [image])
    if text is None:
        return
    document, pod = pod_of(text)
    (container,) = pod["containers"]
    expected = ["jaxpipe", "train", "--config", str(Path(trial.folder / "run.toml")), *words]
    if (container["command"], container["image"]) != (expected, image) or set(document) != {
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    }:
        raise FailedError(f"the container gets {container}, not {expected}")
