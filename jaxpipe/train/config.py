"""Read the config of a training run: five sections of settings, from a TOML or JSON file plus ``section.key=value`` overrides.

Only ``train/`` and the command line see a :class:`TrainConfig`; lower rooms take plain arguments. A config never looks at the
file system or the machine, so that one stored in a checkpoint loads anywhere: whether a path exists is for
:mod:`jaxpipe.train.corpora.corpus` to say. :func:`load_config` alone reads a schedule file, whose sizes are those of the run
where nothing is said of them. Zero switches off ``eval_every``, ``checkpoint_every`` and ``clip_norm``. Retired settings, in
files or in checkpoints, are replaced by those that took their place (:func:`modernize`).
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, Literal, get_type_hints

from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule import read_schedule
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.schedule.files import SUFFIXES
from jaxpipe.text import aligned
from jaxpipe.train.settings import typed
from jaxpipe.train.settings.rules import broken_rules
from jaxpipe.train.settings.sections import PipelineConfig, RunConfig, Sections
from jaxpipe.train.settings.typed import Collected


@dataclass(frozen=True, slots=True)
class _RetiredPipeline(PipelineConfig):
    """The section ``pipeline`` with what is ``braid = "adjacent"`` today."""

    braid_adjacent: bool = False


@dataclass(frozen=True, slots=True)
class _RetiredRun(RunConfig):
    """The section ``run`` with what is one of the ``trackers``, or ``max_skipped = 1``, today."""

    tensorboard: bool = False
    on_nonfinite: Literal["skip", "abort"] = "skip"


@dataclass(frozen=True, slots=True)
class Accepted(Sections):
    """All settings that a config may have."""

    pipeline: _RetiredPipeline = field(default_factory=_RetiredPipeline)
    run: _RetiredRun = field(default_factory=_RetiredRun)


def modernize(values: MutableMapping[str, Any]) -> None:
    """Replace retired settings among ``values``, by dotted key, by those that took their place. Nothing else need be valid."""
    # Values may be wrong here (they are checked later, with all others), so each is compared with what it may be.
    trackers = values.get("run.output.trackers", ("jsonl",))
    if values.pop("run.tensorboard", False) is True and isinstance(trackers, (list, tuple)):
        values["run.output.trackers"] = tuple(dict.fromkeys(map(str, (*trackers, "tensorboard"))))
    if values.pop("run.on_nonfinite", "skip") == "abort":
        values["run.max_skipped"] = 1
    if values.pop("pipeline.braid_adjacent", False) is True and values.get("pipeline.passes.braid", True) is True:
        values["pipeline.passes.braid"] = "adjacent"


@dataclass(frozen=True, slots=True)
class TrainConfig(Sections):
    """A whole run. Construction checks every value and their combinations.

    ``given_keys``: the dotted keys that a file, an override or a stored config gave; None where Python made the sections.

    Raises:
        ConfigError: one line with all problems, joined by ``"; "``.
    """

    given_keys: frozenset[str] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        parsed = Collected(Sections)
        parsed.add_table(self.to_dict(), "")
        parsed.problems += broken_rules(self, parsed.bad_keys)
        parsed.refuse()

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], place: str = "config") -> TrainConfig:
        """Return the config of sections and keys as :meth:`to_dict` gives them; absent keys keep their defaults."""
        return _config(mapping, place)

    def says(self, key: str) -> bool:
        """Whether ``key`` was set, be it to the default. Of sections that Python made, what differs from the default counts as
        said."""
        if self.given_keys is None:
            return bool(attrgetter(key)(self) != attrgetter(key)(Sections()))
        return key in self.given_keys

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return sections and keys as plain values that JSON can hold."""
        return {name: typed.plain(getattr(self, name)) for name in _SECTIONS}

    def by_key(self) -> dict[str, Any]:
        """Return settings as plain values by dotted key."""
        return dict(typed.leaves_of(Sections, self.to_dict()))

    def to_toml(self) -> str:
        """Return TOML text; :func:`load_config` reads it back to an equal config."""
        return typed.to_toml(self.to_dict())

    def to_json(self) -> str:
        """Return JSON text; :func:`load_config` reads it back to an equal config."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def override(self, overrides: Sequence[str]) -> TrainConfig:
        """Return this config with ``section.key=value`` overrides applied in order; the last one of a key wins."""
        return _config(self.to_dict(), "", overrides, self.given_keys)

    def changed(self, values: Mapping[str, Any]) -> TrainConfig:
        """Return this config with these values by dotted key."""
        parsed = Collected(Sections)
        parsed.values |= {key: attrgetter(key)(self) for key in typed.leaf_hints(Sections)}
        for key, value in values.items():
            parsed.add(key, value, "")
        keys = {typed.full_key(Sections, key) for key in values}
        return _checked(parsed, None if self.given_keys is None else self.given_keys | keys)

    def describe(self) -> str:
        """List all settings, one a line, aligned; those that differ from the default are marked ``*``."""
        default = TrainConfig().to_dict()
        rows = [
            (section if i == 0 else "", "*" if value != default[section][key] else " ", key, _show(value))
            for section, leaves in self.to_dict().items()
            for i, (key, value) in enumerate(leaves.items())
        ]
        return "\n".join(aligned(rows, left=range(4)))


def explain_settings() -> str:
    """List all settings by section: key, what it may be, its default, and what it is for."""
    default, lines = typed.plain(TrainConfig()), []
    docs, hints = typed.leaf_docs(Sections), typed.leaf_hints(Sections)
    for key, text in docs.items():
        section, *path = key.split(".")
        text = text.replace("``", "")
        indent = " " * 4 * len(path)
        if key in hints:
            value = reduce(getitem, path, default[section])
            lines.append(f"{indent[4:]}{path[-1]} = {_show(value)}   ({typed.describe_hint(hints[key])})")
            lines += textwrap.wrap(text, 120, initial_indent=indent, subsequent_indent=indent)
        else:
            lines += ["", f"[{key}]  {text}"] if not path else [f"{path[-1]}   (a table)", f"{indent}{text}"]
    return "\n".join(lines[1:])


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the config of a ``.toml`` or ``.json`` file (defaults without one), with overrides applied.

    Raises:
        ConfigError: the file can't be read, or any value is wrong: one line with all problems. Also when a path has characters
            that this system's file names can't have.
    """
    mapping = {} if path is None else typed.read_mapping(Path(path))
    config = _config(mapping, str(path), overrides, read_sizes=_file_sizes)
    for key in ("data.path", "data.tokenizer", "pipeline.schedule", "run.out_dir", "run.init_from"):
        name = attrgetter(key)(config)
        try:
            os.fsencode(name or "")
        except UnicodeEncodeError:
            advice = f"file names here are {sys.getfilesystemencoding()}: set PYTHONUTF8=1, or use other characters"
            raise ConfigError(f"{key} is {name!r}, and {advice}") from None
    return config


