"""How large the two floors of the house and a file may be, and that no file imports itself through others.

Caps only fall, except where a feature is added on purpose.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.paths import ROOT

CAPS: Mapping[str, int] = {"core": 37_170, "search": 5_984}
"""Code lines of ``jaxpipe/search/``, which finds orders, and of everything else in ``jaxpipe/``, the core."""
MOST_IN_A_FILE = 500
"""Code lines of one file."""


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def code_lines(source: str) -> int:
    """Return the number of lines that are not blank, comment or docstring."""
    prose: set[int] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(1 for i, line in lines if line.strip() and i not in prose and not line.strip().startswith("#"))


@cache
def file_sizes() -> dict[str, int]:
    """Return code lines by the file's path below ``jaxpipe/``."""
    folder = ROOT / "jaxpipe"
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): code_lines(path.read_text(encoding="utf-8")) for path in paths}


def test_no_floor_outgrows_its_cap() -> None:
    lines = Counter[str]()
    for path, count in file_sizes().items():
        lines["search" if path.startswith("search/") else "core"] += count
    assert {floor: count for floor, count in lines.items() if count > CAPS[floor]} == {}


def test_no_file_is_too_long() -> None:
    assert {path: count for path, count in file_sizes().items() if count > MOST_IN_A_FILE} == {}


# Circles.


class Imports:
    """Who imports whom among modules given as name -> (source, whether it is a package's ``__init__``).

    An import inside a function or under ``TYPE_CHECKING`` counts like any other. ``from package import name`` is an import of
    the file that defines the name. So what an ``__init__`` imports only for type checkers or when it is asked for a name (under
    ``TYPE_CHECKING``, inside ``__getattr__``) makes names findable and is no import of its own; nor is that importing a module
    runs the ``__init__`` of the packages that hold it.
    """

    def __init__(self, sources: Mapping[str, tuple[str, bool]]) -> None:
        self.trees = {name: parsed(source) for name, (source, _) in sources.items()}
        self.packages = {name for name, (_, is_package) in sources.items() if is_package}
        self.given = {name: dict(self._from(self.trees[name])) for name in self.packages}
        self.graph = {name: set(self._imported(name)) - {name} for name in self.trees}

    @staticmethod
    def _from(tree: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield names that ``from`` imports bind: where from, and what they are called there."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module is not None, "relative imports are not read"
                yield from ((alias.asname or alias.name, (node.module, alias.name)) for alias in node.names)

    def _home(self, module: str, name: str) -> str:
        """Return the module that ``from module import name`` gets it from."""
        if f"{module}.{name}" in self.trees:
            return f"{module}.{name}"
        behind = self.given.get(module, {}).get(name)
        return self._home(*behind) if behind is not None else module

    def _imported(self, module: str) -> Iterator[str]:
        tree: ast.AST = self.trees[module]
        if module in self.packages:
            tree = ast.Module(
                [node for node in self.trees[module].body if not isinstance(node, (ast.If, ast.FunctionDef))], []
            )
        names = [self._home(*where) for _, where in self._from(tree)]
        names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        return (name for name in names if name in self.trees)

    def circle(self) -> list[str]:
        """Return modules that import each other in turn, the first again at the end; empty if there are none."""
        try:
            TopologicalSorter({name: sorted(imported) for name, imported in sorted(self.graph.items())}).prepare()
        except CycleError as error:
            return list(reversed(error.args[1]))
        return []


def sources() -> dict[str, tuple[str, bool]]:
    text_by_module = {}
    for path in sorted((ROOT / "jaxpipe").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text_by_module[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8"), path.stem == "__init__"
    return text_by_module


def test_no_circle_of_imports() -> None:
    assert Imports(sources()).circle() == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("from p.b import x", "from p.a import y"),
        ("def f():\n    from p.b import x", "import p.a"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import x", "from p import a"),
        ("from p import x", "from p.a import y"),
    ],
)
def test_a_circle_is_found(one: str, other: str) -> None:
    package = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import x\n"
    cycle = Imports({"p": (package, True), "p.a": (one, False), "p.b": (other, False)}).circle()
    assert cycle in (["p.a", "p.b", "p.a"], ["p.b", "p.a", "p.b"])


def test_a_package_that_shows_names_makes_no_circle() -> None:
    package = "__version__ = 1\ndef __getattr__(name):\n    from p import b\n    return b.x\n"
    assert Imports({"p": (package, True), "p.b": ("from p import __version__", False)}).circle() == []
