"""Processes of a run compare JAX's settings, the model's code, and the batches of steps that are recorded."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import AgreedError
from jaxpipe.runtime.processes import Processes
from jaxpipe.train import loop, trainer
from jaxpipe.train.checkpoints.which_model import model_digest
from jaxpipe.train.devices import number_settings
from jaxpipe.train.loop import train
from jaxpipe.train.run import agreement
from models.gpt import GPT
from tests.support.paths import ROOT
from tests.support.processes import free_port, run_in_threads
from tests.support.train_runs import config, write_text
from tests.support.train_runs import settings as overrides

OPTIONS = {"vocab_size": 11, "seq_len": 4, "d_model": 8, "num_layers": 1, "num_heads": 2}


def shared_error(check: Callable[[Processes], None]) -> str:
    """Return the one line that two processes end with; empty if neither does."""
    first, second = run_in_threads(2, check)
    if first is None:
        assert second is None
        return ""
    assert isinstance(first, AgreedError) and str(first) == str(second)
    return str(first)


class Pair(Processes):
    """Process 0 of two; the other one has ``theirs``."""

    number = 2

    def __init__(self, theirs: Mapping[str, str]) -> None:
        self.theirs = theirs

    def gather(self, name: str, value: Any) -> Any:
        return (value, self.theirs)


@settings(max_examples=30, deadline=None)
@given(
    arrays=st.dictionaries(st.sampled_from(["tokens", "targets", "weights"]), st.integers(0, 5), min_size=1),
    change=st.sampled_from(["nothing", "value", "dtype", "shape", "name"]),
)
def test_batches_are_compared_by_value(arrays: dict[str, int], change: str) -> None:
    batch = {name: np.full((2, 3), n, np.int32) for name, n in arrays.items()}
    name = sorted(batch)[-1]
    other_batch = dict(batch)
    other_batch[name] = {
        "nothing": lambda x: x.copy(),
        "value": lambda x: np.where(np.arange(6).reshape(2, 3) == 5, x + 1, x).astype(np.int32),
        "dtype": lambda x: x.astype(np.int64),
        "shape": lambda x: x.reshape(3, 2),
        "name": lambda x: x,
    }[change](batch[name])
    if change == "name":
        other_batch["more"] = other_batch.pop(name)

    def check(processes: Processes) -> None:
        agreement.agree_on_batch(processes, "the batch of step 7", other_batch if processes.mine else batch)

    message = shared_error(check)
    assert bool(message) is (change != "nothing")
    if message:
        assert message.startswith("process 1 ") and "the batch of step 7" in message and "data.target" in message


def test_models_are_compared_by_what_they_compute_and_learn() -> None:
    """A process that evaluates alike and trains otherwise has another digest, too."""
    digests = [model_digest(GPT(**OPTIONS, **options)) for options in ({}, {"gelu": "exact"}, {"dropout": 0.5}, {})]

    def against(other: Mapping[str, str]) -> str:
        def check(processes: Processes) -> None:
            agreement.agree_on_model(processes, "m:M", lambda: other if processes.mine else digests[0])

        return shared_error(check)

    assert against(digests[3]) == ""
    assert "process 1 " in against(digests[1]) and "m:M: digest of evaluation" in against(digests[1])
    assert "digest of training" in against(digests[2])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", "True"),
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", "False"),
        ("jax_default_matmul_precision", "highest"),
        ("jax_numpy_dtype_promotion", "strict"),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
        ("NVIDIA_TF32_OVERRIDE", "0"),
    ],
)
def test_jax_settings_that_change_numbers_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    settings = number_settings()
    assert settings.get(name) != value

    class Other(Pair):
        def gather(self, what: str, value_here: Any) -> Any:
            return (value_here, {**value_here, name: value}) if what == "JAX settings" else (value_here, value_here)

    pipe = config(tmp_path, tmp_path).pipeline
    with pytest.raises(AgreedError, match=f"process 1 has {name}={value}, process 0 has "):
        agreement.agree_on_devices(Other({}), pipe)
    monkeypatch.setenv("XLA_FLAGS", f"{settings['XLA_FLAGS']} --xla_force_host_platform_device_count=7 --xla_dump_to=x")
    assert number_settings() == settings  # neither changes a number


def test_a_run_compares_its_model_and_the_batches_of_recorded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(loop, "agree_on_model", lambda _, target, program: compared.append((target, program())))
    for module in (loop, trainer):
        monkeypatch.setattr(module, "agree_on_batch", lambda _, what, batch: compared.append((what, sorted(batch))))
    small = (
        "pipeline.ranks=1",
        "pipeline.microbatches=2",
        "model.options.num_layers=1",
        "run.steps=5",
        "run.log_every=2",
    )
    trained = config(write_text(tmp_path / "text.txt"), tmp_path / "run", *small, "run.checkpoint_every=0")
    train(trained, io.StringIO())
    (target, program), *batches = compared
    assert target == trained.model.target and program["jax"] == jax.__version__
    names = ["segments", "targets", "tokens", "weights"]
    names = [name for name in names if name in batches[1][1]]
    steps = [f"the batch of step {step}" for step in (1, 2, 4)]
    assert batches == [(what, names) for what in ("the held-out batches", *steps)]


MODEL = """
from dataclasses import replace
from jaxpipe.models.gpt import GPT as inner
def M(**options):
    model = inner(**options)
    layer = model.layers[1]
    other = replace(layer, apply=lambda p, x, c, apply=layer.apply: apply(p, x, c) * {factor})
    return replace(model, layers=(model.layers[0], other, *model.layers[2:]))
"""
DATA = """
import numpy as np
def batches(batch, seq_len, vocab_size):
    rng = np.random.default_rng()
    while True:
        start = rng.integers(0, vocab_size, (batch, 1))
        row = (start + np.arange(seq_len + 1) * 7) % vocab_size
        yield {"tokens": row[:, :-1], "targets": row[:, 1:], "weights": np.ones((batch, seq_len), np.float32)}
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("model.target=mine:M", "digest of "),
        ("data.target=mine:batches", "the batch of step 1: "),
        ("", "jax_enable_x64"),
    ],
)
def test_two_processes_that_differ_are_refused(tmp_path: Path, what: str, words: str) -> None:
    port, text = free_port(), write_text(tmp_path / "text.txt")
    small = overrides(
        text, tmp_path / "run", "run.steps=6", "run.eval_every=0", "run.platform=cpu", *([what] if what else [])
    )
    children = []
    for process in range(2):
        folder = tmp_path / f"process{process}"
        folder.mkdir()
        (folder / "mine.py").write_text(MODEL.format(factor=1.0 - 4 * process) + DATA)
        small_data = [x for x in small if not (x.startswith("data.path") and "data.target" in what)]
        environ = {"PYTHONPATH": f"{folder}:{ROOT}", "XLA_FLAGS": "", "PATH": "", "HOME": str(tmp_path)}
        environ |= {"JAX_ENABLE_X64": "1"} if process and not what else {}
        join = ("--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process", str(process))
        command = [sys.executable, "-m", "jaxpipe", "train", *small_data, *join]
        children.append(
            subprocess.Popen(
                command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    exits = [(*child.communicate(), child.returncode) for child in children]
    assert [code for *_, code in exits] == [2, 2], exits
    (line,) = {err for _, err, _ in exits}
    assert line.startswith("jaxpipe: process 1 ") and words in line and line.count("\n") == 1
