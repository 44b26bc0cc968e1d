"""R8: whatever a user types or a file holds, the answer is an exit code that is documented and one line."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torture_parts import mutate
from torture_parts.trial import Bench, Case, Trial, ask

_TEXTS = (
    *(
        "0",
        "1",
        "2",
        "3",
        "7",
        "-1",
        "+1",
        "1e3",
        "0x10",
        "1_000",
        "٣",
        "99999999999999999999",
        "9" * 5000,
        "0.5",
        "1e308",
        "1e-320",
    ),
    *(
        "nan",
        "inf",
        "-inf",
        "none",
        "null",
        "true",
        "TRUE",
        "",
        " ",
        "x",
        "a" * 3000,
        "é",
        "\udcff",
        "a\nb",
        "a\tb",
        "-",
        "--",
        "=",
        ",",
    ),
    *(
        "1,2,3",
        "1,1,1",
        "0,0,0",
        "1,,2",
        "[1,2]",
        "[",
        "[" * 200,
        "[" * 3000,
        "{a=1}",
        "{" * 100,
        "a.b.c",
        "a." * 200,
        '"',
        "'",
        "\\",
    ),
    *(
        "1f1b",
        "zb-h1",
        "v-zb",
        "stp",
        "byte",
        "ids:7",
        "ids:0",
        "ids:999999999",
        "stdlib",
        "cpu",
        "h100",
        "analytic",
        "cheap+mlp",
    ),
    *(
        "/dev/null",
        "/dev/zero",
        "/",
        ".",
        "/proc/self/mem",
        "..",
        "missing.toml",
        "missing.json",
        "out.json",
        "out.svg",
        "no/such/x.sched",
    ),
    *(
        "builtins:dict",
        "models.gpt:GPT",
        "models.gpt:nope",
        "json:loads",
        "os",
        "1e9GB",
        "80GB",
        "2->0",
        "0,1,2",
        "run.steps=3",
    ),
)
_NUMBERS = (
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "8",
    "16",
    "100",
    "1000",
    "4096",
    "65536",
    "2147483647",
    "2147483648",
    "1000003",
    "9" * 18,
)

_LAST: Mapping[str, tuple[str, ...]] = {
    "train": ("data.path=missing.txt",),
    "profile": ("data.path=missing.txt",),
    "rehearse": ("data.path=missing.txt",),
    "plan": ("--compile-seconds", "0", "--suggest-seconds", "0"),
    "solve": ("--time-limit", "0.1", "--workers", "1", "--ranks", "2", "--microbatches", "2", "--no-cache"),
    "best": ("--ranks", "2", "--microbatches", "2"),
    "compare": ("--ranks", "2", "--microbatches", "3"),
}
"""Flags put after random ones, so that verbs end soon: of a flag given twice the last counts, and both are read."""


def inputs(bench: Bench) -> Iterator[Case]:
    """R8."""
    singles = [(key, text) for key in _keys() for text in (*_TEXTS, *_NUMBERS)]
    random.Random(0).shuffle(singles)
    for key, text in singles[: bench.count(2500, 60)]:
        yield Case("config with one odd value", partial(_settings, settings=[f"{key}={text}"]))
    for _ in range(bench.count(1000, 30)):
        yield Case("config with odd values", _settings)
    for _ in range(bench.count(300, 10)):
        yield Case("config file", _config_file)
    for _ in range(bench.count(150, 4)):
        yield Case("plan", _plan)
    for _ in range(bench.count(900, 40)):
        yield Case("flags of a verb", _flags)
    for _ in range(bench.count(300, 15)):
        yield Case("cost file", _costs)
    for _ in range(bench.count(100, 5)):
        yield Case("target file", _target)
    for _ in range(bench.count(100, 5)):
        yield Case("tokenizer file", _tokenizer)
    for verb in ("simulate", "plot", "compare", "train", "plan", "eval", "generate"):
        yield Case("special file", partial(_special, verb=verb))


def _keys() -> list[str]:
    from jaxpipe.train.config import TrainConfig
    from jaxpipe.train.settings.typed import leaf_hints

    options = [
        f"model.options.{name}"
        for name in ("d_model", "num_layers", "num_heads", "vocab_size", "dropout", "dtype", "a.b")
    ]
    return [*leaf_hints(TrainConfig), *options]


def _random_settings(rng: random.Random) -> list[str]:
    return [f"{rng.choice(_keys())}={rng.choice((*_TEXTS, *_NUMBERS * 2))}" for _ in range(rng.randint(1, 6))]


def _settings(trial: Trial, settings: list[str] | None = None) -> None:
    ask(["train", "--print-config", *(settings or _random_settings(trial.rng))])


def _config_file(trial: Trial) -> None:
    from jaxpipe.train.config import TrainConfig

    config = TrainConfig()
    if trial.rng.random() < 0.5:
        path, content = trial.folder / "c.json", mutate.as_json(mutate.value(config.to_dict(), trial.rng))
    else:
        path, content = trial.folder / "c.toml", mutate.as_bytes(mutate.text(config.to_toml(), trial.rng))
    path.write_bytes(content)
    ask(["train", "--config", str(path), "--print-config"])


def _plan(trial: Trial) -> None:
    small = ["model.options.d_model=16", "model.options.num_layers=2", "model.options.num_heads=2", "data.seq_len=8"]
    settings = [*small, "pipeline.ranks=2", "pipeline.microbatches=4", "run.batch=8", *_random_settings(trial.rng)]
    ask(["plan", *settings, *_LAST["plan"]])


def _flags(trial: Trial) -> None:
    from jaxpipe.cli import registry
    from jaxpipe.cli.flags import Parser

    of = trial.rng.choice(registry.VERBS)
    verb = of.name
    parser = Parser(prog=verb, description=verb)
    of.function("configure")(parser)
    arguments = []
    for action in trial.rng.sample(parser._actions, trial.rng.randint(0, min(6, len(parser._actions)))):
        if action.option_strings and "--help" not in action.option_strings:
            arguments.append(trial.rng.choice(action.option_strings))
        if action.nargs != 0:
            choices = [str(choice) for choice in action.choices or ()]
            arguments.append(trial.rng.choice((*_TEXTS, *_NUMBERS * 2, *choices * 10)))
    ask([verb, *arguments, *_LAST.get(verb, ())])


def _costs(trial: Trial) -> None:
    from jaxpipe.schedule import CostProfile
    from jaxpipe.schedule.files import to_costs

    costs = to_costs(CostProfile.uniform(4, comm=0.1, f=1.5))
    path = trial.folder / "costs.json"
    path.write_bytes(mutate.as_json(mutate.value(costs, trial.rng)))
    ask(
        [
            "schedule",
            trial.rng.choice(("1f1b", "zb", "gpipe")),
            "--ranks",
            "4",
            "--microbatches",
            "4",
            "--costs",
            str(path),
        ]
    )


def _target(trial: Trial) -> None:
    from jaxpipe.planning.targets import TARGETS

    path = trial.folder / "target.json"
    h100 = asdict(replace(TARGETS["h100"], flops_per_s=dict(TARGETS["h100"].flops_per_s)))
    path.write_bytes(mutate.as_json(mutate.value({k: x for k, x in h100.items() if x is not None}, trial.rng)))
    ask(["plan", "--target", str(path), "pipeline.ranks=100", *_LAST["plan"]])  # refused after the target is read


def _tokenizer(trial: Trial) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = trial.folder / "tokenizer.json"
    path.write_bytes(mutate.as_json(mutate.value(json.loads(tokenizer.to_str()), trial.rng)))
    ask(["train", f"data.tokenizer={path}", "data.path=missing.txt", "run.platform=cpu"])


def _special(trial: Trial, verb: str) -> None:
    """Files that are no files, or hold next to nothing, or far too much of one thing."""
    contents = [b"", b"\0" * 100, trial.rng.randbytes(4096), b"\xff\xfe\xfa", b"x" * 10**6]
    contents += [b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**5, b"," * 10**6]
    stem = trial.folder / "made"
    for suffix in (".sched", ".json", ".csv", ".toml", ".txt", ".npy", ".npz"):
        for content in contents:
            _named(trial, verb, stem.with_suffix(suffix), lambda path, content=content: path.write_bytes(content))
        for make in (
            Path.mkdir,
            os.mkfifo,
            lambda path: path.symlink_to(path),
            lambda path: path.symlink_to("nowhere"),
            lambda path: path.symlink_to("/dev/null"),
            lambda path: path.symlink_to("/dev/zero"),
        ):
            _named(trial, verb, stem.with_suffix(suffix), make)


def _named(trial: Trial, verb: str, path: Path, make: Any) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
    trial.tried[f"special file as {verb}'s"] += 1
    if verb in ("simulate", "compare", "eval", "generate"):
        ask([verb, str(path)])
    elif verb == "plot":
        ask([verb, str(path), "-o", str(trial.folder / "out.svg")])
    elif path.suffix in (".toml", ".json"):
        ask([verb, *(["--config"] if verb == "train" else []), str(path), *_LAST[verb]])
    elif verb == "plan":
        ask([verb, f"pipeline.schedule={path}", f"data.tokenizer={path}", *_LAST[verb]])
    else:  # too small for one sequence, where it is text at all
        ask(
            [
                verb,
                f"data.path={path}",
                "run.platform=cpu",
                f"run.out_dir={trial.folder / 'run'}",
                "data.seq_len=10000000",
            ]
        )
