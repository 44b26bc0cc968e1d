"""Registers experiments: what each asks, what it backs, what it exercises, what is expected and what is wanted of it.

An experiment is a function of :class:`Settings` that returns its numbers, a tree of dicts. ``want`` names numbers by dotted
path, with what they must be: ``<= 1.01``, ``>= 0.9``, ``== 0`` or ``0.98 to 1.02``. Modules import no JAX before a function
runs: the runner imports all of them, and must hold no memory of the card.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RANKING = [
    "T0", "T1", "T2", "T3", "T3b", "T4", "T6", "T5", "T9", "T7", "T8", "T12", "T11", "T13", "T10", "T14", "T15", "T17", "T18",
    "T19", "T20", "T21",
]  # fmt: skip
"""Experiments by truth per minute."""
PROGRAM_PATHS = (
    "jaxpipe/stage", "jaxpipe/cost", "jaxpipe/runtime", "jaxpipe/program", "jaxpipe/rehearsal", "models/gpt.py",
)  # fmt: skip
"""The files that a rank's whole program exercises."""
MODULES = (
    "functions", "variants", "correctness", "offload", "pipelines", "memory", "training", "planned", "fp8", "shards",
    "against_torch", "processes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a call. ``sizes``: hidden size by the name that results carry. ``sample_s``: seconds of a sample.
    ``ceilings``: what the card reaches in this call (:mod:`scripts.gpu_experiments.card`)."""

    tiny: bool = False
    sizes: Mapping[str, int] = field(default_factory=lambda: {"4096": 4096, "8192": 8192})
    sequence: int = 4096
    head: int = 128
    vocab: int = 32000
    ranks: int = 4
    microbatches: int = 8
    steps: int = 5
    repeats: int = 7
    sample_s: Sequence[float] = (0.05, 0.5, 2.0)
    ceilings: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        return cls(**values)

    @property
    def hidden(self) -> int:
        """Return the smaller hidden size."""
        return min(self.sizes.values())


TINY = Settings(
    tiny=True, sizes={"4096": 32}, sequence=16, head=16, vocab=64, ranks=2, microbatches=4, steps=1, repeats=1,
    sample_s=(0.0, 0.001),
)  # fmt: skip
"""Toy sizes for a CPU."""

Numbers = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment and what was said of it before it ran.

    ``version``: raised when the experiment itself changes what it measures. ``paths``: files and folders of jaxpipe that it
    exercises; a result counts as long as their contents stay. ``estimate_s``: on a card; it is killed after twice that.
    ``environment``: variables of its process.
    """

    id: str
    run: Callable[[Settings], Numbers]
    version: int
    question: str
    backs: str
    paths: Sequence[str]
    estimate_s: float
    predicted: Mapping[str, str]
    want: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return the SHA-1 of the contents of ``paths``, in order of name. Needs no git."""
        return digest_of(self.paths)


REGISTERED: dict[str, Experiment] = {}


def experiment(name: str, **fields: Any) -> Callable[[Callable[[Settings], Numbers]], Callable[[Settings], Numbers]]:
    """Register the function below as the experiment ``name``; ``fields`` are those of :class:`Experiment`."""

    def register(run: Callable[[Settings], Numbers]) -> Callable[[Settings], Numbers]:
        REGISTERED[name] = Experiment(name, run, **fields)
        return run

    return register


def all_experiments() -> list[Experiment]:
    """Return the experiments that there are, in order of rank."""
    for module in MODULES:
        importlib.import_module(f"scripts.gpu_experiments.{module}")
    return sorted(REGISTERED.values(), key=lambda e: RANKING.index(e.id))


def digest_of(paths: Sequence[str], root: Path = ROOT) -> str:
    """Return the SHA-1 of names and contents of the files at and below ``paths``."""
    files = {f for path in paths for f in ([root / path] if (root / path).is_file() else (root / path).rglob("*.py"))}
    sha = hashlib.sha1(usedforsecurity=False)
    for file in sorted(files):
        sha.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return sha.hexdigest()


def checks_of(want: Mapping[str, str], numbers: Numbers) -> list[dict[str, Any]]:
    """Hold ``numbers`` to ``want``: name, value, what is wanted, whether it is so (None where there is no such number)."""
    checks = []
    for name, wanted in want.items():
        value: Any = numbers
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        is_number = isinstance(value, (int, float))
        checks.append(
            {"name": name, "value": value, "want": wanted, "ok": _holds(value, wanted) if is_number else None}
        )
    return checks


def _holds(value: float, wanted: str) -> bool:
    low, is_range, high = wanted.partition(" to ")
    if is_range:
        return float(low) <= value <= float(high)
    comparison, limit = wanted.split()
    return {"<=": value <= float(limit), ">=": value >= float(limit), "==": value == float(limit)}[comparison]
