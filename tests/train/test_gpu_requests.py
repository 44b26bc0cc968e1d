"""A run asks this of GPUs before JAX looks for them: a part of their memory, which plan, the check before a run and the line
after memory ran out know too; the same bits at each start; and what several processes need."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxpipe.cli import main
from jaxpipe.cost.memory import MemoryReport, RankMemory
from jaxpipe.errors import ConfigError
from jaxpipe.planning.targets import TARGETS
from jaxpipe.train import devices
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.settings.sections import RunConfig

NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def _silent_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NEW, OLD, "XLA_FLAGS", "JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def card(limit: int | None) -> Any:
    stats = None if limit is None else {"bytes_limit": limit, "peak_bytes_in_use": 0}
    return SimpleNamespace(memory_stats=lambda: stats)


def report(*peaks: int) -> MemoryReport:
    held = [(k, peak, {"residuals": peak}) for k, peak in enumerate(peaks)]
    return MemoryReport(tuple(RankMemory(k, peak, "F0.0", kinds, kinds, peak, 0) for k, peak, kinds in held))


def test_the_environment_comes_first_then_the_setting_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.memory_fraction() == 0.75
    assert devices.memory_fraction(0.9) == 0.9
    monkeypatch.setenv(OLD, "0.5")
    assert devices.memory_fraction() == devices.memory_fraction(0.5) == 0.5
    monkeypatch.setenv(NEW, ".6")
    assert devices.memory_fraction() == 0.6


def run(*overrides: str) -> RunConfig:
    return TrainConfig().override([*overrides]).run


def test_a_setting_reaches_jax_where_the_environment_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.request_gpus(run())
    assert not os.environ[NEW]
    devices.request_gpus(run("run.memory_fraction=0.875"))
    assert os.environ[NEW] == "0.875"
    monkeypatch.setenv(NEW, "")
    monkeypatch.setenv(OLD, "0.875")
    devices.request_gpus(run("run.memory_fraction=0.875"))
    assert not os.environ[NEW], "JAX refuses both"


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (NEW, "0.5", "run.memory_fraction=0.9, but the environment says XLA_CLIENT_MEM_FRACTION=0.5: set only one"),
        (
            OLD,
            "0.5",
            "run.memory_fraction=0.9, but the environment says XLA_PYTHON_CLIENT_MEM_FRACTION=0.5: set only one",
        ),
        (NEW, "half", "XLA_CLIENT_MEM_FRACTION='half': want a part of a GPU's memory, above 0 and at most 1"),
        (NEW, "1.5", "XLA_CLIENT_MEM_FRACTION='1.5': want a part of a GPU's memory, above 0 and at most 1"),
    ],
)
def test_what_contradicts_or_is_no_part_is_refused(
    name: str, value: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        devices.request_gpus(run("run.memory_fraction=0.9"))
    assert str(caught.value) == line


@pytest.mark.parametrize("value", ["0", "-0.5", "1.01", "nan"])
def test_settings_outside_of_0_to_1_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="memory_fraction"):
        TrainConfig().override([f"run.memory_fraction={value}"])


def test_a_run_that_would_pass_the_limit_says_so() -> None:
    gib = 1 << 30
    line = devices.limit_remark(lambda: report(4 * gib, 7 * gib), [card(5 * gib), card(5 * gib)])
    assert line.startswith(
        "warning: rank 1 is predicted to need 7 GiB and workspace, and JAX may fill 5 GiB of its device: use "
    )
    assert "\n" not in line
    assert not devices.limit_remark(lambda: report(4 * gib, 5 * gib), [card(5 * gib), card(5 * gib)])
    assert not devices.limit_remark(lambda: report(4 * gib, 7 * gib), [card(None), card(None)]), "CPUs tell none"


def test_the_line_after_memory_ran_out_tells_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("RESOURCE_EXHAUSTED: no room")
    assert "JAX may fill" not in devices.memory_advice(error, lambda: report(8 << 30))
    monkeypatch.setattr(jax, "local_devices", lambda: [card(5 << 30)])
    assert devices.memory_advice(error, lambda: report(8 << 30)).startswith(
        "; out of memory: activations and workspace take 8 GiB of 8 GiB predicted on rank 0, of 5 GiB that JAX may "
        "fill (run.memory_fraction): use "
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "fraction"),
    [
        ([], "", 0.75),
        (["run.memory_fraction=0.9"], "", 0.9),
        ([], "0.6", 0.6),
        (["run.memory_fraction=0.9", "--memory-fraction", "0.5"], "", 0.5),
    ],
)
def test_plan_counts_on_what_train_gets(
    arguments: list[str],
    environment: str,
    fraction: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(NEW, environment)
    assert (
        main(["plan", "model.options.num_layers=2", "--pp", "2", "--json", "--compile-seconds", "0", *arguments]) == 0
    )
    limit = json.loads(capsys.readouterr().out)["limit_bytes"]
    assert limit == pytest.approx(fraction * TARGETS["h100"].memory_bytes)


# Bits, and several processes.


def flags() -> list[str]:
    return os.environ["XLA_FLAGS"].split()


@pytest.fixture
def _no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "")
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")


@pytest.mark.usefixtures("_no_flags")
def test_a_deterministic_run_keeps_what_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run("run.deterministic=true", f"run.out_dir={tmp_path}")
    ordered = "--xla_gpu_deterministic_ops=true"
    load = f"--xla_gpu_load_autotune_results_from={tmp_path}/autotuning.txt"
    dump = f"--xla_gpu_dump_autotune_results_to={tmp_path}/autotuning.txt"
    devices.request_gpus(config)
    assert flags() == [ordered, dump]
    (tmp_path / "autotuning.txt").write_text("of process 0")
    monkeypatch.setenv("XLA_FLAGS", "")
    devices.request_gpus(config)
    assert flags() == [ordered, load, dump]
    own = tmp_path / "autotuning-1.txt"
    for text in ("of process 0", "of process 0 and more"):  # what it tunes beside that it adds to its own
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
        devices.request_gpus(config, processes=2, mine=1)
        assert flags() == [
            "--xla_gpu_deterministic_ops=false",
            "--xla_gpu_shard_autotuning=false",
            f"--xla_gpu_load_autotune_results_from={own}",
            f"--xla_gpu_dump_autotune_results_to={own}",
        ]
        assert own.read_text() == text
        own.write_text("of process 0 and more")


@pytest.mark.usefixtures("_no_flags")
def test_only_what_changes_numbers_is_compared(tmp_path: Path) -> None:
    """A resume tells the settings of :func:`number_settings` that differ: determinism, and not where a file lies."""
    before = devices.number_settings()
    devices.request_gpus(run(f"run.out_dir={tmp_path}"), processes=2)
    assert devices.number_settings() == before
    devices.request_gpus(run("run.deterministic=true", f"run.out_dir={tmp_path}"), processes=2)
    assert devices.number_settings() == before | {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}


@pytest.mark.usefixtures("_no_flags")
def test_a_cpu_gets_no_flags() -> None:
    devices.request_gpus(run("run.deterministic=true", "run.platform=cpu", "run.transport=nccl"), processes=2)
    assert flags() == []
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in os.environ


def test_a_folder_that_flags_can_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="without spaces"):
        devices.request_gpus(run("run.deterministic=true", "run.out_dir=my runs"))


@pytest.mark.usefixtures("_no_flags")
@pytest.mark.parametrize(
    ("transport", "processes", "value"), [("nccl", 2, "1"), ("nccl", 1, None), ("tagged", 2, None)]
)
def test_nccl_launches_in_the_order_of_the_host(transport: str, processes: int, value: str | None) -> None:
    devices.request_gpus(run(f"run.transport={transport}"), processes=processes)
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == value
    assert flags() == (["--xla_gpu_shard_autotuning=false"] if processes > 1 else [])


@pytest.mark.usefixtures("_no_flags")
def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_shard_autotuning=true")
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    devices.request_gpus(run("run.transport=nccl"), processes=2)
    assert (flags(), os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"]) == (["--xla_gpu_shard_autotuning=true"], "0")
