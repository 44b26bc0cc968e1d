"""The verbs ``train``, ``eval``, ``generate`` and ``profile``: results, and one clear line and exit code 2 for mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.cli import main
from jaxpipe.schedule import generate, read_costs, write_schedule
from jaxpipe.train import devices, evaluate
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.metrics import read_metrics
from tests.support.paths import ROOT
from tests.support.train_runs import contents, copy_run, settings, write_text

pytestmark = pytest.mark.usefixtures("one_build")

STEPS = 4


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verbs ask XLA for devices through the environment; it is put back."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def tiny(text: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Provide overrides of a run of 4 steps in ``tmp_path/run``."""

    def overrides(*extra: str) -> list[str]:
        base = ("run.steps=4", "run.eval_every=2", "run.checkpoint_every=2", "run.log_every=2")
        return settings(text, tmp_path / "run", *base, *extra)

    return overrides


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run a verb that must succeed; stdout and stderr."""

    def run(*argv: object) -> tuple[str, str]:
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out, err

    return run


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a verb that must fail in the one way allowed, with exit code 2 unless said; the message."""

    def run(*argv: object, code: int = 2) -> str:
        assert main([str(a) for a in argv]) == code
        err = capsys.readouterr().err
        assert err.startswith("jaxpipe: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert "Traceback" not in err
        return err.removeprefix("jaxpipe: ").strip()

    return run


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a finished run of 4 steps, with checkpoints of steps 2 and 4. Read it, or copy it."""
    from jaxpipe.train.config import load_config
    from jaxpipe.train.loop import train

    out_dir = tmp_path_factory.mktemp("finished") / "run"
    base = ("run.steps=4", "run.eval_every=2", "run.checkpoint_every=2", "run.log_every=2")
    with Path(os.devnull).open("w") as nowhere:
        train(load_config(None, settings(text, out_dir, *base)), nowhere)
    return out_dir


# -- results ------------------------------------------------------------------------------------------------------------


def test_train_prints_progress_and_a_summary(
    cli: Callable[..., Any], tiny: Callable[..., list[str]], tmp_path: Path
) -> None:
    out, err = cli("train", *tiny())
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("on a CPU: malloc ")
    assert lines[1].startswith("weight decay 0.1 acts on ")
    assert "tokens; " in lines[2]  # the data
    assert [line.split()[1] for line in lines if line.startswith("step ") and "/4" in line] == ["2/4", "4/4"]
    assert lines[-3].startswith("done at step 4: loss ")
    assert lines[-2].startswith("bubble ")
    assert lines[-1] == f"checkpoints, metrics.jsonl and pictures are in {tmp_path / 'run'}"
    second_output, err = cli("train", *tiny())
    assert (second_output.splitlines()[0].split(":")[0], err) == ("nothing to do", "")


def test_train_json_is_one_object(cli: Callable[..., Any], tiny: Callable[..., list[str]], tmp_path: Path) -> None:
    out, err = cli("train", "--json", *tiny())
    assert out.count("\n") == 1
    result = json.loads(out, parse_constant=pytest.fail)
    assert list(result) == [
        "out_dir", "step", "steps_run", "stopped", "loss", "eval_loss", "tokens_per_s", "bubble_predicted", "bubble_measured",
        "replay_ratio", "peak_bytes", "skipped_steps", "seconds", "schedule", "gain_predicted", "gain_measured",
        "mfu", "peers_mfu", "peak_measured_bytes", "rollbacks", "empty_steps",
    ]  # fmt: skip
    assert result["out_dir"] == str(tmp_path / "run")
    assert (result["step"], result["steps_run"], result["stopped"], result["skipped_steps"]) == (4, 4, False, 0)
    assert result["loss"] == [r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r][-1]
    assert all(result[k] > 0 for k in ("eval_loss", "tokens_per_s", "replay_ratio", "peak_bytes", "seconds"))
    assert all(0 < result[k] < 1 for k in ("bubble_predicted", "bubble_measured"))
    assert "step 4/4" in err
    out, err = cli("train", *tiny(), "--json")  # flags may follow overrides
    result = json.loads(out, parse_constant=pytest.fail)  # bubble_measured is not a number
    assert (result["step"], result["steps_run"], result["bubble_measured"]) == (4, 0, None)
    assert err.startswith("nothing to do")


def test_train_from_a_file_with_overrides(
    cli: Callable[..., Any], tiny: Callable[..., list[str]], finished: Path, tmp_path: Path
) -> None:
    where = f"run.out_dir={tmp_path / 'new'}"
    sizes = ("--dp", "auto", "pipeline.microbatches=2")  # 2 ranks of the 8 devices of tests
    out, err = cli(
        "train", "--config", finished / "config.toml", where, "run.steps=2", "--json", "optimizer.lr=1e-3", *sizes
    )
    assert json.loads(out)["step"] == 2
    assert err.startswith("--dp auto: 8 devices make dp 4, with 2 microbatches\n")
    printed, _ = cli("train", "--config", tmp_path / "new" / "config.toml", "--print-config")
    rows = [line.split() for line in printed.splitlines()]
    assert ["*", "warmup_steps", "2"] in rows
    assert ["lr", "0.001"] in rows  # the default again, so not marked
    assert any(row[-2:] == ["out_dir", str(tmp_path / "new")] for row in rows)


def test_print_config_trains_nothing(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = cli("train", "--print-config", "run.steps=7", "optimizer.warmup_steps=3")
    assert (re.search(r"\bsteps +7\n", out) is not None, err) == (True, "")
    # Until devices are counted, dp is what the settings say, made a multiple of ep.
    out, _ = cli("train", "--print-config", "--dp", "auto", "--ep", "2")
    assert {("*", "dp", "2"), ("*", "ep", "2")} <= {tuple(line.split()) for line in out.splitlines()}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["train", "eval", "generate", "profile"])
def test_help_imports_no_jax(verb: str) -> None:
    code = f"import sys; from jaxpipe.cli import main; main(['{verb}', '--help']); sys.exit(3 if 'jax' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: jaxpipe {verb} ")


def test_eval(cli: Callable[..., Any], finished: Path) -> None:
    out, _ = cli("eval", finished, "--baselines", "--batch", 4)
    lines = out.splitlines()
    assert lines[0].startswith("step 4, one device, ")
    assert [line.split()[0] for line in lines[2:]] == ["unigram", "bigram", "model"]
    out, err = cli("eval", finished, "--json", "--step", "best", "--batch", 4)
    best = json.loads(out)
    assert (out.count("\n"), err) == (1, "")
    assert best["step"] == 4
    assert best["model"]["bits_per_byte"] == pytest.approx(best["model"]["loss"] / np.log(2), rel=1e-6)
    assert f"{best['model']['loss']:.4f}" in lines[-1]
    of_step = json.loads(cli("eval", finished, "--json", "--step", 2, "--batch", 4)[0])
    of_folder = json.loads(cli("eval", finished / "checkpoints" / "00000002", "--json", "--batch", 4)[0])
    assert of_step == of_folder
    assert of_step["model"]["loss"] > best["model"]["loss"]
    few = json.loads(cli("eval", finished / "checkpoints", "--json", "--batch", 4, "--batches", 1)[0])
    assert few["model"]["loss"] != best["model"]["loss"]


def test_generate(cli: Callable[..., Any], finished: Path) -> None:
    def sample(*flags: object) -> str:
        out, err = cli("generate", finished, "--prompt", "the cat", "--tokens", 12, *flags)
        assert err == ""
        assert out.startswith("the cat")
        assert out.endswith("\n")
        return str(out)

    greedy = sample("--temperature", 0)
    assert greedy == sample("--temperature", 0, "--seed", 3) == sample("--top-k", 1, "--seed", 4)
    assert sample("--seed", 1) == sample("--seed", 1)
    assert sample("--seed", 1) != sample("--seed", 2)
    assert cli("generate", finished, "--prompt", "", "--tokens", 3, "--temperature", 0)[0]


def test_profile(cli: Callable[..., Any], tiny: Callable[..., list[str]], tmp_path: Path) -> None:
    out, err = cli("profile", *tiny(), "--json", "--repeats", 1, "-o", tmp_path / "costs.json")
    assert json.loads(out)
    assert "timing" in err
    costs = read_costs(tmp_path / "costs.json")
    assert costs.num_stages == 2
    assert min(costs.f_s + costs.b_s + costs.w_s) > 0
    assert not (tmp_path / "run").exists()
    out, _ = cli("schedule", "zb-h1", "--ranks", 2, "--microbatches", 4, "--costs", tmp_path / "costs.json", "--json")
    assert json.loads(out)["makespan"] > 0


# -- mistakes: flags and settings -----------------------------------------------------------------------------------------

BAD_SETTINGS = {
    "unknown key": ("run.stepz=3", "did you mean"),
    "unknown section": ("runs.steps=3", "runs"),
    "a section is no key": ("run=3", "run is a section"),
    "wrong type": ("run.steps=ten", "run.steps"),
    "a fraction of a step": ("run.steps=1.5", "run.steps"),
    "no value": ("run.steps", "write it as section.key=value"),
    "indivisible batch": ("run.batch=9", "run.batch=8 or 12"),
    "more stages than layers": ("pipeline.ranks=6", "6"),
    "more ranks than devices": ("pipeline.ranks=64", "64"),
    "absurd ranks": ("pipeline.ranks=100000", "100000"),
    "more devices than there are": ("pipeline.tp=8", "16 devices are needed and JAX sees 8 (cpu); ways to use these"),
    "unknown schedule": ("pipeline.schedule=1f1c", "did you mean '1f1b'"),
    "chunks where there are none": ("pipeline.chunks=2", "pipeline.chunks"),
    "limit where there is none": ("pipeline.memory_limit=2", "memory_limit"),
    "unknown policy": ("pipeline.recompute=some", "pipeline.recompute"),
    "too few policies": ("pipeline.recompute=full,cheap,none", "pipeline.recompute lists 3 policies"),
    "too many cuts": ("pipeline.cut=1,2", "pipeline.cut"),
    "no kind of cut": ("pipeline.cut=analytical", "'analytic'"),
    "cut at no layer": ("pipeline.cut=[9]", "9"),
    "cut at an unknown name": ('pipeline.cut=["blok_01"]', "blok_01"),
    "unknown dtype": ("run.dtype=float16", "run.dtype"),
    "negative rate": ("optimizer.lr=-1", "optimizer.lr"),
    "rate not a number": ("optimizer.lr=nan", "optimizer.lr"),
    "beta of one": ("optimizer.betas=0.9,1.0", "betas[1]"),
    "beta of one in float32": ("optimizer.betas=0.9,0.99999999", "betas[1]"),
    "infinite in float32": ("optimizer.eps=1e308", "optimizer.eps is 1e+308, which float32 does not hold"),
    "nothing in float32": ("optimizer.clip_norm=1e-308", "optimizer.clip_norm is 1e-308, which float32 does not hold"),
    "nothing held out": ("data.holdout=0", "leaves nothing for run.eval_every"),
    "no such platform": ("run.platform=gpu", "no GPU"),
    "no such module": ("model.target=models.gtp:GPT", "models.gtp"),
    "no such model": ("model.target=models.gpt:GTP", "GTP"),
    "not a name": ("model.target=models/gpt.py", "module:function"),
    "unknown model option": ("model.options.d_modell=16", "d_model"),
    "model option of wrong type": ("model.options.d_model=wide", "d_model"),
    "heads do not divide": ("model.options.num_heads=3", "num_heads"),
    "no layers": ("model.options.num_layers=0", "num_layers"),
    "vocabulary too small": ("model.options.vocab_size=100", "vocab_size=100"),
    "sequence length of the model": ("model.options.seq_len=4", "seq_len"),
    "unknown tokenizer": ("data.tokenizer=bytes", "tokenizer"),
    "missing tokenizer file": ("data.tokenizer=none/tokenizer.json", "none/tokenizer.json"),
    "missing data": ("data.path=no/such/file.txt", "no/such/file.txt"),
    "too little data for the sequence": (
        "data.seq_len=100000",
        "fewer than one batch of 8: use more text or data.seq_len=",
    ),
    "batch larger than an epoch": ("run.batch=40000", "fewer than one batch"),
    "missing schedule file": ("pipeline.schedule=none.sched", "none.sched"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(
    fails: Callable[..., str],
    tiny: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    override, expected = BAD_SETTINGS[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    message = fails("train", *tiny(override))
    assert expected in message
    assert list(tmp_path.iterdir()) == []


BAD_FLAGS = {
    "misspelt flag": ("train --jsn", "'--json'"),
    "config without a name": ("train --config", "--config"),
    "config missing": ("train --config none.toml", "none.toml: no such config file"),
    "config of another kind": ("train --config settings.yaml", ".toml or .json"),
    "no run": ("eval", "RUN"),
    "step is no number": ("eval nowhere --step last", "'last' is no step"),
    "negative step": ("eval nowhere --step -1", "-1"),
    "no batch": ("eval nowhere --batch 0", "1 to"),
    "no batches": ("eval nowhere --batches -3", "1 to"),
    "no tokens": ("generate nowhere --tokens 0", "1 to"),
    "negative tokens": ("generate nowhere --tokens -5", "1 to"),
    "negative temperature": ("generate nowhere --temperature -1", "temperature"),
    "temperature not a number": ("generate nowhere --temperature warm", "temperature"),
    "infinite temperature": ("generate nowhere --temperature inf", "temperature"),
    "top-k of none": ("generate nowhere --top-k -2", "want 0 to"),
    "negative seed": ("generate nowhere --seed -2", "-2 as a seed can't be"),
    "huge seed": ("generate nowhere --seed 99999999999999999999", "can't be"),
    "two runs": ("generate nowhere elsewhere", "elsewhere"),
    "no repeats": ("profile --repeats 0", "1 to"),
    "no tensor-parallel devices": ("train --tp 0", "tensor-parallel devices of each rank can't be; want 1 to"),
    "ranks said twice": ("train --pp 2 pipeline.ranks=4", "--pp 2 and 'pipeline.ranks=4' contradict each other"),
    "a batch that dp does not divide": ("profile --dp 3", "× pipeline.dp=3: use run.batch=24 or 48, or pipeline.dp="),
    "devices that dp does not divide": (
        "train --dp auto --pp 3",
        "dp 2.66667 for 3 ranks × 1 devices, and run.batch=32 in 8 "
        "microbatches does not divide so: use 6 (dp 2) or 12 (dp 4) devices",
    ),
    "nothing to fill": ("profile --dp auto", "'auto' is not a whole number"),
    "costs of another kind": ("profile -o costs.csv", ".json"),
    "costs into nowhere": ("profile -o none/costs.json", "no directory 'none'"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    line, expected = BAD_FLAGS[case]
    assert expected in fails(*line.split())
    assert list(tmp_path.iterdir()) == []


# -- mistakes: files ----------------------------------------------------------------------------------------------------

BAD_CONFIGS = {
    "not TOML": (b"[run\nsteps = 3", "not valid TOML"),
    "not text": (b"\xff\xfe\x00", "not UTF-8"),
    "twice": (b"[run]\nsteps = 3\nsteps = 4\n", "not valid TOML"),
    "unknown section": (b"[training]\nsteps = 3\n", "training"),
    "key outside a section": (b"steps = 3\n", "steps"),
    "wrong type": (b'[run]\nsteps = "3"\n', "run.steps"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_files(fails: Callable[..., str], tmp_path: Path, case: str) -> None:
    content, expected = BAD_CONFIGS[case]
    (tmp_path / "bad.toml").write_bytes(content)
    for verb in ("train", "profile"):
        message = fails(verb, "--config", tmp_path / "bad.toml", f"run.out_dir={tmp_path / 'run'}")
        assert expected in message
        assert "bad.toml" in message
    assert list(contents(tmp_path)) == ["bad.toml"]


def _array(array: np.ndarray) -> Callable[[Path], object]:
    return lambda path: np.save(path, array)


IDS = np.arange(4000, dtype=np.int64) % 256
BAD_DATA: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "empty": ("a.txt", lambda path: path.write_bytes(b""), "empty"),
    "binary": ("a.txt", lambda path: path.write_bytes(b"abc\0def" * 1000), "binary"),
    "too short": ("a.txt", lambda path: path.write_text("a few words"), "fewer than one batch of 8: use more text"),
    "a directory of nothing": ("folder", lambda path: path.mkdir(), "folder"),
    "id above the vocabulary": ("a.npy", _array(np.where(np.arange(4000) == 77, 300, IDS)), "id 300 at position 77"),
    "negative id": ("a.npy", _array(np.where(np.arange(4000) == 5, -1, IDS)), "id -1 at position 5"),
    "two dimensions": ("a.npy", _array(IDS.reshape(40, 100)), "40x100"),
    "floats": ("a.npy", _array(IDS.astype(np.float32)), "float32"),
    "truncated array": ("a.npy", lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), "not a readable"),
    "not an archive": ("a.npz", lambda path: path.write_bytes(b"PK nothing"), "not a readable"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(fails: Callable[..., str], tiny: Callable[..., list[str]], tmp_path: Path, case: str) -> None:
    name, make, expected = BAD_DATA[case]
    make(tmp_path / name)
    before = contents(tmp_path)
    message = fails("train", *tiny(f"data.path={tmp_path / name}"))
    assert expected in message
    assert name in message
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ranks", "microbatches", "expected"), [(4, 4, "pipeline.ranks is 2"), (2, 8, "pipeline.microbatches is 4")]
)
def test_schedule_files_that_do_not_match(
    fails: Callable[..., str],
    tiny: Callable[..., list[str]],
    tmp_path: Path,
    ranks: int,
    microbatches: int,
    expected: str,
) -> None:
    path = tmp_path / "other.sched"
    write_schedule(generate("1f1b", ranks, microbatches), path)
    assert expected in fails("train", *tiny(f"pipeline.schedule={path}"))
    path.write_text("# jaxpipe schedule 1\nrank 0: F0.0junk\n", encoding="utf-8")
    assert "other.sched" in fails("train", *tiny(f"pipeline.schedule={path}"))
    path.write_text(str(generate("1f1b", 2, 4)).replace("BW1.3", ""), encoding="utf-8")
    assert f"{path}: B of stage 1, microbatch 3" in fails("train", *tiny(f"pipeline.schedule={path}"))
    assert list(contents(tmp_path)) == ["other.sched"]


def test_out_dir_in_the_way(fails: Callable[..., str], tiny: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious", encoding="utf-8")
    for out_dir in ("file", "file/run"):
        assert "is a file; choose another directory" in fails("train", *tiny(f"run.out_dir={tmp_path / out_dir}"))
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_out_dir_without_permission(fails: Callable[..., str], tiny: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "no permission" in fails("train", *tiny(f"run.out_dir={tmp_path / 'locked' / 'run'}"))


def test_no_tensorboard(
    fails: Callable[..., str], tiny: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert "pip install tensorboardX" in fails("train", *tiny("run.tensorboard=true"))
    assert contents(tmp_path) == {}


# -- mistakes: checkpoints --------------------------------------------------------------------------------------------------

UNUSABLE = 3


def test_no_checkpoint_at_all(
    fails: Callable[..., str], tiny: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    assert "no checkpoint to resume from" in fails("train", *tiny("run.resume=must"), code=UNUSABLE)
    for verb in ("eval", "generate"):
        assert "nowhere" in fails(verb, "nowhere", code=UNUSABLE)
    assert list(tmp_path.iterdir()) == []


def _largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _truncate(run: Path) -> None:
    file = _largest(run / "checkpoints" / "00000004" / "params")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(run: Path) -> None:
    file = _largest(run / "checkpoints" / "00000004" / "params")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def _lose(run: Path) -> None:
    _largest(run / "checkpoints" / "00000004" / "params").unlink()


def _cut_manifest(run: Path) -> None:
    file = run / "checkpoints" / "00000004" / "checkpoint.json"
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize("damage", [_truncate, _flip, _lose, _cut_manifest])
def test_damaged_checkpoints(
    fails: Callable[..., str], finished: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Reading one says which is intact; nothing is repaired or deleted behind the user's back."""
    run = copy_run(finished, tmp_path / "run")
    damage(run)
    before = contents(run)
    for verb in ("eval", "generate"):
        message = fails(verb, run, code=UNUSABLE)
        assert "00000004" in message
        assert "step 2 is intact" in message
    assert contents(run) == before


def test_training_refuses_when_nothing_is_intact(
    fails: Callable[..., str], tiny: Callable[..., list[str]], finished: Path, tmp_path: Path
) -> None:
    run = copy_run(finished, tmp_path / "run")
    for manifest in run.rglob("checkpoint.json"):
        manifest.write_text("{}", encoding="utf-8")
    before = contents(run)
    assert "no checkpoint is intact" in fails("train", *tiny("run.steps=6"), code=UNUSABLE)
    assert contents(run) == before


def test_training_refuses_metrics_of_something_else(
    fails: Callable[..., str], tiny: Callable[..., list[str]], finished: Path, tmp_path: Path
) -> None:
    run = copy_run(finished, tmp_path / "run")
    (run / "metrics.jsonl").write_text("{}\nstep,loss\n", encoding="utf-8")
    before = contents(run)
    assert "line 1 is not a record of a step" in fails("train", *tiny("run.steps=6"))
    assert contents(run) == before


def test_checkpoints_of_something_else(
    fails: Callable[..., str], tiny: Callable[..., list[str]], finished: Path, tmp_path: Path
) -> None:
    with CheckpointStore(tmp_path / "run" / "checkpoints") as store:
        store.save(2, {"a": np.zeros(3, np.float32)}, {}, {"by": "hand"})
    before = contents(tmp_path)
    for argv in (["eval", tmp_path / "run"], ["generate", tmp_path / "run"], ["train", *tiny()]):
        assert "not written by jaxpipe" in fails(*argv, code=UNUSABLE)
    for argv in (["eval", finished, "--step", "3"], ["generate", finished, "--step", "99"]):
        assert "it has those of steps 2, 4" in fails(*argv, code=UNUSABLE)
    (tmp_path / "empty").mkdir()
    assert "no checkpoint in" in fails("eval", tmp_path / "empty", code=UNUSABLE)
    assert "Not a directory" in fails("eval", finished / "config.toml", code=UNUSABLE)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.options.d_model=32", "model.options.d_model is 32, was 16"),
        ("model.options.num_heads=4", "model.options.num_heads is 4, was 2"),
        ("model.target=models.llama:Llama", "models.llama:Llama"),
        ("data.seed=3", "data.seed=3 where the checkpoint has 0"),
        ("data.seq_len=4", "data.seq_len=4 where the checkpoint has 8"),
        ("run.resume=never", "run.resume=never would overwrite"),
    ],
)
def test_runs_that_do_not_fit_their_directory(
    fails: Callable[..., str], tiny: Callable[..., list[str]], finished: Path, override: str, expected: str
) -> None:
    before = contents(finished)
    options = ["model.options={d_model=16,num_layers=2,num_heads=2}"] if "Llama" in override else []
    code = 2 if override.startswith("data.") else UNUSABLE
    message = fails("train", *tiny(f"run.out_dir={finished}", "run.steps=6", override, *options), code=code)
    assert expected in message
    assert contents(finished) == before


