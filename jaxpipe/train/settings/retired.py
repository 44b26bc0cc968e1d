"""Settings of before, which others replace. Configs that have them, in files or in checkpoints, load as ever."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpipe.train.settings.sections import PipelineConfig, RunConfig, Sections


@dataclass(frozen=True, slots=True)
class _RetiredPipeline(PipelineConfig):
    """And what is ``braid = "adjacent"`` today."""

    braid_adjacent: bool = False


@dataclass(frozen=True, slots=True)
class _RetiredRun(RunConfig):
    """And what is one of the ``trackers``, or ``max_skipped = 1``, today."""

    tensorboard: bool = False
    on_nonfinite: Literal["skip", "abort"] = "skip"


@dataclass(frozen=True, slots=True)
class Accepted(Sections):
    """All settings that a config may have."""

    pipeline: _RetiredPipeline = field(default_factory=_RetiredPipeline)
    run: _RetiredRun = field(default_factory=_RetiredRun)


def modernize(values: MutableMapping[str, Any]) -> None:
    """Say retired settings among ``values``, by dotted key, by those that replace them. Nothing else need be valid."""
    trackers = values.get("run.output.trackers", ("jsonl",))
    if values.pop("run.tensorboard", False) is True and isinstance(trackers, (list, tuple)):
        values["run.output.trackers"] = tuple(dict.fromkeys(map(str, (*trackers, "tensorboard"))))
    if values.pop("run.on_nonfinite", "skip") == "abort":
        values["run.max_skipped"] = 1
    if values.pop("pipeline.braid_adjacent", False) is True and values.get("pipeline.passes.braid", True) is True:
        values["pipeline.passes.braid"] = "adjacent"
