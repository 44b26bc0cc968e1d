"""The training config: defaults, files, overrides, round trips, and one clear line for each kind of mistake."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.errors import ConfigError
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.train.config import Accepted, TrainConfig, known_settings, load_config
from jaxpipe.train.settings.sections import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerOptions,
    OutputConfig,
    PassesConfig,
    PipelineConfig,
    ReadingConfig,
    RunConfig,
    Sections,
    ShardingConfig,
)
from jaxpipe.train.settings.typed import Collected, describe_hint, leaf_docs, leaf_hints, leaves_of, plain, to_toml
from tests.support.paths import ROOT


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    """Return the message of the ConfigError that ``call`` raises; always one line."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message and "\n" not in message and message == message.strip()
    return message


# Round trips

_text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
_names = st.text(string.ascii_letters + "_", min_size=1, max_size=8)
_scalars = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | _text
_open = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3), max_leaves=8
)
_positive = st.floats(1e-12, 1e3)


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Draw valid configs."""
    microbatches, steps = draw(st.integers(1, 64)), draw(st.integers(1, 10**6))
    ranks, dp = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    boundaries = draw(st.lists(st.integers(1, 99), min_size=ranks - 1, max_size=ranks - 1, unique=True))
    holdout = draw(st.sampled_from([0.0, 0.01, 0.5]))
    options = draw(st.dictionaries(_text.filter(lambda name: name != "seq_len"), _open, max_size=4))
    return TrainConfig(
        ModelConfig(f"{draw(_names)}.{draw(_names)}:{draw(_names)}", options),
        DataConfig(
            path=draw(_text.filter(str.strip)),
            seq_len=draw(st.integers(1, 4096)),
            holdout=holdout,
            reading=ReadingConfig(
                split=draw(st.sampled_from(["blocks", "files"])),
                suffixes=tuple(f".{x}" for x in draw(st.lists(_text, max_size=3))),
                seed=draw(st.integers(0, 2**63 - 1)),
            ),
        ),
        PipelineConfig(
            ranks=ranks,
            tp=draw(st.integers(1, 64)),
            dp=dp,
            microbatches=microbatches,
            schedule="zb",
            memory_limit=draw(st.none() | _positive),
            cut=draw(st.sampled_from(["analytic", "measured", tuple(sorted(boundaries))])),
            sharding=ShardingConfig(zero1=draw(st.booleans())),
            passes=PassesConfig(braid=draw(st.sampled_from([True, False, "adjacent"]))),
        ),
        OptimizerConfig(
            lr=draw(_positive),
            warmup_steps=draw(st.integers(0, steps)),
            options=OptimizerOptions(betas=draw(st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)))),
        ),
        RunConfig(
            steps=steps,
            batch=microbatches * dp * draw(st.integers(1, 9)),
            eval_every=draw(st.integers(0, 9)) if holdout else 0,
            out_dir=draw(_text.filter(str.strip)),
            output=OutputConfig(trackers=draw(st.sampled_from([("jsonl",), ("jsonl", "tensorboard"), ()]))),
        ),
    )


@given(configs())
def test_round_trips_through_dict_toml_and_json(config: TrainConfig) -> None:
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.from_dict(tomllib.loads(config.to_toml())) == config
    assert TrainConfig.from_dict(json.loads(config.to_json())) == config


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_files_load_to_an_equal_config(tmp_path: Path, suffix: str) -> None:
    config = replace(TrainConfig(), run=RunConfig(steps=37, out_dir='runs/"odd" \\ ü\x7f'))
    path = tmp_path / f"run{suffix}"
    path.write_text(config.to_toml() if suffix == ".toml" else config.to_json(), encoding="utf-8")
    assert load_config(path) == config


def test_leaves_that_may_be_none_default_to_none() -> None:
    """TOML can't say none, so what is left out must mean it."""
    default = TrainConfig().by_key()
    assert default.keys() == leaf_hints(TrainConfig).keys()
    for key, hint in leaf_hints(TrainConfig).items():
        assert (type(None) in get_args(hint)) == (default[key] is None)