def test_a_model_that_can_not_be_made_here(fails: Callable[..., str], text: Path, tmp_path: Path) -> None:
    """A checkpoint names its model; the module may be missing where it is read."""
    from jaxpipe.train.config import load_config

    config = load_config(None, settings(text, tmp_path / "run", "model.target=models.big:Big")).to_dict()
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, {"a": np.zeros(3, np.float32)}, {}, {"config": config})
    assert "models.big:Big, code outside of the package models" in fails("eval", tmp_path)
    assert "no module 'no_such_models'" in fails("generate", tmp_path, "--model", "no_such_models:Big")


def test_eval_after_the_data_are_gone(
    fails: Callable[..., str], cli: Callable[..., Any], tiny: Callable[..., list[str]], tmp_path: Path
) -> None:
    data_path = write_text(tmp_path / "own.txt")
    cli("train", *tiny(f"data.path={data_path}", "run.steps=2"))
    data_path.unlink()
    assert "own.txt" in fails("eval", tmp_path / "run")
    assert cli("generate", tmp_path / "run", "--tokens", 2)[0]


def test_ids_have_no_text(
    fails: Callable[..., str], cli: Callable[..., Any], tiny: Callable[..., list[str]], tmp_path: Path
) -> None:
    np.save(tmp_path / "ids.npy", (np.arange(6000) * 7 % 40).astype(np.uint8))
    cli("train", *tiny(f"data.path={tmp_path / 'ids.npy'}", "data.tokenizer=ids:256", "run.steps=2"))
    assert "ids:256" in fails("generate", tmp_path / "run", "--prompt", "some text")
    scores = json.loads(cli("eval", tmp_path / "run", "--json")[0])
    assert scores["model"]["bits_per_byte"] is None


