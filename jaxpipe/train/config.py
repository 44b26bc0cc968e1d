"""What a training run is told: eight small sections, from a TOML or JSON file plus ``section.key=value`` overrides.

Only ``train/`` and the command line see a :class:`TrainConfig`; lower rooms take plain arguments. A config never looks at
the file system or the machine, so that one stored in a checkpoint loads anywhere: whether a path exists is for
:mod:`jaxpipe.train.corpus` to say. Zero switches off ``eval_every``, ``checkpoint_every`` and ``clip_norm``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from jaxpipe.errors import ConfigError
from jaxpipe.train import settings
from jaxpipe.train.rules import broken_rules
from jaxpipe.train.sections import Sections
from jaxpipe.train.settings import Collected, Problem


@dataclass(frozen=True, slots=True)
class TrainConfig(Sections):
    """A whole run. Construction checks every value and their combinations.

    Raises:
        ConfigError: one line with all problems, joined by ``"; "``.
    """

    def __post_init__(self) -> None:
        found = Collected()
        settings.collect_mapping(TrainConfig, settings.to_mapping(self), "", found)
        _raise_if([*found.problems, *broken_rules(self, found.bad_keys)])

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], place: str = "config") -> TrainConfig:
        """The config of sections and keys as :meth:`to_dict` gives them; absent keys keep their defaults."""
        found = Collected()
        settings.collect_mapping(cls, mapping, place, found)
        return _finish(found)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections and keys as plain values that JSON can hold."""
        return settings.to_mapping(self)

    def to_toml(self) -> str:
        """TOML text; :func:`load_config` reads it back to an equal config."""
        return settings.to_toml(self.to_dict())

    def to_json(self) -> str:
        """JSON text; :func:`load_config` reads it back to an equal config."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def override(self, overrides: Sequence[str]) -> TrainConfig:
        """This config with ``section.key=value`` overrides applied in order; the last one of a key wins."""
        found = Collected()
        settings.collect_mapping(TrainConfig, self.to_dict(), "", found)
        return _finish(found, overrides)

    def describe(self) -> str:
        """All settings, one a line, aligned; those that differ from the default are marked ``*``."""
        default = TrainConfig().to_dict()
        rows = [
            (section if i == 0 else "", "*" if value != default[section][key] else " ", key, _show(value))
            for section, leaves in self.to_dict().items()
            for i, (key, value) in enumerate(leaves.items())
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{s:<{widths[0]}} {mark} {key:<{widths[2]}}  {value}" for s, mark, key, value in rows)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a ``.toml`` or ``.json`` file (defaults without one), with overrides applied.

    Raises:
        ConfigError: the file can't be read, or any value is wrong: one line with all problems. Also when a path has characters
            that this system's file names can't have.
    """
    found = Collected()
    if path is not None:
        settings.collect_mapping(TrainConfig, settings.read_mapping(Path(path)), str(path), found)
    config = _finish(found, overrides)
    _raise_if([Problem(message, ()) for message in _unspellable(config)])
    return config


def _unspellable(config: TrainConfig) -> Iterator[str]:
    """Paths that file names can't spell in this process: with an ASCII locale, what is not ASCII."""
    paths = {
        "data.path": config.data.path,
        "data.tokenizer": config.data.tokenizer,
        "pipeline.schedule": config.pipeline.schedule,
        "run.out_dir": config.run.out_dir,
    }
    for key, path in paths.items():
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            yield f"{key} is {path!r}, and file names here are {encoding}: set PYTHONUTF8=1, or use other characters"


def known_settings(stored: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """The settings of a stored config, which another version may have written, that there are today, by section; and the
    dotted keys of the others. Values are not checked."""
    hints = settings.leaf_hints(TrainConfig)
    sections = {name: leaves for name, leaves in stored.items() if isinstance(leaves, Mapping)}
    known = {
        name: {key: value for key, value in leaves.items() if f"{name}.{key}" in hints}
        for name, leaves in sections.items()
    }
    other = [f"{name}.{key}" for name, leaves in sections.items() for key in leaves if f"{name}.{key}" not in hints]
    return known, tuple(sorted([*other, *(stored.keys() - sections.keys())]))


_SECTIONS: Mapping[str, Any] = get_type_hints(Sections)


def _finish(found: Collected, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of the collected values, after overrides; raises with all problems, each with its place."""
    for override in overrides:
        settings.collect_override(TrainConfig, override, found)
    overridden = {key for key, place in found.places.items() if place.startswith(('override "', "override '"))}
    if "pipeline.schedule" in overridden:
        asked = found.values["pipeline.schedule"]
        for name, prefix in (("traverse", "traverse."), ("towers", "pipeline.towers")):
            for key in [k for k in found.values if k.startswith(prefix) and k not in overridden and name != asked]:
                del found.values[key]  # rules for the schedule that is not asked for any more
    given: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for key, value in found.values.items():
        section, _, leaf = key.partition(".")
        given[section][leaf] = value
    sections = {name: section_type(**given[name]) for name, section_type in _SECTIONS.items()}
    broken = [
        replace(problem, place=found.places.get(problem.keys[0], "")) if len(problem.keys) == 1 else problem
        for problem in broken_rules(Sections(**sections), found.bad_keys)
    ]
    _raise_if([*found.problems, *broken])
    return TrainConfig(**sections)


def _raise_if(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError("; ".join(" ".join(str(problem).split()) for problem in problems))


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_show(x)}" for key, x in value.items()) or "-"
    if isinstance(value, list):
        return ",".join(map(_show, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
