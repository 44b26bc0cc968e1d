"""The README's Python examples run, its commands exist, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
GUIDE = ROOT / "jaxpipe" / "train" / "GUIDE.md"
PAGES = sorted([*(ROOT / "jaxpipe").rglob("*.md"), *(ROOT / "models").rglob("*.md"), *(ROOT / "scripts").rglob("*.md")])


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_python_examples_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), scope)
    if "other" in scope:
        assert scope["other"].schedule.name == "1f1b"


@pytest.mark.usefixtures("one_build")
def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its script is complete and shorter than 40 lines; what follows goes on from it. Here with a smaller model."""
    text = GUIDE.read_text(encoding="utf-8")
    for size, small in (("range(6)", "range(2)"), ("ranks=4", "ranks=2"), ("T, D = 64, 64", "T, D = 16, 16")):
        assert size in text
        text = text.replace(size, small)
    script, *blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(script.splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "guide"}
    exec(compile(script.replace("< 100", "< 3"), str(GUIDE), "exec"), scope)
    exec(compile(script.replace("< 100", "< 4"), str(GUIDE), "exec"), scope)
    steps = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1", "2", "3", "4"], "the second run goes on where the first one stopped"
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), scope)
    assert scope["scores"].shape == (32, 16, 256)
    assert {"loss", "accuracy", "spread"} <= scope["tuned"].evaluate(scope["state"], scope["batch"](2)).keys()


def test_the_number_of_families_is_that_of_the_registry() -> None:
    """Families are counted in a process of its own: other tests register some."""
    program = (
        "from jaxpipe.schedule.families.family import FAMILIES, VOCABULARY_FAMILIES as V; print(len(FAMILIES), len(V))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"(\d+) families, (\d+) vocabulary-parallel", TEXT) == [tuple(output.split())]


def test_it_is_two_pages_at_most() -> None:
    assert len(TEXT.splitlines()) <= 200
    assert len(TEXT.encode()) <= 10_000


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: "/".join(page.parts[-2:]))
def test_relative_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_results_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import results_table

    for page, parts in results_table.written().items():
        text = page.read_text(encoding="utf-8")
        for begin, end, content in parts:
            assert text.partition(begin)[2].partition(end)[0].strip() == content


def test_verbs_shown_exist() -> None:
    from jaxpipe.cli.registry import VERBS

    guide = (ROOT / "jaxpipe" / "cli" / "GUIDE.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^jaxpipe (\w+)", guide, re.MULTILINE)) == {verb.name for verb in VERBS}


TINY = (
    "model.options={ d_model = 16, num_layers = 4, num_heads = 2 } data.path=text.txt data.seq_len=8 run.batch=8 run.steps=2 "
    "run.eval_every=0 run.checkpoint_every=0 optimizer.warmup_steps=0"
)


@pytest.mark.parametrize(
    "verbs", [{"compare", "launch"}, pytest.param(None, marks=pytest.mark.soak)], ids=["some", "all"]
)
def test_commands_run(
    verbs: set[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands run in order, in one folder; training has a toy's size, and several processes are in test_divided."""
    from jaxpipe.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "text.txt").write_bytes(b"class A: pass\n" * 400)
    tiny = shlex.split(TINY.replace("={", "='{").replace("} ", "}' "))
    config = "".join(
        f"[{section}]\n{keys}\n"
        for section, keys in (
            ("model", 'target = "models.gpt:GPT"\noptions = { d_model = 16, num_layers = 8, num_heads = 4 }'),
            ("data", 'path = "text.txt"'),
            ("pipeline", "ranks = 4\nmicrobatches = 4"),
            ("run", "batch = 8"),
        )
    )
    (tmp_path / "run.toml").write_text(config, encoding="utf-8")
    commands = re.findall(r"^jaxpipe ([^#\n]+)", TEXT, re.MULTILINE)
    assert len(commands) == 10
    for command in commands:
        verb, *arguments = shlex.split(command)
        if verb == "train":
            arguments = [x for x in arguments if not x.startswith("run.steps")] + tiny
        if arguments[0] != "local" and (verbs is None or verb in verbs):
            assert main([verb, *arguments]) == 0, capsys.readouterr().err
    assert {"pareto.svg", "job.sbatch", "jobset.yaml"} <= {path.name for path in tmp_path.iterdir()}
