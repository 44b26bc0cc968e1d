"""Exceptions a user may see. Internal invariants use ``assert`` instead.

Tree::

    JaxpipeError                 every error of ours; the CLI prints it on one line and exits with code 2
    ├── ConfigError              a config file, override or flag is wrong
    ├── ScheduleError            a schedule, placement, cost profile or schedule file breaks a rule (has ``.problems``)
    │   └── ScheduleParseError   the text, JSON or CSV form can't be read
    ├── StageError               a layer or a model can't be cut, traced or split
    ├── ProgramError             a schedule can't be lowered onto these stages and this mesh
    ├── RunError                 an instruction failed at run time; names rank, action and stage
    ├── DataError                training data can't be read or is too small
    └── CheckpointError          a checkpoint is missing, damaged or does not fit the model

Every message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence


class JaxpipeError(Exception):
    """Base of all errors that jaxpipe raises for a user to read."""


class ConfigError(JaxpipeError):
    """A configuration file, override or command-line flag is wrong."""


class ScheduleError(JaxpipeError):
    """A schedule, placement or cost profile breaks a rule.

    ``problems`` holds every problem found, one string each; the message joins them.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems) or (message,)


class ScheduleParseError(ScheduleError):
    """The text, JSON or CSV form of a schedule, placement or cost profile can't be read."""


class StageError(JaxpipeError):
    """A layer or model can't be cut into stages, traced, or split into F, B and W."""


class ProgramError(JaxpipeError):
    """A schedule can't be lowered onto the given stages and mesh."""


class RunError(JaxpipeError):
    """An instruction failed at run time. The message names rank, action and stage; ``action`` is its printed form, if one
    is to blame."""

    def __init__(self, message: str, action: str = "") -> None:
        super().__init__(message)
        self.action = action


class DataError(JaxpipeError):
    """Training data can't be read, or is too small for the request."""


class CheckpointError(JaxpipeError):
    """A checkpoint is missing, damaged, or does not fit the model that wants it."""
