"""How the code reads to a stranger: names, first sentences of docstrings, comments, and one meaning for each class name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.test_size import code_lines, parsed

PARTICIPLES = frozenset(
    [
        "found",
        "made",
        "given",
        "known",
        "taken",
        "kept",
        "told",
        "wanted",
        "asked",
        "here",
        "there",
        "some",
        "every",
        "alone",
        "apart",
        "together",
        "have",
        "want",
        "said",
        "seen",
        "meant",
        "needed",
        "more",
        "others",
        "own",
        "whole",
    ]
)
"""Names of variables that say how the value came about, or nothing; a noun says what it holds."""
MOST_PARTICIPLES = 3.0
"""Variables and arguments with such a name, of 1,000 that are bound."""
FRAGMENT_WORDS = frozenset({"Of", "As", "By", "From", "In", "Where", "That", "With", "What"})
"""First words of a docstring that begins in the middle of a sentence."""
FOLDERS = ("jaxpipe", "models", "scripts", "tests")
LEAST_COMMENTS = 0.02
"""Lines of comments for each line of code in the package."""
LEAST_COMMENTS_WHERE_SUBTLE = 0.04
SUBTLE = (
    "search/solve",
    "search/blocks",
    "search/bounds",
    "stage/split",
    "stage/weave",
    "runtime/executor.py",
    "runtime/connections.py",
    "program/order.py",
    "train/update/layerwise.py",
)
"""Code whose invariants, order of steps or papers' lines can't be seen in it."""


@cache
def sources(folder: str) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py"))}


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable that is assigned and of each argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes, functions and of what is assigned above a string."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def comment_lines(source: str) -> int:
    """Return the number of lines that hold a comment alone."""
    strings: set[int] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and (node.end_lineno or 0) > node.lineno:
            strings.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return sum(1 for i, line in enumerate(source.splitlines(), 1) if line.strip().startswith("#") and i not in strings)


def share_of_comments(paths: dict[Path, str]) -> float:
    return sum(map(comment_lines, paths.values())) / sum(map(code_lines, paths.values()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_variables_are_nouns(folder: str) -> None:
    names = [
        (path.relative_to(ROOT).as_posix(), line, name)
        for path, source in sources(folder).items()
        for line, name in bound_names(parsed(source))
    ]
    participles = [place for place in names if place[-1] in PARTICIPLES]
    assert 1000 * len(participles) <= MOST_PARTICIPLES * len(names), participles


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_sentence(folder: str) -> None:
    fragments = [
        (path.relative_to(ROOT).as_posix(), line, text.split("\n")[0])
        for path, source in sources(folder).items()
        for line, text in docstrings(parsed(source))
        if text.split()[:1] and text.split()[0].strip(",.:;") in FRAGMENT_WORDS
    ]
    assert fragments == []


def test_comments_say_why() -> None:
    assert share_of_comments(sources("jaxpipe")) >= LEAST_COMMENTS


@pytest.mark.parametrize("room", SUBTLE)
def test_subtle_code_has_comments(room: str) -> None:
    place = ROOT / "jaxpipe" / room
    paths = {path: source for path, source in sources("jaxpipe").items() if place in (path, *path.parents)}
    assert paths, f"{room} has moved"
    assert share_of_comments(paths) >= LEAST_COMMENTS_WHERE_SUBTLE


def test_a_class_name_has_one_meaning() -> None:
    homes = defaultdict[str, list[str]](list)
    for path, source in sources("jaxpipe").items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_names_are_counted() -> None:
    source = "\n".join(
        (
            '"""Of a module."""',
            "def f(given, *, rows):",
            '    """In it."""',
            "    made = [row for row in rows]",
            "    # why",
            '    x = """',
            "# no comment",
            '"""',
        )
    )
    assert Counter(name for _, name in bound_names(ast.parse(source))) == Counter(["given", "rows", "made", "row", "x"])
    assert [text for _, text in docstrings(ast.parse(source))] == ["Of a module.", "In it."]
    assert comment_lines(source) == 1
