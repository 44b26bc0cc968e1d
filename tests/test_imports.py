"""The import table of the design, enforced: which room may import which, and what may not be imported at all.

A room is a package or module directly under ``jaxpipe`` (``stage/`` or ``mesh.py``), or ``models``. Imports are read from
the syntax tree, so one inside a function or under ``TYPE_CHECKING`` counts like any other.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.paths import ROOT

EVERYTHING = frozenset(
    [
        "errors",
        "lazy",
        "text",
        "files",
        "dump",
        "interrupts",
        "_jax_compat",
        "axes",
        "mesh",
        "context_parallel",
        "tensor_parallel",
        "schedule",
        "stage",
    ]
) | {"cost", "program", "runtime", "plot", "train"}

ALLOWED: Mapping[str, frozenset[str]] = {
    # room: what of ours it may import; every room may import itself and jaxpipe.__version__
    "__init__": frozenset(
        {"lazy", "stage", "train"}
    ),  # the last two for type checkers: the package imports none of them
    "lazy": frozenset(),
    "text": frozenset(),
    "errors": frozenset({"text"}),
    "files": frozenset({"errors"}),
    "dump": frozenset(),
    "interrupts": frozenset({"errors"}),
    "_jax_compat": frozenset(),
    "schedule": frozenset({"errors", "lazy", "text", "files", "dump"}),
    "search": frozenset({"schedule", "errors", "lazy", "text", "files", "dump"}),
    "axes": frozenset({"errors", "text"}),
    "mesh": frozenset({"axes", "errors"}),
    "context_parallel": frozenset({"axes", "_jax_compat", "errors"}),
    "tensor_parallel": frozenset({"axes", "context_parallel", "_jax_compat", "errors"}),
    "experts": frozenset({"axes", "_jax_compat", "errors"}),
    "stage": frozenset({"axes", "mesh", "_jax_compat", "errors", "lazy", "text", "dump"}),
    "interop": frozenset({"stage", "errors", "lazy", "text", "files"}),
    "cost": frozenset({"stage", "schedule", "program", "mesh", "lazy", "text"}),
    "program": frozenset({"schedule", "stage", "mesh", "errors", "text", "dump"}),
    "runtime": EVERYTHING - {"runtime", "plot", "train"},
    "plot": frozenset({"schedule", "errors"}),
    "train": EVERYTHING - {"train"} | {"interop"},
    "planning": EVERYTHING,
    "rehearsal": EVERYTHING,
    "launch": frozenset({"errors", "lazy", "files", "runtime", "train"}),
    "cli": EVERYTHING | {"planning", "rehearsal", "launch"},
    "__main__": frozenset({"cli"}),
    # the layer protocol and the reading of model options, and the adapters that make Flax modules follow it
    "models": frozenset(
        {
            "tensor_parallel",
            "context_parallel",
            "experts",
            "errors",
            "stage.model.layer",
            "stage.model.adapters",
        }
    )
    | {"interop.table"},  # of tensors on the hub, and its config.json
}

MAY_SEARCH = frozenset(
    {
        "jaxpipe/cli/report.py",
        "jaxpipe/cli/search_verbs.py",
        "jaxpipe/planning/tune.py",
        "jaxpipe/train/replan.py",
    }
)
"""Files outside ``search`` that import it, when they are used: the verbs that search or print bounds, and re-planning."""

NO_JAX = ("schedule", "search", "plot")
"""Rooms without JAX, anywhere."""
JAX = ("jax", "jaxlib", "flax", "optax", "orbax")
LAZY = ("matplotlib", "ortools", "tokenizers", "tensorboardX", "pyarrow", "zstandard", "jinja2")
"""Slow or optional packages: imported inside the function that needs them."""

TOP_LEVEL = {"pyproject.toml", "jaxpipe", "models", "scripts", "tests", "README.md", "LICENSE", "CHANGELOG.md"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
README_MAX_LINES = 60


def room_of(module: str) -> str:
    """Return ``stage`` for ``jaxpipe.stage.split.splitter``, ``models`` for ``models.gpt``, ``__init__`` for ``jaxpipe``."""
    head, *rest = module.split(".")
    return head if head != "jaxpipe" else rest[0] if rest else "__init__"


def imports(module: str, is_package: bool, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything imported: ``from a import b`` gives ``a.b``; relative names are
    resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*parts, *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def at_import(tree: ast.Module) -> ast.AST:
    """Return the part of the tree that runs on import: without function bodies and ``if TYPE_CHECKING`` blocks."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST:
            return ast.Pass() if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    stripped: ast.AST = Strip().visit(tree)
    return stripped