# Overrides


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.steps=300", "run", "steps", 300),
        ("run.steps = 1_000", "run", "steps", 1000),
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("optimizer.betas=0.8, 0.9", "optimizer", "betas", (0.8, 0.9)),
        ("optimizer.betas=[0.8,0.9]", "optimizer", "betas", (0.8, 0.9)),
        ("pipeline.zero1=true", "pipeline", "zero1", True),
        ("pipeline.braid=False", "pipeline", "braid", False),
        ("pipeline.braid=adjacent", "pipeline", "braid", "adjacent"),
        ("run.out_dir=a=b c", "run", "out_dir", "a=b c"),
        ("run.resume=must", "run", "resume", "must"),
        ("optimizer.clip_norm=4", "optimizer", "clip_norm", 4.0),
        ("pipeline.memory_limit=none", "pipeline", "memory_limit", None),
        ("pipeline.cut=measured", "pipeline", "cut", "measured"),
        ("pipeline.cut=1,3,5", "pipeline", "cut", (1, 3, 5)),
        ("pipeline.cut=['b1', 'b3', \"b5\"]", "pipeline", "cut", ("b1", "b3", "b5")),
        ("data.suffixes=.txt", "data", "suffixes", (".txt",)),
        ("model.options.depth=4", "model", "options", {"depth": 4}),
        ("model.options.name=plain words", "model", "options", {"name": "plain words"}),
        ("model.options.a.b=[1, 2.5]", "model", "options", {"a": {"b": [1, 2.5]}}),
        ("model.options={a = 1, b = {c = true}}", "model", "options", {"a": 1, "b": {"c": True}}),
    ],
)
def test_overrides_are_parsed_by_type(override: str, section: str, key: str, value: object) -> None:
    got = getattr(getattr(TrainConfig().override([override]), section), key)
    assert got == value
    assert type(got) is type(value)


def test_bounds_themselves_are_allowed() -> None:
    at_the_bounds = ["optimizer.warmup_steps=200", "data.holdout=0.5", "run.devices=4", "optimizer.min_lr_ratio=1"]
    assert TrainConfig().override(at_the_bounds).optimizer.warmup_steps == 200


def test_ids_may_come_from_several_sources_or_a_function() -> None:
    sources = ["data.sources.a.path=a.npy", "data.sources.b.path=b.npz"]
    for overrides in (["data.target=mine:batches"], sources):
        assert TrainConfig().override(["data.tokenizer=ids:29", *overrides]).data.tokenizer == "ids:29"
    text = refusal(TrainConfig().override, ["data.tokenizer=ids:29", *sources, "data.sources.b.path=b.txt"])
    assert text.endswith("but data.sources.b.path=b.txt is text")


def test_one_layer_is_a_list_of_one() -> None:
    assert TrainConfig().override(["pipeline.ranks=2", "pipeline.cut= 3 "]).pipeline.cut == (3,)


def test_a_number_or_none() -> None:
    config = TrainConfig().override(["pipeline.schedule=zb", "pipeline.memory_limit=4"])
    assert config.pipeline.memory_limit == 4.0
    assert config.override(["pipeline.memory_limit=none"]).pipeline.memory_limit is None


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_and_schedule_files_can_be_named(name: str) -> None:
    chunks = FAMILIES[name].default_chunks
    TrainConfig().override([f"pipeline.schedule={name}", f"pipeline.chunks={chunks}"])
    TrainConfig().override([f"pipeline.schedule=found/{name}.sched", "pipeline.chunks=3", "pipeline.memory_limit=2"])


def test_overrides_beat_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[run]\nsteps = 50\nlog_every = 3\n[model.options]\nd = 8\nn = 2\n")
    config = load_config(path, ["run.steps=60", "run.steps=70", "model.options.d=16"])
    assert (config.run.steps, config.run.output.log_every, config.run.batch) == (70, 3, RunConfig().batch)
    assert config.model.options == {"d": 16, "n": 2}


def test_no_file_and_no_overrides_are_the_defaults() -> None:
    assert load_config() == TrainConfig() == TrainConfig.from_dict({})


# Mistakes: overrides, each with what the one line must contain

