"""The README's Python examples run, its commands exist, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
GUIDE = ROOT / "jaxpipe" / "train" / "GUIDE.md"


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_python_examples_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), scope)
    if "other" in scope:
        assert scope["other"].schedule.name == "1f1b"


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its script is complete and shorter than 40 lines; what follows goes on from it."""
    text = GUIDE.read_text(encoding="utf-8").replace("range(6)", "range(2)").replace("ranks=4", "ranks=2")
    script, *others = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(script.splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "guide"}
    exec(compile(script.replace("< 100", "< 3"), str(GUIDE), "exec"), scope)
    exec(compile(script.replace("< 100", "< 4"), str(GUIDE), "exec"), scope)
    steps = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1", "2", "3", "4"], "the second run goes on where the first one stopped"
    for block in others:
        exec(compile(block, str(GUIDE), "exec"), scope)
    assert scope["scores"].shape == (32, 64, 256)
    assert {"loss", "accuracy", "spread"} <= scope["tuned"].evaluate(scope["state"], scope["batch"](2)).keys()


@pytest.mark.parametrize("page", [ROOT / "README.md", GUIDE], ids=lambda page: page.name)
def test_relative_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert links and not missing


def test_results_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import results_table

    shown = TEXT.partition(results_table.BEGIN)[2].partition(results_table.END)[0]
    assert shown.strip() == results_table.table()


def test_verbs_shown_exist() -> None:
    from jaxpipe.cli.registry import VERBS

    shown = set(re.findall(r"^jaxpipe (\w+)", TEXT, re.MULTILINE))
    assert shown == {verb.name for verb in VERBS}