def branches_on_jax_version(tree: ast.AST) -> Iterator[int]:
    """Yield lines that compare ``jax.__version__`` or the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(
            f"{name}.__version" in ast.unparse(part) for part in ast.walk(node) for name in ("jax", "jaxlib")
        ):
            yield node.lineno


def violations(path: str, source: str) -> list[str]:
    """Return what one file does that the table forbids. ``path`` is relative to the repository root."""
    parts = list(Path(path).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    room, tree = room_of(module), ast.parse(source)
    if room not in ALLOWED:
        return [f"{path}: the room {room!r} has no row in the import table (tests/test_imports.py and the design)"]
    problems = []
    for line, name in imports(module, is_package, tree):
        top, *rest = name.split(".")
        where = f"{path}:{line}"
        if name.startswith("jax._src") and room != "_jax_compat":
            problems.append(f"{where}: {name} is private to JAX; borrow it in _jax_compat.py")
        if top in JAX and room in NO_JAX:
            problems.append(f"{where}: {name} in {room}, which has no JAX")
        if top == "models" and room != "models":
            problems.append(f"{where}: jaxpipe never imports models; resolve the name at run time")
        if top == "jaxpipe" and rest and rest != ["__version__"] and rest[0] != room:
            prefixes = {".".join(rest[: i + 1]) for i in range(len(rest))}
            allowed = ALLOWED[room] | ({"search"} if path in MAY_SEARCH else set())
            if not prefixes & allowed:
                problems.append(f"{where}: {room} may not import {name}")
    if room != "_jax_compat" and ".__version" in source:
        message = "a branch on the JAX version belongs in _jax_compat.py"
        problems += [f"{path}:{line}: {message}" for line in branches_on_jax_version(tree)]
    banned = {"cli": (*LAZY, *JAX), "plot": (*LAZY, "numpy")}.get(room, LAZY)
    for _, name in imports(module, is_package, at_import(tree)):
        if name.split(".")[0] in banned:
            problems.append(f"{path}: {name} must be imported inside the function that needs it")
    return problems


def sources() -> list[Path]:
    return sorted(path for room in ("jaxpipe", "models") for path in (ROOT / room).rglob("*.py"))


# The repository keeps the table.


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_follow_the_table(path: Path) -> None:
    assert violations(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) == []


def test_schedule_plot_and_cli_import_without_jax() -> None:
    """An import that reaches JAX through others is not in the table; this test sees it."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sources()]
    names = [module for module in modules if room_of(module) in ("schedule", "search", "plot", "launch", "cli")]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        f"print([name for name in {(*JAX, *LAZY)!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["schedule", "train.replan", "train.loop", "cli", "cli.report", "planning"])
def test_search_is_imported_when_it_is_used(module: str) -> None:
    """Training lists the families that there are, and so imports those that search, but never the solver."""
    search = "jaxpipe.search.solve" if module == "train.loop" else "jaxpipe.search"
    code = f"import sys, jaxpipe.{module}; print([x for x in sys.modules if x.startswith(({search!r}, 'ortools'))])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_no_vague_file_names() -> None:
    folders = [ROOT / name for name in ("jaxpipe", "models", "scripts", "tests")]
    vague = [path for folder in folders for path in folder.rglob("*") if path.stem.lower() in VAGUE_NAMES]
    assert vague == []