MISTAKES = {
    "unknown key, near one known": (
        "run.step=3",
        "override 'run.step=3': unknown key run.step: did you mean run.steps?",
    ),
    "unknown key, near one in a table": ("run.keep_lst=3", "did you mean run.keep_last?"),
    "unknown key of a table": ("run.output.keep_lst=3", "did you mean run.output.keep_last?"),
    "key of another table": ("output.watchdog_s=3", "did you mean run.machine.watchdog_s?"),
    "a table as a key": ("run.output=3", "run.output is a section"),
    "key of another section": ("run.seq_len=3", "did you mean data.seq_len?"),
    "key without its section": ("steps=3", "did you mean run.steps?"),
    "unknown key, near none": ("optimizer.qqq=3", "there are name, lr, warmup_steps"),
    "unknown section, near one known": ("optimiser=3", "did you mean optimizer?"),
    "unknown section, near none": ("zzz.x=3", "there are model, data, pipeline, optimizer, run"),
    "key below a leaf": ("run.steps.x=3", "unknown key run.steps.x"),
    "a section as a key": ("run=3", "run is a section"),
    "no equals sign": ("run.steps", "write it as section.key=value"),
    "no key": ("=3", "write it as section.key=value"),
    "word for an integer": ("run.steps=many", 'run.steps is "many", expected an integer'),
    "fraction for an integer": ("run.steps=3.0", "expected an integer"),
    "nothing for an integer": ("run.steps=", "expected an integer"),
    "word for a number": ("optimizer.lr=fast", 'optimizer.lr is "fast", expected a number'),
    "infinite number": ("optimizer.lr=inf", "which is not finite"),
    "not a number": ("optimizer.lr=nan", "which is not finite"),
    "word for a truth value": ("run.tensorboard=maybe", "expected true or false"),
    "word outside the choice": ("run.resume=mst", "expected one of 'auto', 'never', 'must' (did you mean 'must'?)"),
    "wrong dtype": ("run.dtype=float16", "one of 'float32', 'bfloat16' (did you mean 'bfloat16'?)"),
    "too few in a pair": ("optimizer.betas=0.9", "expected a list of 2 values"),
    "word in a list of numbers": ("optimizer.betas=0.9,x", 'optimizer.betas[1] is "x", expected a number'),
    "word for none or a number": ("pipeline.memory_limit=lots", "expected a number or none"),
    "misspelt way to cut": (
        "pipeline.cut=measred",
        "one of 'analytic', 'measured' (did you mean 'measured'?) or a list",
    ),
    "date in the options": ("model.options.day=2024-01-01", "use numbers, strings"),
    "zero steps": ("run.steps=0", "override 'run.steps=0': run.steps is 0, must be at least 1"),
    "zero ranks": ("pipeline.ranks=0", "pipeline.ranks is 0, must be at least 1"),
    "zero microbatches": ("pipeline.microbatches=0", "pipeline.microbatches is 0, must be at least 1"),
    "negative batch": ("run.batch=-8", "run.batch is -8, must be at least 1"),
    "seed too large": ("run.seed=2147483648", "must be at most 2147483647"),
    "zero learning rate": ("optimizer.lr=0", "optimizer.lr is 0.0, must be greater than 0"),
    "beta of one": ("optimizer.betas=0.9,1", "optimizer.betas[1] is 1.0, must be at most 0.9999999"),
    "learning rate that rises": ("optimizer.min_lr_ratio=2", "must be at most 1"),
    "negative memory": ("pipeline.memory_limit=-1", "must be greater than 0"),
    "most of the data held out": ("data.holdout=0.9", "must be at most 0.5"),
    "empty path": ("data.path=", 'data.path is "", must not be empty'),
    "suffix without a dot": ("data.suffixes=txt", "start with a dot"),
    "target without a function": ("model.target=models.gpt", "expected module:function"),
    "decreasing cut": ("pipeline.cut=4,2,6", "increasing layers above 0"),
    "batch that does not divide": ("run.batch=10", "use run.batch=8 or 16, or pipeline.microbatches=5 or 10"),
    "batch below the microbatches": ("run.batch=3", "use run.batch=8, or pipeline.microbatches=1 or 3"),
    "unknown optimizer": ("optimizer.name=mun", "(did you mean 'muon'?)"),
    "unknown schedule of the rate": ("optimizer.schedule=step", "one of 'cosine', 'wsd', 'linear', 'constant'"),
    "evaluation of nothing": ("data.holdout=0", "set data.holdout=0.05 or run.eval_every=0"),
    "cut for other sizes": ("pipeline.cut=1,2", "pipeline.ranks=4 times pipeline.chunks=1 make 4 stages, which need 3"),
    "chunks where there is one": (
        "pipeline.chunks=2",
        "got pipeline.chunks=2: set pipeline.chunks=1 or a schedule that takes chunks",
    ),
    "misspelt schedule": ("pipeline.schedule=zb_h1", "did you mean 'zb-h1'?"),
    "unknown schedule": ("pipeline.schedule=qqq", "known: 1f1b, 1f1b-v"),
    "memory limit where none is taken": (
        "pipeline.memory_limit=4",
        "takes no pipeline.memory_limit: leave it out or use ada-offload,",
    ),
    "zero tensor-parallel devices": ("pipeline.tp=0", "pipeline.tp is 0, must be at least 1"),
    "dp that does not divide": (
        "pipeline.dp=3",
        "run.batch=32 is not divisible by pipeline.microbatches=8 × pipeline.dp=3: use run.batch=24 or 48, or "
        "pipeline.dp=2 or 4",
    ),
    "fewer devices than ranks": ("run.devices=2", "run.devices=2 is fewer than pipeline.ranks=4: use at least 4"),
    "unknown recompute policy": ("pipeline.recompute=atention", "did you mean 'attention'?"),
    "unknown part of a recompute policy": (
        "pipeline.recompute=cheap+qqq",
        "and 'qqq' is no policy: known: none, cheap, dots, attention, mlp, full,",
    ),
    "too few recompute policies": (
        "pipeline.recompute=full,cheap",
        "pipeline.recompute lists 2 policies, but pipeline.ranks=4 times pipeline.chunks=1 make 4 stages: list 4",
    ),
    "ids of a text": ("data.tokenizer=ids:100", "is for arrays of ids (.npy, .npz)"),
    "model of another length": ("model.options.seq_len=64", "differs from data.seq_len=128"),
    "key of 3,000 parts": ("model.options." + "a." * 3000 + "a=1", "nested more than 32 levels deep"),
    "3,000 brackets": ("model.options.x=" + "[" * 3000, "nested more than 32 levels deep"),
    "40 lists in one another": ("model.options.x=" + "[" * 40 + "]" * 40, "nested more than 32 levels deep"),
    "integer of 5,000 digits": ("run.steps=" + "9" * 5000, "expected an integer"),
    "option of 5,000 digits": ("model.options.x=" + "9" * 5000, "too large: integers have 64 bits"),
    "option of 20,000 bits": ("model.options.x=0x" + "f" * 5000, "too large: integers have 64 bits"),
    "integer beyond 64 bits": ("run.batch=99999999999999999999", "too large: integers have 64 bits"),
    "batch of many divisors to try": ("run.batch=1000000000000000003", "must be at most 2147483647"),
    "sequence of many divisors to try": ("data.seq_len=1000000000000000003", "must be at most 2147483647"),
    "ranks without end": ("pipeline.ranks=100000000", "must be at most 4096"),
    "microbatches without end": ("pipeline.microbatches=1000000", "use at most 125000 microbatches"),
    "option that is not finite": ("model.options.x=-inf", "not finite"),
    "path that is not UTF-8": ("run.out_dir=\udcff", "which is not UTF-8 text"),
    "option that is not UTF-8": ("model.options.x=\udcff", "which is not UTF-8 text"),
    "name of an option that is not UTF-8": ("model.options.\udcff=1", "which is not UTF-8 text"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_an_override_is_one_clear_line(kind: str) -> None:
    override, expected = MISTAKES[kind]
    message = refusal(load_config, None, [override])
    assert expected in message
    assert "; " not in message or "divisible" in message, "one mistake, one problem"
    assert len(message) < 600, "the command line would cut it"


# Mistakes in files

BAD_FILES = {
    "no such file": ("absent.toml", None, "no such config file"),
    "another kind of file": ("c.yaml", "run: 3", "ends in .toml or .json"),
    "malformed TOML": ("c.toml", "[run\nsteps = 3", "not valid TOML"),
    "malformed JSON": ("c.json", '{"run": {', "not valid JSON"),
    "key given twice in JSON": ("c.json", '{"run": {"steps": 3, "steps": 4}}', "key 'steps' is given twice"),
    "key given twice in TOML": ("c.toml", "[run]\nsteps = 3\nsteps = 4", "not valid TOML"),
    "a list at the top": ("c.json", "[1]", "expected an object with keys"),
    "not text": ("c.toml", b"\xff\xfe\x00", "not UTF-8"),
    "unknown section": ("c.toml", "[runn]\nsteps = 3", "unknown key runn: did you mean run?"),
    "key given with and without its table": (
        "c.toml",
        "[run]\nkeep_last = 3\noutput = {keep_last = 4}",
        "run.output.keep_last is given 2 times",
    ),
    "section that is a value": ("c.toml", "run = 3", "run is a section"),
    "string for an integer": ("c.toml", "[run]\nsteps = '3'", 'run.steps is "3", expected an integer'),
    "truth value for an integer": ("c.toml", "[run]\nsteps = true", "run.steps is true, expected an integer"),
    "number for a string": ("c.json", '{"data": {"path": 3}}', "data.path is 3, expected a string"),
    "null for a string": ("c.json", '{"data": {"path": null}}', "data.path is null, expected a string"),
    "list with another type": ("c.toml", "[data]\nsuffixes = ['.txt', 3]", "data.suffixes[1] is 3, expected a string"),
    "value for a table": ("c.toml", "[model]\noptions = 3", "expected a table"),
    "null in the options": ("c.json", '{"model": {"options": {"a": null}}}', "use numbers, strings"),
    "JSON infinity": ("c.json", '{"optimizer": {"lr": Infinity}}', "not finite"),
    "integer beyond floats": ("c.toml", "[optimizer]\nlr = 1" + "0" * 400, "not finite"),
    "newline in a key": ("c.toml", '[run]\n"a\\nb" = 3', "unknown key run.a b"),
    "900 lists in one another": (
        "c.json",
        '{"model": {"options": {"a": ' + "[" * 900 + "]" * 900 + "}}}",
        "[[…, nested more than 32 levels deep",
    ),
    "more lists than Python reads": ("c.json", "[" * 100_000, "nested more than 32 levels deep"),
    "more lists than TOML reads": ("c.toml", "a = " + "[" * 3000, "nested more than 32 levels deep"),
    "key of 3,000 parts": ("c.toml", "model.options." + "a." * 3000 + "a = 1", "nested more than 32 levels deep"),
    "integer of 5,000 digits": ("c.toml", "[run]\nsteps = " + "9" * 5000, "not valid TOML: Exceeds the limit"),
    "integer of 20,000 bits": ("c.toml", "[run]\nsteps = 0x" + "f" * 5000, "too large: integers have 64 bits"),
    "null character": ("c.json", '{"run": {"out_dir": "a\\u0000b"}}', "which holds a null character"),
    "surrogate": ("c.json", '{"data": {"path": "a\\ud800"}}', "which is not UTF-8 text"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_mistake_in_a_file_is_one_clear_line_that_names_the_file(tmp_path: Path, kind: str) -> None:
    name, content, expected = BAD_FILES[kind]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(load_config, path)
    assert message.startswith(str(path))
    assert expected in message


def test_directories_and_pipes_are_no_config_files(tmp_path: Path) -> None:
    (tmp_path / "d.toml").mkdir()
    assert "can't be read" in refusal(load_config, tmp_path / "d.toml")
    os.mkfifo(tmp_path / "p.toml")
    assert "a pipe, socket or device" in refusal(load_config, tmp_path / "p.toml")


def test_paths_that_file_names_here_can_not_spell_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[run]\nout_dir = "ü"\n', encoding="utf-8")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxpipe", "train", "--print-config", "--config", str(tmp_path / "c.toml")]
    run = subprocess.run(command, env=ascii_only, capture_output=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(b"jaxpipe: run.out_dir is '\\xfc', and file names here are ascii: set PYTHONUTF8=1")


# All at once


def test_all_problems_are_told_at_once_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[run]\nstep = 3\nbatch = 10\n[data]\nseq_len = 0\n")
    message = refusal(load_config, path, ["optimizer.lr=fast", "pipeline.ranks=-1"])
    problems = message.split("; ")
    assert [p.removeprefix(f"{path}: ") for p in problems[:1]] == ["unknown key run.step: did you mean run.steps?"]
    assert problems[2].startswith("override 'optimizer.lr=fast': ")
    assert f"{path}: data.seq_len is 0, must be at least 1" in problems
    assert "override 'pipeline.ranks=-1': pipeline.ranks is -1, must be at least 1" in problems
    assert any(p.startswith("run.batch=10 is not divisible by pipeline.microbatches=8") for p in problems)
    assert len(problems) == 5


@pytest.mark.parametrize(("count", "problems"), [(12, 12), (30, 20)])
def test_the_command_line_tells_all_of_them(count: int, problems: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *(f"run.{k}={'long' * 9}" for k in range(count))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.count("unknown key") == problems
    assert line.endswith(" (and 10 more problems)") == (count > problems)


def test_a_rule_on_a_value_that_is_already_wrong_stays_silent() -> None:
    message = refusal(load_config, None, ["pipeline.microbatches=0", "run.batch=x"])
    assert "divisible" not in message
    assert len(message.split("; ")) == 2


def test_construction_in_python_is_checked_too() -> None:
    assert "run.steps is 0" in refusal(TrainConfig, run=RunConfig(steps=0))
    assert 'run.steps is "3", expected an integer' in refusal(TrainConfig, run=RunConfig(steps="3"))  # type: ignore[arg-type]
    assert "not divisible" in refusal(replace, TrainConfig(), pipeline=PipelineConfig(microbatches=7))


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 12))
def test_the_numbers_that_a_message_names_would_work(batch: int, microbatches: int, dp: int) -> None:
    sizes = {"run.batch": batch, "pipeline.microbatches": microbatches, "pipeline.dp": dp}

    def config_of(**changed: int) -> TrainConfig:
        return TrainConfig().override([f"{key}={n}" for key, n in {**sizes, **changed}.items()])

    if batch % (microbatches * dp) == 0:
        assert config_of().run.batch == batch
        return
    ways = refusal(config_of).split(": use ")[1].split(", or ")
    assert ways[0].startswith("run.batch=")
    for way in ways:
        key, _, numbers = way.partition("=")
        for advised in numbers.split(" or "):
            config_of(**{key: int(advised)})


def test_dp_fills_the_devices_and_keeps_the_batch() -> None:
    """The job of 4 ranks × tp 2 × dp 16 whose devices see a sequence at once, on fewer hosts and on more."""
    config = TrainConfig().override(
        ["run.batch=480", "pipeline.microbatches=30", "pipeline.dp=16", "pipeline.ranks=4", "pipeline.tp=2"]
    )
    sizes = {n: config.filling(n).pipeline for n in (128, 120, 64, 96, 8)}
    shapes = {n: (pipe.dp, pipe.microbatches, pipe.num_devices) for n, pipe in sizes.items()}
    assert shapes == {128: (16, 30, 128), 120: (15, 32, 120), 64: (8, 60, 64), 96: (12, 40, 96), 8: (1, 480, 8)}
    assert "use 120 (dp 15) or 128 (dp 16) devices" in refusal(config.filling, 124)
    assert "use 120 (dp 15) or 128 (dp 16) devices" in refusal(config.filling, 256)
    assert "are dp 0.5 for 4 ranks × 2 devices, " in refusal(config.filling, 4)
    assert TrainConfig().filling(16).pipeline.microbatches == TrainConfig().pipeline.microbatches
    experts = TrainConfig().override(["run.batch=48", "pipeline.dp=2", "pipeline.ep=2"])
    assert experts.filling(8).pipeline.mesh.sizes["ep"] == 2
    assert "or ep 2 does not: use 8 (dp 2) or 24 (dp 6) devices" in refusal(experts.filling, 12)


@given(st.integers(1, 400), st.integers(2, 64))
def test_sequence_parallelism_wants_a_length_that_tp_divides(seq_len: int, tp: int) -> None:
    sizes = ["pipeline.sequence_parallel=true", f"data.seq_len={seq_len}", f"pipeline.tp={tp}"]
    if seq_len % tp == 0:
        assert TrainConfig().override(sizes).pipeline.sharding.sequence_parallel
        return
    advice = refusal(TrainConfig().override, sizes).split(": use ")[1]
    for way in advice.split(", or "):
        key, _, numbers = way.partition("=")
        for advised in numbers.split(" or "):
            TrainConfig().override([*sizes, f"{key}={advised}"])


def test_devices_of_all_axes_are_counted() -> None:
    sizes = ["pipeline.ranks=2", "pipeline.tp=2", "pipeline.dp=4"]
    assert TrainConfig().override(sizes).pipeline.num_devices == 16
    message = refusal(TrainConfig().override, [*sizes, "run.devices=8"])
    assert "run.devices=8 is fewer than the 16 of pipeline.ranks=2 × pipeline.dp=4 × pipeline.tp=2" in message
    assert TrainConfig().override([*sizes, "run.devices=16"]).run.machine.devices == 16


def test_describe_shows_every_setting_aligned_and_marks_changes() -> None:
    lines = TrainConfig().override(["run.batch=64"]).describe().splitlines()
    assert len(lines) == sum(len(fields(getattr(TrainConfig(), f.name))) for f in fields(Sections))
    assert len(lines) <= 47
    changed = [line for line in lines if "*" in line]
    assert len(changed) == 1
    assert changed[0].split() == ["*", "batch", "64"]
    first = TrainConfig().describe().splitlines()[0]
    at = first.index("models.gpt:GPT")
    assert all(line[at - 1] == " " != line[at] for line in lines)


def test_recompute_policies_are_those_of_the_stage_room() -> None:
    from jaxpipe.stage.split.policies import POLICIES

    for name in (*POLICIES, "cheap+attention", "attention+mlp+cheap"):
        assert TrainConfig(pipeline=PipelineConfig(recompute=name)).pipeline.recompute == name


def test_each_stage_may_have_its_recompute_policy() -> None:
    each = ("full", "cheap+mlp", "cheap", "none")
    config = TrainConfig().override(["pipeline.recompute=full,cheap+mlp,cheap,none"])
    assert config.pipeline.recompute == each
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.from_dict(tomllib.loads(config.to_toml())) == config
    chunks = ["pipeline.chunks=2", "pipeline.schedule=interleaved-1f1b"]
    assert TrainConfig().override([*chunks, f"pipeline.recompute={','.join(each * 2)}"]).pipeline.recompute == each * 2


def test_every_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-config"]) == 0
    printed = capsys.readouterr().out
    docs = leaf_docs(Sections)
    assert docs.keys() >= leaf_hints(Sections).keys()
    assert all(docs.values())
    for key, hint in leaf_hints(Sections).items():
        section, *table, leaf = key.split(".")
        of_section = printed[printed.index(f"[{section}]") :]
        of_table = of_section[of_section.index(f"\n{table[0]}   (a table)\n") :] if table else of_section
        assert f"\n{'    ' * len(table)}{leaf} = " in of_table
        assert describe_hint(hint)
    assert "\nschedule = 1f1b   (a string)\n    The name of a family, a schedule file" in printed
    assert "\ndtype = float32   (float32 | bfloat16)\n" in printed
    assert max(map(len, printed.splitlines())) < 160


# Keys of before

OLD = {
    "model": {"target": "m:f", "options": {"a": 1}},
    "data": {
        "path": "p", "tokenizer": "t", "format": "chat", "chat_template": "c", "field": "f", "eos": "e", "mask": "document",
        "seq_len": 64, "holdout": 0.1, "split": "files", "suffixes": [".a"], "seed": 7, "options": {"b": 2},
        "sources": {"s": {"path": "q", "weight": 2.0}}, "target": "n:g",
    },
    "pipeline": {
        "ranks": 2, "tp": 2, "cp": 2, "cp_method": "ring", "dp": 2, "microbatches": 4, "chunks": 2, "schedule": "zb",
        "vocabulary": "spread", "memory_limit": 3.0, "recompute": "full", "cut": [2], "sequence_parallel": True,
        "fused_residual": True, "zero1": True, "braid": False, "separate_gradients": True, "split_backwards": "never",
        "post_validation": "on", "towers": {"t": {"ranks": 2}},
    },
    "optimizer": {
        "name": "lion", "schedule": "wsd", "lr": 0.5, "warmup_steps": 3, "min_lr_ratio": 0.2, "weight_decay": 0.3,
        "betas": [0.5, 0.6], "eps": 1e-5, "clip_norm": 2.0, "decay_fraction": 0.4, "momentum": 0.7,
    },
    "run": {
        "steps": 9, "batch": 64, "seed": 5, "dtype": "bfloat16", "eval_every": 6, "eval_batches": 3, "out_dir": "o",
        "init_other_model": True,
        "init_from": "i", "checkpoint_every": 4, "keep_last": 3, "keep_best": 2, "resume": "must", "log_every": 2,
        "platform": "cpu", "devices": 99, "max_skipped": 6, "watchdog_s": 7.0, "compile_cache": "off",
        "trackers": ["wandb"], "profile_steps": [1, 2], "transport": "nccl",
    },
    "replan": {
        "enabled": True, "min_gain": 0.2, "time_limit_s": 5.0, "workers": 2, "drift": 0.3, "memory_limit": 4.0,
        "split": False,
    },
    "offload": {"fraction": 0.5, "host_memory_gb": 2.0, "fallback": True},
    "traverse": {
        "placement": "v", "first": "forward", "forward": "depth", "backward": "depth", "in_flight": 3,
        "in_flight_per_stage": [1, 2], "units": [2, 1],
    },
}  # fmt: skip
"""Every key that settings had before there were tables, but for the retired ones, each with a value that is no default."""


def test_every_key_of_before_says_what_it_said() -> None:
    settings, unknown = known_settings(OLD)
    assert settings["data"]["reading"].pop("pack") == "windows"  # there was no choice then
    collected = Collected(TrainConfig)
    collected.add_table(OLD, "a file")
    assert not unknown and not collected.problems
    assert collected.values.keys() == dict(leaves_of(TrainConfig, settings)).keys() <= leaf_hints(TrainConfig).keys()
    default = TrainConfig().by_key()
    for section, key in ((section, key) for section, leaves in OLD.items() for key in leaves):
        value = OLD[section][key]
        (full,) = [k for k in collected.values if k.endswith(f".{key}") and section in k.split(".")]
        assert plain(collected.values[full]) == value != default[full]
        assert dict(leaves_of(TrainConfig, settings))[full] == value
        override = Collected(TrainConfig)
        text = value if isinstance(value, str) else to_toml({"x": {"y": value}}).partition(" = ")[2].strip()
        override.add_override(f"{section}.{key}={text}")
        assert not override.problems and override.values == {full: collected.values[full]}
        assert reduce(getattr, full.split("."), TrainConfig()) == getattr(getattr(TrainConfig(), section), key)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["run.tensorboard=true"], ["run.trackers=jsonl,tensorboard"]),
        (["run.tensorboard=true", "run.trackers=wandb"], ["run.trackers=wandb,tensorboard"]),
        (["run.tensorboard=true", "run.trackers=tensorboard"], ["run.trackers=tensorboard"]),
        (["run.tensorboard=false"], []),
        (["run.on_nonfinite=abort"], ["run.max_skipped=1"]),
        (["run.on_nonfinite=abort", "run.max_skipped=3"], ["run.max_skipped=1"]),
        (["run.on_nonfinite=skip", "run.max_skipped=3"], ["run.max_skipped=3"]),
        (["run.on_nonfinite=abort", "run.on_nonfinite=skip"], []),
        (["pipeline.braid_adjacent=true"], ["pipeline.braid=adjacent"]),
        (["pipeline.braid_adjacent=true", "pipeline.braid=false"], ["pipeline.braid=false"]),
        (["pipeline.braid_adjacent=false"], []),
    ],
)
def test_retired_keys_say_what_they_said(old: list[str], new: list[str]) -> None:
    config = TrainConfig().override(new)
    assert TrainConfig().override(old) == config
    stored: dict[str, dict[str, Any]] = {}
    for override in old:
        section, _, rest = override.partition(".")
        key, _, text = rest.partition("=")
        value = {"true": True, "false": False, "3": 3}.get(text, [text] if key == "trackers" else text)
        stored.setdefault(section, {})[key] = value
    assert TrainConfig.from_dict(stored) == config
    settings, unknown = known_settings(stored)
    assert TrainConfig.from_dict(settings) == config and not unknown


def test_retired_keys_are_checked() -> None:
    assert 'run.tensorboard is "maybe", expected true' in refusal(load_config, None, ["run.tensorboard=maybe"])
    assert "one of 'skip', 'abort'" in refusal(load_config, None, ["run.on_nonfinite=abrt"])


def test_no_two_settings_have_one_short_key() -> None:
    keys = [key.split(".") for key in leaf_hints(Accepted)]
    short = [f"{name}.{path[-1]}" for path in keys for name in path[:-1]]
    assert len(set(short)) == len(short) and max(map(len, keys)) == 3
