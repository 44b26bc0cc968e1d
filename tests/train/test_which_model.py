"""Which model is it: every door compares what the model computes with what it computed when the checkpoint was saved, takes the
module that the run had, and imports nothing because a checkpoint names it."""

from __future__ import annotations

import importlib
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpipe
from jaxpipe.cli import main
from jaxpipe.errors import CheckpointError, ConfigError, JaxpipeError, StageError
from jaxpipe.schedule import generate, write_schedule
from jaxpipe.stage.model.reference import offered, resolve_model, source_of
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.checkpoints.contents import read_manifest_of
from jaxpipe.train.checkpoints.which_model import Likeness, likeness, model_digest
from jaxpipe.train.config import load_config
from jaxpipe.train.evaluate import load_trained
from jaxpipe.train.import_export import completed
from jaxpipe.train.loop import train
from jaxpipe.train.run import resume
from jaxpipe.train.setup import prepare
from tests.support.checkpoint_cases import rewrite_manifest
from tests.support.train_runs import config, copy_run, write_text

CODE = """
from dataclasses import replace
import jax
from jaxpipe.models import gpt

FORWARD = BACKWARD = TRAINING = 1.0

def hugging_face():
    return gpt.hugging_face()

def Model(**options):
    model = gpt.GPT(**options)
    forward, backward, training = FORWARD, BACKWARD, TRAINING
    scaled = jax.custom_vjp(lambda x: x * forward)
    scaled.defvjp(lambda x: (x * forward, None), lambda _, g: (g * backward,))

    def apply(params, x, context, block=model.layers[1].apply):
        y = scaled(block(params, x, context))
        return y * training if context.train else y

    return replace(model, layers=(model.layers[0], replace(model.layers[1], apply=apply), *model.layers[2:]))
"""
OWN = "whichmodel:Model"
TINY = (
    "pipeline.ranks=1", "pipeline.microbatches=2", "model.options.num_layers=1", "run.steps=2", "run.checkpoint_every=2",
    "run.eval_every=0", "run.log_every=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """On ``sys.path``, with the user's own model ``whichmodel:Model``."""
    path = tmp_path_factory.mktemp("modules")
    (path / "whichmodel.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield path
    sys.modules.pop("whichmodel", None)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def custom_run(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a run of two steps of the user's own model."""
    out = tmp_path_factory.mktemp("own") / "run"
    train(config(text, out, *TINY, f"model.target={OWN}"), io.StringIO())
    return out


@pytest.fixture(scope="module")
def gpt(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a run of two steps of a model that comes with jaxpipe."""
    out = tmp_path_factory.mktemp("gpt") / "run"
    train(config(text, out, *TINY), io.StringIO())
    return out


@pytest.fixture
def constant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Change a constant of the user's model."""

    def change(name: str) -> None:
        monkeypatch.setattr(importlib.import_module("whichmodel"), name, -3.0)

    return change


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a verb and return its exit code and stderr."""

    def run(*argv: object) -> tuple[int, str]:
        code = main([str(a) for a in argv])
        return code, capsys.readouterr().err

    return run


# -- one comparison, at every door ----------------------------------------------------------------------------------------

DOORS = {
    "eval": ("eval", "--batches", 1),
    "generate": ("generate", "--tokens", 1),
    "export": ("export", "-o", "exported"),
}


@pytest.mark.parametrize("door", DOORS)
def test_another_model_is_refused_where_it_is_used(
    custom_run: Path, constant: Callable[[str], None], call: Callable[..., tuple[int, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, door: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    verb, *flags = DOORS[door]
    command = (verb, custom_run, *flags, "--model", OWN)
    constant("BACKWARD")
    constant("TRAINING")  # neither changes what evaluation computes
    assert call(*command) == (0, "")
    constant("FORWARD")
    if verb == "export":
        command = (verb, custom_run, "-o", "again", "--model", OWN)
    code, line = call(*command)
    assert code == 3 and line.count("\n") == 1
    assert f"{OWN} computes something else" in line and "--other-model" in line
    code, line = call(*command, "--other-model")
    assert code == 0 and line.startswith("warning: ") and "computes something else" in line


def starting(text: Path, out: Path, *overrides: str) -> list[str]:
    """Return what a new run, or one that goes on, says before anything is compiled."""
    settings, notes = config(text, out, *TINY, *overrides), list[str]()
    store = CheckpointStore(out / "checkpoints")
    origin = resume.choose(settings.run, store, notes.append)
    settings = completed(settings, None if origin is None else origin.meta)
    resume.start_of(prepare(settings), origin, store, notes.append)
    return notes


def test_another_model_is_refused_by_init_from(
    custom_run: Path, text: Path, tmp_path: Path, constant: Callable[[str], None]
) -> None:
    overrides = (f"run.init_from={custom_run}", f"model.target={OWN}")
    assert starting(text, tmp_path / "a", *overrides) == [f"begins with the parameters in {custom_run}"]
    options = starting(text, tmp_path / "a", *overrides, "model.options.gelu=exact")
    assert options[0] == f"model.options other than in {custom_run}: gelu not set → exact"
    assert len(starting(text, tmp_path / "a", *overrides, "model.options.dropout=0.5", "data.seq_len=8")) == 1
    constant("FORWARD")
    with pytest.raises(CheckpointError, match=r"computes something else.*run\.init_other_model=true"):
        starting(text, tmp_path / "a", *overrides)
    notes = starting(text, tmp_path / "a", *overrides, "run.init_other_model=true")
    assert "computes something else" in notes[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [("FORWARD", "computes something else"), ("BACKWARD", "gradient"), ("TRAINING", "in training")],
)
def test_a_run_that_goes_on_says_what_is_other(
    custom_run: Path, text: Path, constant: Callable[[str], None], name: str, words: str
) -> None:
    assert starting(text, custom_run, f"model.target={OWN}") == []
    constant(name)
    (note,) = starting(text, custom_run, f"model.target={OWN}")
    assert note.startswith(f"warning: {OWN} ") and words in note and "step 2" in note


def test_a_trainer_refuses_another_model(tmp_path: Path, folder: Path, constant: Callable[[str], None]) -> None:
    options = {"vocab_size": 11, "seq_len": 4, "d_model": 8, "num_layers": 1, "num_heads": 2}

    trainer = jaxpipe.Trainer(
        resolve_model(OWN, options), optimizer=optax.sgd(0.1), microbatch_size=1, ranks=1, microbatches=1
    )
    trainer.save(trainer.init(), tmp_path)
    trainer.restore(tmp_path)
    constant("BACKWARD")
    trainer.program = model_digest(resolve_model(OWN, options))  # as one would have that is made now
    with pytest.warns(UserWarning, match="has another gradient"):
        trainer.restore(tmp_path)
    constant("FORWARD")
    trainer.program = model_digest(resolve_model(OWN, options))
    with pytest.raises(CheckpointError, match="computes something else"):
        trainer.restore(tmp_path)
    trainer.restore(tmp_path, same_model=False)


def test_old_digests_and_those_of_another_jax_compare_as_far_as_they_can(
    custom_run: Path, tmp_path: Path, constant: Callable[[str], None], call: Callable[..., tuple[int, str]]
) -> None:
    now = model_digest(load_trained(custom_run, model=OWN).model)
    old = {"jax": now["jax"], "sha256": now["sha256"]}
    assert likeness({"program": old}, now) is Likeness.SAME
    assert likeness({"program": {**now, "evaluation": "0"}}, now) is Likeness.OTHER
    assert likeness({"program": {**now, "evaluation": "0", "python": "3.1"}}, now) is Likeness.SAME  # by sha256
    assert likeness({"program": {**now, "training": "0"}}, now) is Likeness.TRAINS_OTHERWISE
    assert likeness({"program": {**now, "jax": "0.0.1"}}, now) is likeness({}, now) is Likeness.UNKNOWN
    run = copy_run(custom_run, tmp_path / "run")
    rewrite_manifest(run / "checkpoints" / "00000002", lambda body: body["meta"].update(program=old))
    evaluate = ("eval", run, "--model", OWN, "--batches", 1)
    assert call(*evaluate) == (0, "")
    constant("FORWARD")
    assert call(*evaluate)[0] == 3
    rewrite_manifest(run / "checkpoints" / "00000002", lambda body: body["meta"]["program"].update(jax="0.0.1"))
    code, line = call(*evaluate)
    assert code == 0 and "JAX 0.0.1" in line and "can't be told" in line


# -- the module that the run had ------------------------------------------------------------------------------------------

PROJECT = """
from dataclasses import replace
from jaxpipe.models.gpt import GPT as inner

def GPT(**options):
    model = inner(**options)
    layer = model.layers[1]
    doubled = replace(layer, apply=lambda p, x, c, apply=layer.apply: apply(p, x, c) * -2.0)
    return replace(model, layers=(model.layers[0], doubled, *model.layers[2:]))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide the working directory, with a package ``models`` of its own in place of the one of the checkout."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    (tmp_path / "models" / "gpt.py").write_text(PROJECT)
    checkout_modules = {name: module for name, module in sys.modules.items() if f"{name}.".startswith("models.")}
    for name in checkout_modules:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if f"{name}.".startswith("models.")]:
        del sys.modules[name]


def test_a_projects_own_models_are_taken_or_refused(
    project: Path, gpt: Path, text: Path, call: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = project / "run"
    train(config(text, out, *TINY, "model.options.mlp_ratio=1"), io.StringIO())
    assert read_manifest_of(out / "checkpoints" / "00000002").meta["sources"]["model"]["home"] == "models"
    for verb, *flags in DOORS.values():
        code, line = call(verb, out, *flags)
        assert code == 2 and "--model models.gpt:GPT" in line and "gpt.py" in line
    assert call("eval", out, "--batches", 1, "--model", "models.gpt:GPT") == (0, "")
    with pytest.raises(ConfigError, match=r"model\.target=models\.gpt:GPT"):
        starting(text, project / "new", f"run.init_from={out}", "model.options.mlp_ratio=1")
    overrides = (f"run.init_from={out}", "model.options.mlp_ratio=1", "model.target=models.gpt:GPT")
    assert len(starting(text, project / "new", *overrides)) == 1
    # a run of jaxpipe's own model is evaluated with that, though the project has one of the same name
    assert call("eval", gpt, "--batches", 1) == (0, "")
    assert call("eval", gpt, "--batches", 1, "--model", "models.gpt:GPT")[0] == 3
    with pytest.raises(CheckpointError, match=r"model\.target.*gpt\.py"):
        starting(text, gpt)
    # and the project's own is no other module elsewhere
    for name in [name for name in sys.modules if f"{name}.".startswith("models.")]:
        del sys.modules[name]
    (project / "models" / "gpt.py").unlink()
    (project / "models" / "__init__.py").unlink()
    shutil.rmtree(project / "models")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    assert call("eval", out, "--batches", 1, "--model", "models.gpt:GPT")[0] == 3
    with pytest.raises(CheckpointError, match=r"model\.target.*gpt\.py"):
        starting(text, out, "model.options.mlp_ratio=1")
    rewrite_manifest(out / "checkpoints" / "00000002", lambda body: body["meta"]["program"].update(jax="0.0.1"))
    assert (
        call("eval", out, "--batches", 1, "--model", "models.gpt:GPT")[0] == 3
    )  # where digests can't be compared, too
    with pytest.raises(CheckpointError, match=r"model\.target.*gpt\.py"):
        starting(text, out, "model.options.mlp_ratio=1")


def test_a_name_is_of_jaxpipe_by_its_file() -> None:
    assert source_of("models.gpt:GPT") == source_of("jaxpipe.models.gpt:GPT")
    assert source_of("models.gpt:GPT")["home"] == "jaxpipe.models"
    assert offered("models.gpt:GPT", None) == offered("models.gpt:GPT", {"home": "jaxpipe.models"})
    assert offered("models.gpt:GPT", {"home": "models"}) is None


# -- nothing is imported because a checkpoint names it --------------------------------------------------------------------


@settings(max_examples=6, deadline=None)
@given(
    module=st.sampled_from(["poison", "poison.inner", "models.poison", "jaxpipe.models.poison", "logging", "os.path"]),
    attribute=st.sampled_from(["Model", "GPT", "system"]),
    source=st.sampled_from([None, {"home": "jaxpipe.models"}, {"home": "poison"}, {"home": 3}, [], "x"]),
    digest=st.booleans(),
    part=st.sampled_from(["model", "model", "data"]),
)
def test_a_poisoned_checkpoint_imports_nothing_at_any_door(
    gpt: Path, text: Path, tmp_path_factory: pytest.TempPathFactory, module: str, attribute: str, source: Any, digest: bool,
    part: str,
) -> None:  # fmt: skip
    root = tmp_path_factory.mktemp("poisoned")
    run = copy_run(gpt, root / "run")
    for name in ("poison/__init__.py", "poison/inner.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"open({str(root / 'ran')!r}, 'w').close()\nraise SystemExit(7)\n")

    def poison(body: dict[str, Any]) -> None:
        body["meta"]["config"][part]["path" if part == "data" else "target"] = f"{module}:{attribute}"
        body["meta"]["sources"][part] = source
        if not digest:
            body["meta"].pop("program")

    rewrite_manifest(run / "checkpoints" / "00000002", poison)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        patch.chdir(root)
        assert main(["eval", str(run), "--batches", "1"]) in (2, 3)
        for verb, *flags in DOORS.values() if part == "model" else ():
            assert main([str(a) for a in (verb, run, *flags)]) in (2, 3)
        for overrides in ((f"run.init_from={run}", f"run.out_dir={root / 'new'}"), (f"run.init_from={run}",)):
            with pytest.raises(JaxpipeError) if part == "model" else nullcontext():
                starting(text, run if len(overrides) == 1 else root / "new", *overrides)
        if digest:
            starting(text, run)  # the model computes the same, whatever it is called there
    assert not (root / "ran").exists()
    assert not any(name.startswith("poison") for name in sys.modules)


def test_models_of_ours_can_be_told_apart_where_promotion_is_strict() -> None:
    """JAX_NUMPY_DTYPE_PROMOTION=strict: nothing is promoted without a word."""
    tiny = {"vocab_size": 11, "seq_len": 4, "d_model": 8, "num_layers": 1, "num_heads": 2}
    for name in ("models.gpt:GPT", "models.llama:Llama"):
        usual = model_digest(resolve_model(name, tiny))
        with jax.numpy_dtype_promotion("strict"):
            assert model_digest(resolve_model(name, tiny)) == usual


def test_a_model_that_fails_is_told_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"vocab_size": 11, "seq_len": 4, "d_model": 8, "num_layers": 1, "num_heads": 2}
    monkeypatch.setattr(importlib.import_module("whichmodel"), "FORWARD", "not a number")
    with pytest.raises(StageError, match="can't be traced: TypeError") as info:
        model_digest(resolve_model(OWN, tiny))
    assert "\n" not in str(info.value)


def test_keys_are_threefry_whatever_the_default_is(folder: Path) -> None:
    """JAX_DEFAULT_PRNG_IMPL=rbg: of a model that draws, stages are timed and a step is taken."""
    tiny = {"vocab_size": 11, "seq_len": 4, "d_model": 8, "num_layers": 1, "num_heads": 2, "dropout": 0.5}
    with jax.default_prng_impl("rbg"):
        trainer = jaxpipe.Trainer(
            resolve_model("models.gpt:GPT", tiny), optimizer=optax.sgd(0.1), microbatch_size=1, ranks=1, microbatches=1
        ).measured(1)
        rows = {name: np.ones((1, 4), aval.dtype) for name, aval in trainer.model.batch_spec(1).items()}
        assert trainer.step(trainer.init(), rows)[0].step == 1


# -- what was said is told from a default ---------------------------------------------------------------------------------


def test_a_target_that_is_said_is_no_default(custom_run: Path, gpt: Path, text: Path) -> None:
    overrides = ["data.seq_len=8", f"data.path={text}"]
    with pytest.raises(ConfigError, match=r"model\.target.*models\.gpt:GPT"):
        completed(load_config(None, [f"run.init_from={custom_run}", "model.target=models.gpt:GPT", *overrides]))
    assert (
        completed(load_config(None, [f"run.init_from={custom_run}", f"model.target={OWN}", *overrides])).model.target
        == OWN
    )
    unsaid = completed(load_config(None, [f"run.init_from={gpt}", *overrides]))
    assert unsaid.model.target == "jaxpipe.models.gpt:GPT"  # of no module of the user's
    config = completed(load_config(None, [f"run.init_from={gpt}", "model.target=models.gpt:GPT", *overrides]))
    assert config.model.target == "models.gpt:GPT" and config.model.options == unsaid.model.options


def test_sizes_that_are_not_said_are_those_of_the_schedule(
    tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    """The schedule is a file's, or a family's; a size that is given stays, even if it is the default."""
    path = tmp_path / "mine.sched"
    write_schedule(generate("v-zb", 2, 6), path)
    from_file = [f"pipeline.schedule={path}", "run.batch=12"]

    def sizes(*overrides: str) -> tuple[int, int, int]:
        pipe = load_config(None, overrides).pipeline
        return pipe.ranks, pipe.microbatches, pipe.chunks

    assert sizes(*from_file) == (2, 6, 2)
    assert sizes(*from_file, "pipeline.chunks=1") == (2, 6, 1)
    assert sizes(*from_file, "pipeline.ranks=4", "pipeline.microbatches=12") == (4, 12, 2)
    assert sizes("pipeline.schedule=v-zb") == (4, 8, 2)
    with pytest.raises(ConfigError, match=r"pipeline\.chunks=1: set pipeline\.chunks=2"):
        sizes("pipeline.schedule=v-zb", "pipeline.chunks=1")
    assert load_config(None, from_file).override(["run.steps=3"]).pipeline.chunks == 2
    assert load_config(None, ["run.steps=3"]).override(["pipeline.schedule=v-zb"]).pipeline.chunks == 2
    code, line = call("plan", *from_file, "pipeline.chunks=1")
    assert code == 2 and "has 2 chunks, and pipeline.chunks is 1" in line
    assert sizes(f"pipeline.schedule={tmp_path / 'nothing.sched'}") == (
        4,
        8,
        1,
    )  # what can't be read is told when it is needed
