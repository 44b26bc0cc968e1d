"""Runs that ``Trainer.save`` writes are exported, evaluated, sampled and begun with; the verbs are functions; starts load what
was compiled, and say what they do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxpipe
from jaxpipe import Model, Trainer
from jaxpipe.cli import main
from jaxpipe.errors import CheckpointError, ConfigError, DataError
from jaxpipe.schedule import OpSpec, Schedule, Wait, generate, register_op
from jaxpipe.schedule.passes import insert
from jaxpipe.stage.instructions import register_instruction, stage_function
from jaxpipe.stage.model.reference import init_params
from jaxpipe.train.checkpoint import load_params, read_manifest
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.datasets import load_dataset
from jaxpipe.train.import_export import completed
from jaxpipe.train.run import compiling
from models.gpt import GPT
from models.llama import Llama, RopeScaling
from tests.runtime.test_processes import free_port
from tests.support.forks import start_python
from tests.support.train_runs import config, run, write_text

pytestmark = pytest.mark.usefixtures("one_build")

T = 8
SIZES: dict[str, Any] = {"d_model": 8, "num_layers": 2, "num_heads": 2, "seq_len": T}
OWN = """
import numpy as np
import optax
from flax import linen as nn
from jaxpipe import layers_from_linen
from jaxpipe.interop.table import HuggingFace, Tensor


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1], use_bias=False)(nn.tanh(x))


class LM(nn.Module):
    width: int
    scale: float

    @nn.compact
    def __call__(self, tokens):
        x = nn.Sequential([Block() for _ in range(2)])(self.scale * nn.Embed(256, self.width)(tokens))
        return nn.Dense(256, use_bias=False)(x)


def loss(logits, batch):
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (each * batch["weights"]).sum(), batch["weights"].sum()


def make(width=8, scale=1.0):
    ids, weights = np.zeros((2, 8), np.int32), np.ones((2, 8), np.float32)
    batch = {"tokens": ids, "targets": ids, "weights": weights}
    return layers_from_linen(LM(width, scale), "Block", batch=batch, reads=("tokens",), loss=loss)


def hugging_face():
    def tensors(options):
        leaves = [("embed", "Embed_0", "embedding"), *((f"block_0{i}", "Dense_0", "kernel") for i in range(2))]
        leaves.append(("head", "Dense_0", "kernel"))
        return [Tensor(f"lm.{name}", name, (a, b), "a b -> a b") for name, a, b in leaves]

    return HuggingFace(dict, tensors, lambda options: {"model_type": "own_lm", "width": options["width"]})
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("door") / "text.txt")


@pytest.fixture(scope="module")
def own_lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Provide a module with a user's Flax model."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_lm.py").write_text(OWN, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import own_lm  # type: ignore[import-not-found,unused-ignore]

        yield own_lm
    del sys.modules["own_lm"]


def trainer_of(model: Model, **options: Any) -> Trainer:
    sizes: dict[str, Any] = {"ranks": 2, "microbatches": 2, "microbatch_size": 2}
    return Trainer(model, optimizer=optax.sgd(0.1), **{**sizes, **options})


@cache
def gpt() -> Trainer:
    return trainer_of(GPT(vocab_size=256, **SIZES))