def packages() -> list[str]:
    """Return every package below ``jaxpipe``, dotted."""
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "jaxpipe").glob("*/**/__init__.py")]
    return sorted(".".join(x.parts) for x in folders if x.parts[1] != "models")


@pytest.mark.parametrize("package", packages())
def test_every_room_says_its_public_names(package: str) -> None:
    room = importlib.import_module(package)
    assert room.__all__, f"{package} needs an __all__"
    assert len({*room.__all__}) == len(room.__all__)
    assert [name for name in room.__all__ if not hasattr(room, name)] == []
    assert not hasattr(room, "no_such_name")


def rooms_that_are_packages() -> list[Path]:
    return sorted({path.parent for path in (ROOT / "jaxpipe").glob("*/*.py")} | {ROOT / "models"})


@pytest.mark.parametrize("room", rooms_that_are_packages(), ids=lambda path: path.name)
def test_every_room_has_a_readme(room: Path) -> None:
    readme = room / "README.md"
    assert readme.is_file(), f"{room.relative_to(ROOT)} needs a README.md: what it owns, and in which order to read it"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= README_MAX_LINES


def test_wheel_holds_jaxpipe_and_all_of_it() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(tool) == {"dynamic", "packages", "package-data"}
    assert tool["packages"] == {"find": {"include": ["jaxpipe*"]}}
    assert set(tool["package-data"]) == {"jaxpipe"}
    package = ROOT / "jaxpipe"
    for folder in {path.parent for path in package.rglob("*.py")}:
        assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py"
    shipped = {path for pattern in tool["package-data"]["jaxpipe"] for path in package.glob(pattern)}
    assert (package / "models").readlink() == Path("../models"), "the wheel's jaxpipe.models is the link to models/"
    data = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert data <= shipped, "package-data in pyproject.toml leaves these out of the wheel"