def test_top_k_above_the_vocabulary(fails: Callable[..., str], finished: Path) -> None:
    assert "top_k from 0 to 256" in fails("generate", finished, "--top-k", 257)


def test_a_part_of_the_memory_is_that_of_the_run_for_all_verbs_that_start_jax(
    tiny: Callable[..., list[str]],
    cli: Callable[..., tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On devices of 80 GiB, which give JAX what the environment says: the run's part, unless it says another one."""
    name = "XLA_CLIENT_MEM_FRACTION"
    monkeypatch.setenv(name, "")

    def limit_bytes(device: Any) -> int:
        return int(float(os.environ[name] or 0.75) * (80 << 30))

    def build_model(*args: Any) -> Any:
        assert os.environ[name], "JAX may look for devices here"
        return model_of(*args)

    model_of = evaluate.build_model
    monkeypatch.setattr(evaluate, "build_model", build_model)
    for module in (devices, evaluate):
        monkeypatch.setattr(module, "limit_bytes", limit_bytes)
    overrides = tiny("run.memory_fraction=0.9", "run.steps=2")
    line = "JAX may fill 72 GiB of a device (run.memory_fraction)"
    assert line in cli("train", *overrides)[0]
    run = tmp_path / "run"
    verbs = {
        "eval": ("--batches", 1),
        "generate": ("--tokens", 1),
        "rehearse": ("--rank", 0, "--steps", 1, "--no-host-link"),
    }
    empty = tmp_path / "empty.toml"
    empty.touch()
    for verb, flags in verbs.items():
        monkeypatch.setenv(name, "")
        of = (empty, *overrides) if verb == "rehearse" else (run,)
        assert line in "".join(cli(verb, *of, *flags)), verb
        assert os.environ[name] == "0.9"
    monkeypatch.setenv(name, "0.5")
    assert "JAX may fill 40 GiB of a device" in cli("eval", run, "--batches", 1)[1]

    def fails(*_: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes")

    monkeypatch.setattr(evaluate, "load_group", fails)
    assert main(["eval", str(run)]) != 0
    assert re.search("loading: .*out of memory.*: use more --devices, a smaller --batch", capsys.readouterr().err)