def run_verb(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(x) for x in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.strip()


# -- out again --------------------------------------------------------------------------------------------------------


def _llama(own_lm: Any) -> Trainer:
    scaling = RopeScaling(original_seq_len=4)
    return trainer_of(Llama(vocab_size=257, vocab_multiple=4, mlp_size=16, rope_scaling=scaling, **SIZES), tp=2)


def _custom(own_lm: Any) -> Trainer:
    return trainer_of(own_lm.make(16), target="own_lm:make", target_options={"width": 16})


MADE: Mapping[str, tuple[Callable[[Any], Trainer], tuple[str, ...]]] = {
    "gpt": (lambda own_lm: gpt(), ()),
    "llama": (_llama, ()),
    "own": (_custom, ("--model", "own_lm:make")),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_a_trainer_saves_leads_out_again(
    kind: str, own_lm: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, model_flags = MADE[kind]
    trainer, data = make(own_lm), jaxpipe.data(text, batch=4, seq_len=T)
    state, _ = trainer.step(trainer.init(), data.batch_at(0))
    trainer.save(state, tmp_path / "run", data=data)
    expected_loss = trainer.evaluate(state, data.held_out(4, 1)[0])["loss"]
    code, out, err = run_verb(capsys, "eval", tmp_path / "run", "--batch", 4, "--batches", 1, "--json", *model_flags)
    assert code == 0, err
    report = json.loads(out)
    assert report["other_data"] is False
    assert report["model"]["loss"] == pytest.approx(expected_loss, rel=1e-5)
    code, out, err = run_verb(capsys, "generate", tmp_path / "run", "--prompt", "the", "--tokens", 2, *model_flags)
    assert code == 0 and out.startswith("the"), err
    code, _, err = run_verb(capsys, "export", tmp_path / "run", "-o", tmp_path / "hf", *model_flags)
    assert code == 0, err
    if kind == "gpt":  # the functions do the same
        assert jaxpipe.generate(tmp_path / "run", "the", tokens=2) == out.removeprefix("the").removesuffix("\n")
        assert jaxpipe.evaluate(tmp_path / "run", batch=4, batches=1)["loss"] == pytest.approx(expected_loss, rel=1e-5)
        exported = jaxpipe.export(tmp_path / "run", tmp_path / "again", dtype="bfloat16")
        assert exported.step == 1 and exported.parameters == sum(a.size for a in jax.tree.leaves(trainer.params(state)))
    settings = json.loads((tmp_path / "hf" / "config.json").read_text("utf-8"))
    assert settings["model_type"] == {"gpt": "gpt2", "llama": "llama", "own": "own_lm"}[kind]
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    if kind == "llama":  # and in again, with the padded rows as they are: zeros
        jaxpipe.import_folder(tmp_path / "hf", tmp_path / "back", seq_len=T)
        back = load_params(tmp_path / "back")
        now = trainer.params(state)
        assert np.array_equal(back["head"]["kernel"][:257], now["head"]["kernel"][:257])
        first = jaxpipe.load_params(tmp_path / "hf", trainer.model)["block_00"]["qkv"]["kernel"]
        assert np.array_equal(first, now["block_00"]["qkv"]["kernel"])


def test_what_is_not_known_is_asked_for_in_one_line(
    own_lm: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    model = own_lm.make()
    trainer = trainer_of(model, progress=lines.append)
    state = trainer.init()
    for step in (0, 1):
        trainer.save(replace(state, step=step), tmp_path / "run")
    assert [line for line in lines if "saved without what makes" in line] == lines[-1:]
    for verb in (("export", "-o", tmp_path / "hf"), ("eval",), ("generate",)):
        code, _, err = run_verb(capsys, verb[0], tmp_path / "run", *verb[1:])
        assert code == 2 and re.search(r"name it with --model module:function, or train with Trainer\(target=…\)$", err)
        assert err.count("\n") == 0
    model_flags = ("--model", "own_lm:make")
    code, _, err = run_verb(capsys, "generate", tmp_path / "run", *model_flags)
    assert code == 2 and "keeps no tokenizer, ids alone (ids:256)" in err
    code, _, err = run_verb(capsys, "eval", tmp_path / "run", *model_flags)
    assert code == 2 and "does not say what data it was trained on" in err
    code, out, err = run_verb(
        capsys, "eval", tmp_path / "run", *model_flags, "--tokenizer", "byte", "--data", text, "--batches", 1
    )
    assert code == 0 and "data that it may have been trained on" in out, err
    assert jaxpipe.generate(tmp_path / "run", "a", tokens=1, temperature=0, model=model, tokenizer="byte")
    with pytest.raises(ConfigError, match="does not say what makes it"):
        jaxpipe.export(tmp_path / "run", tmp_path / "hf", model=model)
    assert not (tmp_path / "hf").exists()


def test_a_model_that_was_changed_does_not_pass_for_the_one_it_was_made_of(tmp_path: Path) -> None:
    """A model's claim of its origin is traced, not believed."""
    model = GPT(vocab_size=256, **SIZES)
    inner = model.layers[1]
    twice = replace(inner, apply=lambda params, x, context: 2 * inner.apply(params, x, context))
    changed = trainer_of(replace(model, layers=(model.layers[0], twice, *model.layers[2:])))
    assert changed.origin is None and gpt().origin is not None
    changed.save(changed.init(), tmp_path)
    with pytest.raises(ConfigError, match="does not know what makes its model"):
        jaxpipe.generate(tmp_path, "a", tokens=1, tokenizer="byte")


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("own_lm:make", {"scale": 2.0}, "computes something else than the one that is trained"),
        ("own_lm:made", {}, "no function or class 'made'"),
        ("own_lm:make", {"depth": 2}, "has no option 'depth'"),
        ("own_lm", {}, "want module:function"),
        ("__main__:make", {}, "the script itself can't be imported later"),
        ("nowhere:make", {}, "no module 'nowhere'"),
    ],
)
def test_a_target_that_makes_another_model_is_refused(
    target: str, options: Mapping[str, Any], words: str, own_lm: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(own_lm.make(), target=target, target_options=options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_begins_with_what_a_trainer_saved(text: Path, tmp_path: Path) -> None:
    trainer = gpt()
    state = trainer.init(init_params(trainer.model, 7))
    trainer.save(state, tmp_path / "saved", tokenizer="byte")
    meta = read_manifest(tmp_path / "saved").meta
    assert meta["config"]["model"]["target"] == "models.gpt:GPT" and "seq_len" not in meta["config"]["model"]["options"]
    began = completed(TrainConfig().override([f"run.init_from={tmp_path / 'saved'}", f"data.seq_len={T}"]))
    assert dict(began.model.options)["d_model"] == 8
    loaded = trainer.params(trainer.init(jaxpipe.load_params(f"{tmp_path / 'saved'}:0", trainer.model)))
    jax.tree.map(np.testing.assert_array_equal, loaded, trainer.params(state))
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        jaxpipe.load_params(tmp_path / "nowhere", trainer.model)
    other = GPT(vocab_size=256, gelu="exact", **SIZES)
    with pytest.raises(CheckpointError, match="is of another model"):
        jaxpipe.load_params(tmp_path / "saved", other)
    with pytest.warns(UserWarning, match="is of another model"):
        jaxpipe.load_params(tmp_path / "saved", other, other_model=True)
    trainer.save(state, tmp_path / "run" / "checkpoints", data=jaxpipe.data(text, batch=4, seq_len=T))
    trainer._data = None  # the trainer is of other tests too
    with pytest.raises(CheckpointError, match="was not written by jaxpipe train"):
        run(config(text, tmp_path / "run"))


def test_the_tokenizer_stays_and_another_is_refused(tmp_path: Path, own_lm: Any) -> None:
    trainer = gpt()
    trainer.save(trainer.init(), tmp_path / "a", tokenizer="byte")
    trainer.save(trainer.init(), tmp_path / "b")
    for name in "ab":
        assert read_manifest(tmp_path / name).meta["tokenizer"]["name"] == "byte"
    with pytest.raises(ConfigError, match="ids:256"):
        jaxpipe.generate(tmp_path / "a", "a", tokenizer="ids:256")
    with pytest.raises(ConfigError, match=r"300 different.*256"):
        trainer.save(trainer.init(), tmp_path / "c", tokenizer="ids:300")
    trainer._tokenizer = None  # the trainer is of other tests too


# -- data -------------------------------------------------------------------------------------------------------------


def test_data_are_the_batches_of_a_run(text: Path, tmp_path: Path) -> None:
    data = jaxpipe.data(text, batch=4, seq_len=T, holdout=0.1, seed=3)
    config = TrainConfig().override([f"data.path={text}", f"data.seq_len={T}", "data.holdout=0.1", "data.seed=3"])
    dataset = load_dataset(config)
    for step in (0, 5, 1000):
        jax.tree.map(np.testing.assert_array_equal, data.batch_at(step), dataset.batches(3, 4, T).batch_at(step))
    assert data.vocab_size == 256 and str(data) == dataset.describe()
    assert len(data.held_out(2)) == len(dataset.held_out_batches(2, T))
    chat = tmp_path / "chat.jsonl"
    record = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    chat.write_text("".join(json.dumps(record) + "\n" for _ in range(40)), encoding="utf-8")
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        encoding="utf-8",
    )
    answers = jaxpipe.data(chat, batch=2, seq_len=32, format="chat", chat_template=str(template), holdout=0.2)
    assert 0 < answers.batch_at(0)["weights"].sum() < 32
    sources = {"a": {"path": str(text), "weight": 2}, "b": {"path": str(text)}}
    assert jaxpipe.data(sources=sources, batch=2, seq_len=T).batch_at(0)["tokens"].shape == (2, T)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"batch": 0}, ConfigError, "batch is 0; want how many sequences"),
        ({"batch": True}, ConfigError, "batch is True"),
        ({"colour": 1}, ConfigError, "colour"),
        ({"holdout": 2.0}, ConfigError, "holdout"),
        ({"path": "nowhere.txt"}, DataError, "nowhere.txt"),
        ({"batch": 10**9}, DataError, "batch"),
        ({"model": GPT(vocab_size=256, mask="document", **SIZES), "mask": "causal"}, DataError, "segments"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_data_get_one_line(settings: dict[str, Any], error: type[Exception], words: str, text: Path) -> None:
    with pytest.raises(error) as caught:
        jaxpipe.data(**{"path": text, "batch": 4, "seq_len": T, **settings})
    assert words in str(caught.value) and "\n" not in str(caught.value)


# -- starting ---------------------------------------------------------------------------------------------------------

_OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def settings_of_jax() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in _OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("settings_of_jax")
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    model = GPT(vocab_size=8, d_model=4, num_layers=1, num_heads=1, seq_len=4, mlp_ratio=1)
    batch: dict[str, Any] = {name: np.zeros((1, 4), np.int32) for name in ("tokens", "targets")}
    batch["weights"] = np.ones((1, 4), np.float32)

    def start() -> tuple[int, int]:
        """Return how many programs are compiled, and how many loaded."""
        jax.clear_caches()
        compilation_cache.reset_cache()  # as in a new process
        compiling.made_programs()
        compiled, loaded = compiling.made_programs()
        sizes = {"ranks": 1, "microbatches": 1, "microbatch_size": 1}
        trainer = Trainer(model, optimizer=optax.sgd(0.1), compile_cache=tmp_path / "cache", **sizes)  # type: ignore[arg-type]
        state, metrics = trainer.step(trainer.init(), batch)
        float(metrics.loss)
        trainer.evaluate(state, batch)
        trainer.save(state, tmp_path / "run")
        now = compiling.made_programs()
        return now[0] - compiled, now[1] - loaded

    assert start()[0] > 5
    compiled, loaded = start()
    assert compiled == 0 and loaded > 5


@pytest.mark.usefixtures("settings_of_jax")
def test_the_compile_cache_can_be_left_alone(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    trainer_of(GPT(vocab_size=256, **SIZES), compile_cache="off")
    assert jax.config.jax_compilation_cache_dir == before  # type: ignore[attr-defined]
    lines: list[str] = []
    (tmp_path / "file").write_text("", encoding="utf-8")
    trainer_of(GPT(vocab_size=256, **SIZES), compile_cache=tmp_path / "file", progress=lines.append)
    assert lines[0].startswith("warning: compiled programs are not kept: ")


def test_a_start_says_what_it_does(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "FIRST_S", 0.0)
    model, data = GPT(vocab_size=256, **SIZES), jaxpipe.data(text, batch=4, seq_len=T)

    def lines_of(trainer: Trainer) -> list[str]:
        capsys.readouterr()
        state = trainer.init()
        for step in range(2):
            state, _ = trainer.step(state, data.batch_at(step))
        return capsys.readouterr().err.splitlines()

    lines = lines_of(trainer_of(model))
    assert all(re.fullmatch(r"jaxpipe: .*: \d+ programs compiled, \d+ loaded, \d+ s(; done)?", line) for line in lines)
    phases = [line.split(":")[1].strip() for line in lines if line.endswith("; done")]
    assert phases == ["making the first state", "compiling the first step"], "and nothing of later steps"
    assert lines_of(trainer_of(model, progress=None)) == []


def test_a_line_comes_at_least_every_ten_seconds() -> None:
    assert compiling.FIRST_S <= 10 and compiling.EVERY_S <= 10


SCRIPT = """
import sys
import jaxpipe
from jaxpipe.errors import AgreedError, ProgramError, StageError
from tests.train import test_python_door as door

processes = jaxpipe.join(2, "cpu")
if sys.argv[1] == "fails":
    if processes.mine:
        raise ValueError("no data here")
    processes.barrier("which process 1 never reaches")
mine = processes.mine
for what, change in {
    "seed": {"seed": mine},
    "update": {"optimizer": door.optax.sgd(0.1 + mine)},
    "zero1": {"zero1": bool(mine)},
    "reduction": {"reduction": ("ordered", "fast")[mine]},
    "columns=2": {"columns": 1 + mine, "dp": 2, "microbatch_size": 2},
    "whole arrays of a rank": {"columns": 2, "dp": 2, "microbatch_size": 2, "schedule": door.with_instruction()},
}.items():
    try:
        door.small_trainer(processes=processes, **change)
    except (AgreedError, StageError) as error:
        assert what in str(error), error
    else:
        raise AssertionError(what)
trainer = door.small_trainer(processes=processes)
state = trainer.init()
try:
    trainer.step(state, door.small_batch(mine))
except AgreedError as error:
    assert "the batch of step 1: targets=" in str(error)
for step in range(2):
    state, metrics = trainer.step(state, door.small_batch(step), record=step == 1)
assert trainer.timeline.num_ranks == 2
trainer.save(state, sys.argv[1])
try:
    trainer.params(state)
except ProgramError as error:
    assert "params reads all 2 ranks" in str(error)
logits = trainer.predict(state, {"tokens": door.small_batch(9)["tokens"]})
print(float(metrics.loss).hex(), trainer.evaluate(state, door.small_batch(9))["loss"].hex(), logits.tobytes().hex())
trainer = door.small_trainer(processes=processes, **door.SPREAD)
trainer.save(trainer.step(trainer.init(), door.small_batch(0))[0], sys.argv[1] + "/spread")
state, metrics = trainer.step(trainer.restore(sys.argv[1] + "/spread"), door.small_batch(1))
both_ways = door.small_trainer(processes=processes, schedule="chimera")
print(float(metrics.loss).hex(), both_ways.train_step.memory_report().ranks[0].rank)
"""
BY_LEAF = optax.multi_transform(
    {"words": optax.adam(0.1), "others": optax.trace(0.9)},
    lambda params: jax.tree_util.tree_map_with_path(lambda at, _: "words" if "tokens" in str(at) else "others", params),
)
SPREAD = {"vocabulary": "spread", "optimizer": BY_LEAF, "dtype": "bfloat16"}
"""Two ranks, each with half of the words, of which one part of the optimizer keeps nothing."""


def with_instruction() -> Schedule:
    """Return a schedule with an instruction that adds up what the first stage returns."""
    register_op(OpSpec("Seen", "compute", (Wait(("F",), "self"),), "seen_s"))
    register_instruction(
        "Seen",
        lambda stage, mesh: stage_function("Seen", stage, mesh, lambda y: y[0].sum(), reads=("y",), writes=("sum",)),
    )
    return insert(generate("1f1b", 2, 2), "Seen", after="F", stages=(0,))


def small_trainer(**options: Any) -> Trainer:
    sizes = {"ranks": 2, "microbatches": 2, "microbatch_size": 1}
    options = {"optimizer": optax.sgd(0.1), "devices": None, **sizes, **options}
    return Trainer(GPT(vocab_size=16, d_model=8, num_layers=1, num_heads=1, seq_len=4), **options)


def small_batch(seed: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 16, (2, 5)).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((2, 4), np.float32)}


def run_script(monkeypatch: pytest.MonkeyPatch, argument: str) -> list[tuple[int, str, str]]:
    """Run the script in two processes, as a launcher does. Return exit codes and output."""
    monkeypatch.setenv("JAXPIPE_COORDINATOR", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("JAXPIPE_PROCESSES", "2")
    children = []
    for process in range(2):
        monkeypatch.setenv("JAXPIPE_PROCESS", str(process))
        children.append(start_python(SCRIPT, argument))
    outputs = [child.communicate() for child in children]
    return [(child.returncode, *output) for child, output in zip(children, outputs, strict=True)]


def test_a_script_in_two_processes_has_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, logits, and checkpoints, with the vocabulary at the ends or divided over the ranks. What differs between processes
    is refused by both: a seed, an optimizer, columns, a batch; so is an instruction, which would see one column's rows."""
    first, second = run_script(monkeypatch, str(tmp_path))
    assert (first[0], second[0]) == (0, 0), (first, second)
    trainer = small_trainer()
    state = trainer.init()
    for step in range(2):
        state, metrics = trainer.step(state, small_batch(step))
    logits = trainer.predict(state, small_batch(9))
    bits = f"{float(metrics.loss).hex()} {trainer.evaluate(state, small_batch(9))['loss'].hex()} {logits.tobytes().hex()}\n"
    restored = trainer.params(trainer.restore(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, restored, trainer.params(state))
    trainer = small_trainer(**SPREAD)
    state, _ = trainer.step(trainer.init(), small_batch(0))
    restored = trainer.train_step.by_layer(trainer.restore(tmp_path / "spread"))
    jax.tree.map(np.testing.assert_array_equal, restored, trainer.train_step.by_layer(state))
    _, metrics = trainer.step(state, small_batch(1))
    for rank, (_, output, _) in enumerate((first, second)):
        assert output == f"{bits}{float(metrics.loss).hex()} {rank}\n"


def test_a_script_that_fails_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_script(monkeypatch, "fails")
    assert (first[0], second[0]) == (1, 1)
    assert "Traceback" not in first[2] and re.search(
        r"process 1 \(host \S+\) failed: ValueError: no data here", first[2]
    )
    assert "ValueError: no data here" in second[2]
