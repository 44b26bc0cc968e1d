"""The README's Python examples run, its commands exist, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_python_examples_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), scope)
    if "grads" in scope:
        assert set(scope["grads"]) == {layer.name for layer in scope["model"].layers}


def test_relative_links_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
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
