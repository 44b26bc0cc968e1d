"""A stored run goes on with the same model, the same data, known settings, and no code that nobody named."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.errors import CheckpointError, ConfigError, DataError, JaxpipeError
from jaxpipe.train.checkpoint import CheckpointStore, load_params, read_manifest
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.evaluate import load_trained
from jaxpipe.train.metrics import read_metrics
from jaxpipe.train.run import resume
from jaxpipe.train.run.resume import RATE, Start
from jaxpipe.train.setup import prepare
from jaxpipe.train.update.optimizer import rate_of
from tests.support.checkpoint_cases import rewrite_manifest, swap_arrays
from tests.support.paths import GOLDEN, ROOT
from tests.support.train_runs import config, contents, copy_run, losses, run, settings, write_text

pytestmark = pytest.mark.usefixtures("one_build")

WANTED = GOLDEN / "checkpoint-0.1.0"
TARGET = "scaled_models:Scaled"
MODULE = '''
import dataclasses
import numpy as np
import models.gpt

FACTOR = np.float32(1)

def Scaled(scale=1.0, **options):
    """GPT with a constant table added to its embeddings: no shape and no parameter shows how large it is."""
    model = models.gpt.GPT(**options)
    embed, *rest = model.layers
    table = np.linspace(0, scale, 16, dtype=np.float32).reshape(1, 1, 16)

    def apply(params, x, context):
        return embed.apply(params, x, context) + FACTOR * table

    return dataclasses.replace(model, layers=(dataclasses.replace(embed, apply=apply), *rest))
'''


@pytest.fixture(scope="module", autouse=True)
def own_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``scaled_models`` can be imported, and so could ``evil``, which would leave a file behind."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "scaled_models.py").write_text(MODULE)
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\ndef Model(**options): pass\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("scaled_models", None)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a run of 4 steps, with checkpoints of steps 2 and 4. Read it, or copy it."""
    out_dir = tmp_path_factory.mktemp("finished") / "run"
    run(config(text, out_dir, *BASE))
    return out_dir


BASE = (
    f"model.target={TARGET}", "pipeline.ranks=1", "run.steps=4", "run.checkpoint_every=2", "run.eval_every=2", "run.log_every=2"
)  # fmt: skip


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return copy_run(finished, tmp_path / "run")


def start(text: Path, out_dir: Path, *overrides: str) -> tuple[Start, list[str]]:
    """Return where ``jaxpipe train`` would start, and what it would say; nothing is compiled."""
    settings = config(text, out_dir, *BASE, *overrides)
    store, notes = CheckpointStore(out_dir / "checkpoints"), list[str]()
    origin = resume.choose(settings.run, store, notes.append)
    assert origin is not None
    return resume.start_of(prepare(settings), origin, store, notes.append), notes