def known_settings(stored: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return the settings of a stored config, which another version may have written, that there are today, by section; and the
    dotted keys of the others. Values are not checked."""
    hints, values = typed.leaf_hints(Accepted), dict(typed.leaves_of(Accepted, stored))
    current = {key: value for key, value in values.items() if key in hints}
    modernize(current)
    # A config without pack was written before there was a choice: its run goes on with the windows it began with.
    if "data.reading.mask" in current and "data.reading.pack" not in current:
        current["data.reading.pack"] = "windows"
    nested: dict[str, Any] = {}
    for key, value in current.items():
        *path, leaf = key.split(".")
        reduce(lambda table, name: table.setdefault(name, {}), path, nested)[leaf] = value
    return nested, tuple(sorted(values.keys() - hints.keys()))


_SECTIONS: Mapping[str, Any] = get_type_hints(Sections)


def _config(
    mapping: Mapping[str, Any],
    place: str,
    overrides: Sequence[str] = (),
    explicit: frozenset[str] | None = frozenset(),
    read_sizes: Callable[[str], Mapping[str, int]] | None = None,
) -> TrainConfig:
    """Return the config of sections and keys found at ``place``, after overrides. ``explicit``: the keys that somebody gave,
    where ``mapping`` is of a config, which has all of them; None where that is not known. ``read_sizes``: of a schedule file.

    Raises:
        ConfigError: one line with all problems, each with its place.
    """
    parsed = Collected(Accepted)
    parsed.add_table(mapping, place)
    if place:
        explicit = frozenset(parsed.values)
    for override in overrides:
        parsed.add_override(override)
    modernize(parsed.values)
    if "pipeline.schedule" in parsed.overridden:
        schedule = parsed.values.get("pipeline.schedule")
        # A file's rules for another schedule than the one that the command line asks for would be refused as unused.
        for name in {"traverse", "towers"} - {schedule}:
            for key in [k for k in parsed.values if k.startswith(f"pipeline.{name}") and k not in parsed.overridden]:
                del parsed.values[key]
    if explicit is not None:
        explicit = (explicit | parsed.overridden) & parsed.values.keys()
        sizes = _sizes_of(parsed.values, read_sizes)
        parsed.values |= {key: size for key, size in sizes.items() if key not in explicit | parsed.bad_keys}
    return _checked(parsed, explicit)


def _sizes_of(values: Mapping[str, Any], read: Callable[[str], Mapping[str, int]] | None) -> dict[str, int]:
    """Return the sizes that ``pipeline.schedule`` has by itself: those of a file, as ``read`` finds them, and the usual chunks
    of a family."""
    schedule = values.get("pipeline.schedule", PipelineConfig().schedule)
    if schedule in FAMILIES:
        return {"pipeline.chunks": FAMILIES[schedule].default_chunks}
    sizes = read(schedule) if read is not None and schedule.endswith(SUFFIXES) else {}
    return {f"pipeline.{name}": size for name, size in sizes.items()}


def _file_sizes(path: str) -> dict[str, int]:
    """Return ranks, microbatches and chunks of a schedule file; none where it can't be read, which is reported when it is to
    run."""
    try:
        schedule = read_schedule(path)
    except ScheduleError:
        return {}
    sizes = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    return sizes | ({"chunks": schedule.num_chunks} if schedule.placement.is_chain else {})


def _checked(parsed: Collected, explicit: frozenset[str] | None) -> TrainConfig:
    """Return the config of parsed settings. ``explicit``: the keys that somebody gave.

    Raises:
        ConfigError: one line with all problems.
    """
    sections = parsed.build(Sections)
    parsed.problems += broken_rules(sections, parsed.bad_keys)
    parsed.refuse()
    # __init__ would check every value a second time: each was checked as it was parsed, and the rules just now.
    config = object.__new__(TrainConfig)
    for name in _SECTIONS:
        object.__setattr__(config, name, getattr(sections, name))
    object.__setattr__(config, "given_keys", explicit)
    return config


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_show(x)}" for key, x in value.items()) or "-"
    if isinstance(value, list):
        return ",".join(map(_show, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
