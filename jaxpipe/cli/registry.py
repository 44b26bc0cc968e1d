"""List the verbs and run one. A verb's module is imported when the verb is used, so one verb's imports never slow another.

To add a verb: add a row to :data:`VERBS`, and to the module named there the two functions that :class:`Verb` asks for.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.cli.flags import Parser, add_repeated
from jaxpipe.errors import ConfigError
from jaxpipe.text import closest


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: its ``name`` and one-line ``summary`` as ``jaxpipe --help`` lists them. The ``module`` of this folder has two
    functions: ``configure_NAME(parser)`` adds the verb's flags, ``run_NAME(arguments)`` does it and returns an exit code, or
    None for 0. ``flags``: the module of the first, if that is another. ``passes_on``: arguments behind ``--`` belong to
    another command; the verb gets them as ``arguments.rest``."""

    name: str
    summary: str
    module: str
    flags: str = ""
    passes_on: bool = False

    def function(self, what: str) -> Callable[..., Any]:
        """Import the verb's module and return its function ``configure`` or ``run``."""
        module = self.module if what == "run" else self.flags or self.module
        function: Callable[..., Any] = getattr(importlib.import_module(f"jaxpipe.cli.{module}"), f"{what}_{self.name}")
        return function


VERBS: tuple[Verb, ...] = (
    Verb("train", "train a model through a pipeline", "train_verbs"),
    Verb(
        "launch",
        "start the processes of a training run here, or write what starts them on a cluster",
        "train_verbs",
        passes_on=True,
    ),
    Verb("data", "tokenise sources into a token store, or check one", "train_verbs"),
    Verb("eval", "held-out loss of a checkpoint, on one device, without a pipeline", "train_verbs"),
    Verb("generate", "continue a text with a checkpoint's model", "train_verbs"),
    Verb("import", "make a run of a folder of the Hugging Face hub", "train_verbs"),
    Verb("export", "write a checkpoint's model as a folder of the Hugging Face hub", "train_verbs"),
    Verb("profile", "time every stage function alone and report its bytes", "train_verbs"),
    Verb("rehearse", "one rank's real program alone on one device: memory, seconds, overlap", "plan_verbs"),
    Verb("plan", "does a config fit on a machine that is not here, and how fast would it be", "plan_verbs"),
    Verb("tune", "the fastest layout and schedule of a config on so many devices of a machine", "plan_verbs"),
    Verb("schedules", "list the schedule families", "schedule_verbs", "flags"),
    Verb("schedule", "generate a schedule; simulate, show, write or draw it", "schedule_verbs", "flags"),
    Verb("simulate", "check and simulate a schedule file", "schedule_verbs", "flags"),
    Verb("compare", "all families at the same sizes and costs, in one table", "search_verbs", "flags"),
    Verb("best", "the best schedule of all families and parameters within a memory limit", "search_verbs", "flags"),
    Verb("cache", "list or clear the schedules that were solved", "search_verbs", "flags"),
    Verb("solve", "search for an optimal schedule, with a proven gap", "search_verbs", "flags"),
    Verb("plot", "draw schedule files and recorded timelines", "schedule_verbs", "flags"),
)


def run(argv: list[str]) -> int:
    """Run the verb that ``argv`` begins with.

    Raises:
        ConfigError: no such verb or flag, or a module of ``--import`` can't be imported. Whatever the verb raises passes
            through.
        SystemExit: after ``--help``.
    """
    if argv and argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv and argv[0] == "--version":
        from jaxpipe import __version__

        print(f"jaxpipe {__version__}")
        return 0
    names = [v.name for v in VERBS]
    if not argv:
        raise ConfigError(f"no verb given; use one of: {', '.join(names)} (jaxpipe --help describes them)")
    verb = next((v for v in VERBS if v.name == argv[0]), None)
    if verb is None:
        raise ConfigError(f"unknown verb {argv[0]!r}{closest(argv[0], names)}; verbs: {', '.join(names)}")
    verb_argv, rest = argv[1:], []
    if verb.passes_on and "--" in verb_argv:
        verb_argv, rest = verb_argv[: verb_argv.index("--")], verb_argv[verb_argv.index("--") + 1 :]
    arguments = parsed(verb.name, verb_argv)
    arguments.rest = rest
    # after the flags are read, so that --help runs no code of the user's; before the verb, which looks families up
    if arguments.imports:
        from jaxpipe.schedule.plugins import import_module

        for module in arguments.imports:
            import_module(module)
    return verb.function("run")(arguments) or 0


def parsed(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a verb. Raises as :func:`run`."""
    verb = next(v for v in VERBS if v.name == name)
    parser = Parser(prog=f"jaxpipe {verb.name}", description=verb.summary[0].upper() + verb.summary[1:] + ".")
    verb.function("configure")(parser)
    text = "import a module that registers schedule families or ops, also from the working directory (repeatable)"
    add_repeated(parser, "--import", "MODULE", text, dest="imports")
    return parser.parse(argv)


def overview() -> str:
    """Return the text of ``jaxpipe --help``."""
    width = max(len(v.name) for v in VERBS)
    rows = "\n".join(f"  {v.name:<{width}}  {v.summary}" for v in VERBS)
    return (
        f"usage: jaxpipe VERB …\n\nverbs:\n{rows}\n\n"
        "'jaxpipe VERB --help' lists a verb's flags, 'jaxpipe --version' prints the version."
    )