def test_top_level_is_as_the_owner_fixed_it() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {name.split("/")[0] for name in listed.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_table_has_no_cycle() -> None:
    """Rooms can be ordered so that each imports only earlier ones."""
    ordered: set[str] = set()
    while rest := ALLOWED.keys() - ordered:
        ready = {room for room in rest if {name.split(".")[0] for name in ALLOWED[room]} <= ordered}
        assert ready, f"cycle among {sorted(rest)}"
        ordered |= ready


# The checker catches what it should, and nothing else.

FORBIDDEN = [
    ("jaxpipe/schedule/x.py", "import jax", "schedule, which has no JAX"),
    ("jaxpipe/schedule/x.py", "def f():\n    from jax.numpy import ones", "which has no JAX"),
    ("jaxpipe/schedule/x.py", "import flax.linen as nn", "which has no JAX"),
    ("jaxpipe/schedule/x.py", "from jaxpipe.stage import plan", "schedule may not import jaxpipe.stage.plan"),
    ("jaxpipe/schedule/x.py", "from ortools.sat.python import cp_model", "inside the function"),
    ("jaxpipe/schedule/families/x.py", "from ...stage.plan import StagePlan", "may not import jaxpipe.stage.plan"),
    ("jaxpipe/schedule/__init__.py", "from ..mesh import Mesh", "schedule may not import jaxpipe.mesh"),
    (
        "jaxpipe/stage/x.py",
        "if TYPE_CHECKING:\n    import jaxpipe.schedule.ir",
        "stage may not import jaxpipe.schedule.ir",
    ),
    ("jaxpipe/stage/x.py", "from jaxpipe import program", "stage may not import jaxpipe.program"),
    ("jaxpipe/stage/x.py", "from jax._src import core", "private to JAX"),
    ("jaxpipe/stage/x.py", "import jax._src.core", "private to JAX"),
    ("jaxpipe/stage/x.py", "import jax\nif jax.__version__ < '0.11': pass", "branch on the JAX version"),
    ("jaxpipe/stage/x.py", "import jax\nnew = jax.__version_info__ >= (0, 11)", "branch on the JAX version"),
    ("jaxpipe/errors.py", "from jaxpipe.dump import write", "errors may not import"),
    ("jaxpipe/__init__.py", "from jaxpipe.schedule import ir", "__init__ may not import"),
    ("jaxpipe/plot/x.py", "import matplotlib.pyplot as plt", "inside the function"),
    ("jaxpipe/plot/x.py", "import numpy as np", "inside the function"),
    ("jaxpipe/plot.py", "import jax", "plot, which has no JAX"),
    ("jaxpipe/cli/x.py", "import jax", "inside the function"),
    ("jaxpipe/cli.py", "class A:\n    import orbax", "inside the function"),
    ("jaxpipe/runtime/x.py", "from jaxpipe.train.config import Config", "runtime may not import"),
    ("jaxpipe/train/x.py", "def f():\n    import models.gpt", "never imports models"),
    ("jaxpipe/train/x.py", "import importlib\nimportlib.import_module('models.gpt')", "never imports models"),
    ("jaxpipe/train/x.py", "from jaxpipe.cli import main", "train may not import"),
    ("jaxpipe/novel.py", "", "has no row"),
    ("jaxpipe/schedule/x.py", "from jaxpipe.search.solve import solve", "schedule may not import jaxpipe.search.solve"),
    ("jaxpipe/train/x.py", "def f():\n    import jaxpipe.search", "train may not import jaxpipe.search"),
    (
        "models/x.py",
        "from jaxpipe.stage.split.splitter import split",
        "models may not import jaxpipe.stage.split.splitter",
    ),
    ("models/x.py", "from jaxpipe.stage import Layer", "models may not import jaxpipe.stage.Layer"),
]


@pytest.mark.parametrize(("path", "source", "message"), FORBIDDEN)
def test_checker_catches(path: str, source: str, message: str) -> None:
    problems = violations(path, source)
    assert len(problems) == 1
    assert message in problems[0]
    assert problems[0].startswith(path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxpipe/schedule/x.py", "import numpy\nfrom jaxpipe.schedule.ir import Action\nfrom jaxpipe import errors"),
        ("jaxpipe/schedule/x.py", "def solve():\n    from ortools.sat.python import cp_model"),
        ("jaxpipe/schedule/x.py", "from . import ir\nfrom .ir import Action"),
        ("jaxpipe/train/replan.py", "def f():\n    from jaxpipe.search.solve import solve"),
        ("jaxpipe/cli/x.py", "from jaxpipe import __version__\ndef f():\n    import jax\n    from jaxpipe.train import loop"),
        ("jaxpipe/_jax_compat.py", "import jax\nfrom jax._src import core\nif jax.__version_info__ > (0, 11): pass"),
        ("jaxpipe/stage/x.py", "import jax\nprint(jax.__version__)\nimport jaxpipe"),
        ("models/x.py", "import flax\nfrom jaxpipe.stage.model.layer import Layer\nfrom jaxpipe.stage.model import layer"),
    ],
)  # fmt: skip
def test_checker_allows(path: str, source: str) -> None:
    assert violations(path, source) == []


ROOMS_OF_TRAINING = ("train", *(f"train.{name}" for name in ("checkpoints", "corpora", "run", "update")))


@pytest.mark.parametrize("room", [*ROOMS_OF_TRAINING, "interop", "launch", "cli"])
def test_public_names_are_there(room: str) -> None:
    package = importlib.import_module(f"jaxpipe.{room}")
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_packages_of_training_import_no_jax() -> None:
    rooms = ", ".join(f"jaxpipe.{room}" for room in (*ROOMS_OF_TRAINING, "launch", "interop"))
    code = f"import sys, {rooms}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