def newest(out_dir: Path) -> Path:
    return out_dir / "checkpoints" / "00000004"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a verb that must fail with one line and the exit code of an error of ``kind``; the line."""

    def call(*argv: object, kind: type[JaxpipeError] = ConfigError) -> str:
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert code == getattr(kind, "exit_code", 2), out + err
        assert err.startswith("jaxpipe: ") and err.count("\n") == 1
        return err

    return call


@pytest.fixture
def succeeds(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def call(*argv: object) -> tuple[str, str]:
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out, err

    return call


# -- the same model, or it is refused -------------------------------------------------------------------------------------


def test_changed_settings_are_named(text: Path, finished: Path) -> None:
    started, notes = start(
        text, finished, "optimizer.lr=5", "optimizer.betas=0.1,0.2", "run.seed=77", "run.dtype=bfloat16",
        "model.options.dropout=0.5", "run.steps=9", "run.log_every=1", "run.batch=16", "pipeline.microbatches=2",
        "pipeline.dp=2", f"run.out_dir={finished}",
    )  # fmt: skip
    assert started.step == 4
    assert notes.pop().startswith(
        "optimizer.lr 0.01 → 5.0, run.steps 4 → 9: learning rate goes on at 4.153, was to be 0.001"
    )
    assert notes == [
        "resuming with changes: model.options.dropout not set → 0.5, optimizer.lr 0.01 → 5.0, "
        "optimizer.options.betas [0.9, 0.95] → [0.1, 0.2], run.batch 8 → 16, run.dtype float32 → bfloat16, run.seed 0 → 77",
        "resuming with pipeline.dp 1 → 2: gradients are sums of other parts, so bits are not those of one dp",
    ]
    assert start(text, finished)[1] == []


def test_a_constant_of_the_model_counts(text: Path, finished: Path) -> None:
    """The traced program prints the same; the values of a table in it differ."""
    with pytest.raises(CheckpointError, match=r"model\.options\.scale.*50\.0"):
        start(text, finished, "model.options.scale=50.0")
    assert start(text, finished, "model.options.scale=1.0")[1] == [
        "resuming with changes: model.options.scale not set → 1.0"
    ]


def test_changed_code_is_told(text: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("scaled_models"), "FACTOR", np.float32(2))
    assert start(text, finished)[1] == [f"warning: {TARGET} computes something else than when step 4 was saved"]


@pytest.mark.parametrize("program", [None, {"jax": "0.0.1", "sha256": "0"}])
def test_settings_decide_where_programs_can_not_be_compared(text: Path, copy: Path, program: object) -> None:
    """A checkpoint of jaxpipe 0.1.0, or of another JAX: it is said that code can't be compared."""
    rewrite_manifest(newest(copy), lambda body: body["meta"].update(program=program))
    unknown, *changes = start(text, copy, "optimizer.weight_decay=2")[1]
    assert "can't be told" in unknown and ("0.0.1" if program else "no digest") in unknown
    assert changes == ["resuming with changes: optimizer.weight_decay 0.1 → 2.0"]
    with pytest.raises(CheckpointError, match=r"model\.options\.dropout.*0\.5"):
        start(text, copy, "model.options.dropout=0.5")


# -- the learning rate of the next step -----------------------------------------------------------------------------------


def test_a_rate_that_moves_is_told(text: Path, finished: Path) -> None:
    """A run of 4 steps has ended at the bottom of its cosine, which is halfway down a longer one."""
    (note,) = start(text, finished, "run.steps=8")[1]
    assert note.startswith("run.steps 4 → 8: learning rate goes on at 0.0077") and "was to be 0.001" in note
    assert "optimizer.schedule=constant" in note
    _, note = start(text, finished, "run.steps=8", "optimizer.min_lr_ratio=1")[1]
    assert note.startswith("optimizer.options.min_lr_ratio 0.1 → 1.0, run.steps 4 → 8: learning rate goes on at 0.01,")
    assert start(text, finished, "run.checkpoint_every=3", "run.eval_every=0")[1] == []


_rates = st.fixed_dictionaries(
    {
        "run.steps": st.integers(1, 90),
        "optimizer.lr": st.sampled_from([1e-2, 1e-3]),
        "optimizer.warmup_steps": st.integers(0, 30),
        "optimizer.options.schedule": st.sampled_from(["cosine", "wsd", "linear", "constant"]),
        "optimizer.options.min_lr_ratio": st.sampled_from([0.1, 0.5, 1.0]),
        "optimizer.options.decay_fraction": st.sampled_from([0.2, 0.7]),
    }
)


@given(old=_rates, new=_rates, stored_keys=st.sets(st.sampled_from(["run.steps", *RATE])), updates=st.integers(0, 90))
@hypothesis_settings(max_examples=40, deadline=None)
def test_a_rate_is_told_if_and_only_if_it_moves(
    old: dict[str, Any], new: dict[str, Any], stored_keys: set[str], updates: int
) -> None:
    """The rate is compared with the optimizer's: what SGD by each schedule takes off a parameter."""
    then, now = (
        TrainConfig().changed(settings) for settings in (old, {**new, **{key: old[key] for key in stored_keys}})
    )
    note = resume.moved_rate(then.to_dict(), now, updates)
    before, after = (float(rate_of(each.optimizer, each.run.steps)(updates)) for each in (then, now))
    assert bool(note) is (not np.isclose(before, after, rtol=1e-6, atol=0))
    if note:
        assert f"goes on at {after:.4g}, was to be {before:.4g}" in note
        for key in old:
            assert (f"{key} " in note.partition(": learning")[0]) is (then.by_key()[key] != now.by_key()[key])


# -- settings of another version ------------------------------------------------------------------------------------------


def age(body: dict[str, Any]) -> None:
    stored = body["meta"]["config"]
    stored["cluster"] = {"nodes": 3}
    stored["wings"] = 2
    stored["pipeline"] |= {"wings": 2, "schedule": "no-such-schedule"}
    stored["run"] |= {"dtype": "float8", "keep_last": "all", "tensorboard": True, "on_nonfinite": "skip"}
    stored["data"]["shuffle_twice"] = False
    del stored["optimizer"]["options"]["eps"]
    stored["replan"] = {"enabled": True, **stored["run"].pop("replan")}  # as it was kept before there were tables


IGNORED = "cluster.nodes, data.shuffle_twice, pipeline.wings, wings"


def test_settings_that_are_not_known_are_noted(
    text: Path, copy: Path, succeeds: Callable[..., tuple[str, str]]
) -> None:
    rewrite_manifest(newest(copy), age)
    assert start(text, copy)[1] == [
        "resuming with changes: run.dtype float8 → float32",
        f"settings of step 4 that this version does not know are ignored: {IGNORED}",
    ]
    for verb in (["eval", "--json"], ["generate", "--tokens", 2]):
        out, err = succeeds(*verb, copy, "--model", TARGET)
        assert out
        assert err == f"ignored settings that this version does not know: {IGNORED}\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("config"),
        lambda meta: meta.update(config=None),
        lambda meta: meta.update(config=[1]),
        lambda meta: meta["config"]["data"].update(seq_len="long"),
        lambda meta: meta["config"]["model"].update(options=[3]),
        lambda meta: meta["config"]["model"].update(target="my models"),
        lambda meta: meta["config"].update(model=3, data=None),
    ],
)
def test_configs_that_can_not_be_used(
    copy: Path, refused: Callable[..., str], change: Callable[[dict[str, Any]], object]
) -> None:
    rewrite_manifest(newest(copy), lambda body: change(body["meta"]))
    for verb in ("eval", "generate"):
        refused(verb, copy, "--model", TARGET, kind=CheckpointError)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.update(config=None),
        lambda meta: meta.update(data=None),
        lambda meta: meta["data"].pop("seed"),
        lambda meta: meta["data"].update(position=10**30),
        lambda meta: meta["data"].update(step=10**6),
    ],
)
def test_positions_in_the_data_that_can_not_be(
    text: Path, copy: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    rewrite_manifest(newest(copy), lambda body: change(body["meta"]))
    with pytest.raises(CheckpointError, match="00000004") as info:
        start(text, copy)
    assert "\n" not in str(info.value)


# -- data, not code -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("logging:basicConfig", marks=pytest.mark.soak),
        "evil:Model",
        pytest.param("modelsx:GPT", marks=pytest.mark.soak),
        TARGET,
    ],
)
def test_a_checkpoint_is_not_code(
    text: Path, copy: Path, own_module: Path, refused: Callable[..., str], tmp_path: Path, target: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all of it")

    def name(body: dict[str, Any]) -> None:
        body["meta"]["config"]["model"] = {"target": target, "options": {"filename": str(precious), "filemode": "w"}}

    def nameless(body: dict[str, Any]) -> None:
        name(body)
        body["meta"].pop("program")

    rewrite_manifest(newest(copy), name)
    for verb in ("eval", "generate"):
        assert f"is of the model {target}, code outside of the package models" in refused(verb, copy)
    start(text, copy)  # the model computes the same, whatever it is called there
    rewrite_manifest(newest(copy), nameless)
    with pytest.raises(CheckpointError, match="of another model"):
        start(text, copy)
    assert precious.read_text() == "all of it"
    assert not (own_module / "ran").exists()
    assert "evil" not in sys.modules


def test_a_model_that_is_named_is_trusted(finished: Path, succeeds: Callable[..., tuple[str, str]]) -> None:
    out, _ = succeeds("eval", finished, "--json", "--model", TARGET)
    assert json.loads(out)["step"] == 4
    with pytest.raises(ConfigError, match=f"name it yourself with --model {TARGET}"):
        load_trained(finished)
    assert load_trained(finished, model=TARGET).config.model.target == TARGET


def test_nothing_of_python_is_a_model(text: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    for target, words in {
        "logging:basicConfig": "logging is part of Python",
        "builtins:dict": "builtins is part of Python",
        "scaled_models:dataclasses": "no function or class 'dataclasses'",
        "models.llama:partial": "partial is of functools; name a function or class that models defines",
    }.items():
        assert words in refused(
            "train", *settings(text, tmp_path / "new", f"model.target={target}", "model.options={}")
        )
    assert not (tmp_path / "new").exists()


# -- the same data, or it is said -----------------------------------------------------------------------------------------


def test_other_data_are_refused_or_said(
    text: Path, tmp_path: Path, copy: Path, refused: Callable[..., str], succeeds: Callable[..., tuple[str, str]]
) -> None:
    lines = text.read_text().splitlines()
    halves = write_text(tmp_path / "text.txt")
    halves.write_text("\n".join([*lines[200:], *lines[:200]]) + "\n")
    evaluate = ("eval", copy, "--model", TARGET)
    right = json.loads(succeeds(*evaluate, "--json")[0])
    assert right["other_data"] is False
    assert succeeds(*evaluate, "--other-data")[0].splitlines()[0].endswith("× 8")
    rewrite_manifest(newest(copy), lambda body: body["meta"]["config"]["data"].update(path=str(halves)))
    assert "not the data that step 4 was trained on" in refused(*evaluate, kind=DataError)
    wrong = json.loads(succeeds(*evaluate, "--json", "--other-data")[0])
    assert wrong["other_data"] is True
    assert wrong["model"]["loss"] != right["model"]["loss"]
    assert "of other data than it was trained on" in succeeds(*evaluate, "--other-data")[0]


# -- damage ---------------------------------------------------------------------------------------------------------------


def test_arrays_that_do_not_match_are_passed_over(text: Path, copy: Path) -> None:
    """Though every file matches its checksum."""
    swap_arrays(newest(copy), newest(copy).with_name("00000002"))
    started, notes = start(text, copy)
    assert started.step == 2
    (note,) = notes
    assert note.startswith(f"warning: passed over step 4: checkpoint {newest(copy)} is damaged: params: ")
    shutil.rmtree(newest(copy).with_name("00000002"))
    with pytest.raises(CheckpointError, match="no other checkpoint beside it is intact"):
        start(text, copy)


def test_going_on_leaves_what_is_not_its_own(text: Path, copy: Path) -> None:
    """A dated backup stays; the damaged newest checkpoint is renamed, and both are told."""
    folder = newest(copy).parent
    shutil.copytree(newest(copy), folder / "20251122")
    before = contents(folder / "20251122")
    (newest(copy) / "optimizer" / "_METADATA").write_text("?")
    _, printed = run(config(text, copy, *BASE, "run.eval_every=0"))
    assert f"{folder / '20251122'} holds the checkpoint of step 4 under another number; it is left alone" in printed
    assert f"the checkpoint of step 4 was set aside as {folder / '00000004.damaged'}" in printed
    assert contents(folder / "20251122") == before
    assert sorted(path.name for path in folder.iterdir()) == ["00000002", "00000004", "00000004.damaged", "20251122"]
    assert load_params(folder / "00000004.damaged")


# -- of an earlier version ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_0_1_0(
    tmp_path: Path, succeeds: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads, evaluates to the same loss, and a run that goes on from it goes as it went then."""
    monkeypatch.chdir(ROOT)
    out_dir = copy_run(WANTED, tmp_path / "run")
    expected = json.loads((WANTED / "expected.json").read_text())
    manifest = read_manifest(out_dir)
    assert (manifest.step, manifest.version) == (4, "0.1.0")
    report = json.loads(succeeds("eval", out_dir, "--json")[0])
    assert report["model"]["loss"] == pytest.approx(expected["eval"], rel=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(manifest.meta["config"]))
    _, printed = run(load_config(tmp_path / "config.json", [f"run.out_dir={out_dir}"]))
    assert "resumed from step 4" in printed
    assert "changes" not in printed
    assert losses(out_dir) == pytest.approx({int(k): v for k, v in expected["losses"].items()}, rel=1e-5)
    (*_, last) = (r["eval_loss"] for r in read_metrics(out_dir / "metrics.jsonl") if "eval_loss" in r)
    assert last == pytest.approx(expected["eval_loss"], rel=1e-5)
