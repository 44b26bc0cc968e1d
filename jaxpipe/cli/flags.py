"""Parse arguments, convert the values of flags, print results: what all verbs share; and add the flags of the schedule verbs.

argparse prints usage and exits on a mistake; :class:`Parser` raises :class:`~jaxpipe.errors.ConfigError` with one line and a
suggestion, which ``main`` prints. All paths of ``-o FILE`` are checked before any work is done, so a typing error in the second
does not cost the first. Importing this imports neither JAX nor schedules, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jaxpipe.errors import ConfigError
from jaxpipe.text import closest

_NUMBER_LIKE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` where argparse would print usage and exit. Flags can't be abbreviated."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments.

        Raises:
            ConfigError: an unknown flag (with the closest known one), a stray argument, or a bad value.
            SystemExit: after ``--help``.
        """
        joined = self._join_negative_values(argv)
        # unknown flags first: argparse would complain of a required flag that is missing because this one is misspelt
        for argument in joined:
            flag = argument.split("=", 1)[0] if argument.startswith("--") else argument[:2]
            if argument.startswith("-") and len(argument) > 1 and flag not in self._option_string_actions:
                self._refuse(argument)
        # intermixed, as overrides (section.key=value) may stand before, between and after flags
        arguments, extra = self.parse_known_intermixed_args(joined)
        if extra:
            self._refuse(extra[0])
        return arguments

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (see '{self.prog} --help')")

    def _refuse(self, argument: str) -> NoReturn:
        if argument.startswith("-"):
            flag = argument.split("=", 1)[0]
            hint = closest(flag, self._option_string_actions) if len(flag) > 2 else ""
            self.error(f"unknown flag {flag!r}{hint}")
        self.error(f"unexpected argument {argument!r}")

    def _join_negative_values(self, argv: Sequence[str]) -> list[str]:
        """Rewrite ``--cost -1,1,1`` as ``--cost=-1,1,1``, so that argparse reads a negative value, not an unknown flag."""
        joined: list[str] = []
        for argument in argv:
            if joined and joined[-1] in self._option_string_actions and _NUMBER_LIKE.match(argument):
                joined[-1] += f"={argument}" if joined[-1].startswith("--") else argument
            else:
                joined.append(argument)
        return joined


def add_value(
    where: argparse._ActionsContainer,
    flags: str,
    metavar: str,
    kind: Callable[[str], Any],
    text: str,
    default: Any = None,
    **options: Any,
) -> None:
    """Add a flag, ``--long`` or ``-s --long``, that takes one value of a ``kind``, such as :func:`amount`; its help is ``text``
    and the default. ``options`` go to ``add_argument``."""
    shown = "" if default is None else f" (default {default if isinstance(default, str) else format(default, 'g')})"
    where.add_argument(*flags.split(), metavar=metavar, type=kind, default=default, help=text + shown, **options)


def add_switch(where: argparse._ActionsContainer, flag: str, text: str) -> None:
    """Add a flag without a value."""
    where.add_argument(flag, action="store_true", help=text)


def add_json_flag(where: argparse._ActionsContainer, text: str = "print one JSON document instead of text") -> None:
    """Add ``--json``."""
    add_switch(where, "--json", text)


def add_repeated(where: argparse._ActionsContainer, flags: str, metavar: str, text: str, **options: Any) -> None:
    """Add a flag that may be given several times: a list of strings."""
    where.add_argument(*flags.split(), metavar=metavar, action="append", help=text, **{"default": [], **options})


def whole_number(name: str, most: int, *, least: int = 1) -> Callable[[str], int]:
    """Return the type of a flag that counts ``name``: an integer from ``least`` to ``most``."""

    def convert(text: str) -> int:
        # int() alone would also read 1_000, blanks and digits of other scripts
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; want {least} to {most} {name}")
        if len(text) > 18 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} {name} can't be; want {least} to {most}")
        return int(text)

    return convert


def amount(name: str, *, least: float = 0, most: float = math.inf, zero: bool = True) -> Callable[[str], float]:
    """Return the type of a flag for a finite ``name`` from ``least`` (or above 0, if not ``zero``) to ``most``."""
    low = f"at least {least:g}" if zero else "above 0"
    expected = f"want a number {low}" + (f" and at most {most:g}" if most < math.inf else "")

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name} {text!r} is not a number; {expected}") from None
        if not math.isfinite(value) or value < least or value > min(most, 1e15) or (value == 0 and not zero):
            raise argparse.ArgumentTypeError(f"{name} is {text}; {expected}")
        return value

    return convert


def cost_triple(text: str) -> tuple[float, ...]:
    """Convert ``--cost``: three numbers F,B,W, each at least 0 and not all 0."""
    costs = _costs(text, "FBW", "three as F,B,W, such as 1,1,1")
    if sum(costs) == 0:
        raise argparse.ArgumentTypeError("all three costs are 0; at least one must take time")
    return costs


def cost_pair(text: str) -> tuple[float, ...]:
    """Convert ``--head``: two numbers S,T, each at least 0."""
    return _costs(text, "ST", "two as S,T, such as 0.5,0.5")


def reduction_pair(text: str) -> tuple[float, ...]:
    """Convert ``--reduction``: two numbers R,G, each at least 0."""
    return _costs(text, "RG", "two as R,G, such as 0.5,0.25")


def collective_times(text: str) -> tuple[float, ...]:
    """Convert ``--tp-comm``: the collectives of F and B, or one number for both, each at least 0."""
    return _costs(text if "," in text else f"{text},{text}", "FB", "one, or two as F,B, such as 0.5,0.8")


def _costs(text: str, ops: str, expected: str) -> tuple[float, ...]:
    parts = text.split(",")
    if len(parts) != len(ops):
        raise argparse.ArgumentTypeError(f"{text!r} has {len(parts)} value{'s' * (len(parts) != 1)}; want {expected}")
    return tuple(amount(f"cost of {op}")(part.strip()) for op, part in zip(ops, parts, strict=True))


SCHEDULE_SUFFIXES = (".sched", ".json", ".csv")
PICTURE_SUFFIXES = (".svg", ".png", ".html", ".trace.json")


def add_output_flag(parser: argparse.ArgumentParser, suffixes: Sequence[str], *, required: bool = False) -> None:
    """Add ``-o``/``--output``."""
    text = f"write FILE, in the form its suffix names: {' '.join(suffixes)} (repeatable)"
    add_repeated(parser, "-o --output", "FILE", text, required=required)


def add_costs_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``-o``/``--output`` to a verb that measures costs."""
    add_value(parser, "-o --output", "FILE", str, "write the cost profile as JSON (for --costs of the schedule verbs)")


def check_output(path: str | None, suffixes: Sequence[str], flag: str = "-o") -> None:
    """Run :func:`check_outputs` on one optional path."""
    check_outputs([path] if path else [], suffixes, flag)


def check_outputs(paths: Sequence[str], suffixes: Sequence[str], flag: str = "-o") -> None:
    """Refuse paths, given as ``flag``, that can't be written.

    Raises:
        ConfigError: an unknown suffix, a directory, a missing or unwritable folder, a null byte, or a path given twice.
    """
    for k, path in enumerate(paths):
        if "\0" in path:
            raise ConfigError(f"{flag} {path!r}: a path can't hold a null byte")
        suffix = suffix_of(path)
        if suffix not in suffixes:
            raise ConfigError(
                f"{flag} {path!r}: unknown suffix {suffix!r}{closest(suffix, suffixes)}; use one of {' '.join(suffixes)}"
            )
        where = Path(path)
        # os.access answers for the moment only, but catches what users do: the write itself may still fail
        if where.is_dir():
            raise ConfigError(f"{flag} {path!r} is a directory; name a file in it")
        if not where.parent.is_dir():
            raise ConfigError(f"{flag} {path!r}: there is no directory {str(where.parent)!r}; create it first")
        if not os.access(where if where.exists() else where.parent, os.W_OK):
            raise ConfigError(f"{flag} {path!r} can't be written: permission denied")
        if path in paths[:k]:
            raise ConfigError(f"{flag} {path!r} is given twice")


def suffix_of(path: str) -> str:
    """Return the suffix that decides the format: ``.trace.json`` counts as one."""
    name = Path(path).name.lower()
    return ".trace.json" if name.endswith(".trace.json") else Path(name).suffix


def is_picture(path: str) -> bool:
    """Return whether ``path`` names a picture (or trace) rather than a schedule."""
    return suffix_of(path) in PICTURE_SUFFIXES


def notice(text: str) -> None:
    """Print a line to stderr, where it never mixes with results."""
    print(text, file=sys.stderr, flush=True)


def print_json(document: object) -> None:
    """Print one JSON document; nothing else goes to stdout with ``--json``."""
    # NaN and Infinity are no JSON: better an error here than in the reader's parser
    print(json.dumps(document, allow_nan=False))


_MOST = 65536
_FLAGS = {
    "pp": ("pipeline.ranks", "pipeline ranks"),
    "tp": ("pipeline.tp", "tensor-parallel devices of each rank"),
    "cp": ("pipeline.cp", "devices of each rank that share each sequence"),
    "dp": ("pipeline.dp", "data-parallel devices of each rank"),
    "ep": ("pipeline.ep", "devices of those of dp that share the experts of a layer"),
}
AUTO = "auto"
"""The value of ``--dp`` that stands for as many as there are devices for."""


def add_parallel_flags(parser: argparse.ArgumentParser, *, fills: bool = False) -> None:
    """Add the flags; each is None unless given. ``fills``: the command has devices to fill with ``--dp auto``."""
    for flag, (key, text) in _FLAGS.items():
        number, may_fill = whole_number(text, _MOST), fills and flag == "dp"
        more = f", or {AUTO}: as many as there are devices; run.batch stays" if may_fill else ""
        kind = partial(_number_or_auto, number) if may_fill else number
        parser.add_argument(f"--{flag}", type=kind, metavar="N", help=f"{text}: short for {key}=N{more}")


def _number_or_auto(number: Callable[[str], int], text: str) -> int | str:
    return AUTO if text == AUTO else number(text)


def with_parallel_flags(args: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the flags, followed by ``overrides``.

    Raises:
        ConfigError: a flag and an override say different things about one setting.
    """
    # compared as texts, as neither has been decoded: 04 for 4 is refused, which is odd but safe
    flag_values = {key: (f"--{flag}", getattr(args, flag)) for flag, (key, _) in _FLAGS.items() if getattr(args, flag)}
    for override in overrides:
        key, _, text = override.partition("=")
        flag, number = flag_values.get(key.strip(), ("", None))
        if number is not None and text.strip() != str(number):
            raise ConfigError(f"{flag} {number} and {override!r} contradict each other: give one of them")
    numbers = [f"{key}={number}" for key, (_, number) in flag_values.items() if number != AUTO]
    return numbers + list(overrides)


MOST_RANKS, MOST_MICROBATCHES, MOST_CHUNKS, MOST_ACTIONS = 4096, 1_000_000, 1024, 2_000_000
MOST_LAYERS = MOST_RANKS * MOST_CHUNKS
DEFAULT_SIZES = {"ranks": 4, "microbatches": 8}
FREE_CHUNKS = 4
"""Chunks per rank that are tried where chunks cost nothing: 32 layers on 8 ranks make four."""
TRAVERSE = "traverse"
PLACEMENTS = ("one-to-one", "circular", "v", "wave", "bidirectional")
"""The names of :data:`~jaxpipe.schedule.placement.CONSTRUCTORS`, so that ``--help`` need not import them."""
MOST_STEPS = 1000
_MOST_WORKERS = 256
_MOST_SEEDS = 2**31 - 1
OUTPUTS = (*SCHEDULE_SUFFIXES, *PICTURE_SUFFIXES)
PLOTS = (".svg", ".png", ".html")
TIMELINE_SUFFIX = ".timeline.json"
PLOT_OUTPUTS = (*PICTURE_SUFFIXES, ".json")
_FILE_RULES = (
    "A .sched file may hold 'rank N: F0.0 BW0.0 ...' lines only. A row is the order in which a rank issues; a copy to the host "
    "or back (O, L) starts once the compute slot before it in its row has ended, so an O belongs right behind its F."
)


_FAMILY_DEFAULT = "the family's own"


def _add_size_flags(parser: argparse.ArgumentParser, *, from_file: bool = False, chunks: str = _FAMILY_DEFAULT) -> None:
    """Add ``--ranks --microbatches --chunks``; with ``from_file`` they have no default and only confirm what the file says.
    ``chunks``: the help's word for the default of that flag."""
    group = parser.add_argument_group("sizes", "must agree with the file" if from_file else "")
    sizes = (("ranks", "P", MOST_RANKS), ("microbatches", "M", MOST_MICROBATCHES), ("chunks", "V", MOST_CHUNKS))
    for name, metavar, most in sizes:
        default = None if from_file else DEFAULT_SIZES.get(name)
        text = f"number of {name}" if from_file or default else f"chunks per rank (default: {chunks})"
        add_value(group, f"--{name}", metavar, whole_number(name, most), text, default)


def _add_chunk_limit_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--layers --max-chunks``: how many chunks per rank may be tried."""
    group = parser.add_argument_group("chunks", "more of them shorten the bubble, and cost transfers: see --comm")
    add_value(
        group, "--layers", "N", whole_number("layers", MOST_LAYERS), "layers of the model: ranks x chunks at most"
    )
    text = f"chunks per rank that are tried, at most (default: {FREE_CHUNKS} where --comm is 0)"
    add_value(group, "--max-chunks", "V", whole_number("chunks", MOST_CHUNKS), text)


def _add_group_flag(parser: argparse.ArgumentParser, default: str = _FAMILY_DEFAULT) -> None:
    """Add ``--group``."""
    text = f"microbatches that run in turn through one chunk, for families that take it (default: {default})"
    add_value(parser, "--group", "G", whole_number("group", MOST_MICROBATCHES), text)


def _add_cost_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--cost --comm --w-residual --offload-time --tp-comm --tp-collectives --reduction --host-link --costs``."""
    text = "one rank's share of one microbatch; divided by the chunks of the schedule"
    group = parser.add_argument_group("costs", text)
    add_value(group, "--cost", "F,B,W", cost_triple, "time of F, B and W (default 1,1,1)")
    add_value(group, "--comm", "C", amount("time of a transfer"), "time until another rank has a result (default 0)")
    text = "fraction of an activation kept from B's end to W's end (default 1)"
    add_value(group, "--w-residual", "X", amount("fraction", most=1), text)
    text = "time to copy a share's activations to the host and back (0: free); required for schedules that offload"
    add_value(group, "--offload-time", "T", amount("offload time"), text)
    text = "time of the collectives (tp, cp, experts) of a share's F and of its B, or of each of the two (default 0)"
    add_value(group, "--tp-comm", "F[,B]", collective_times, text)
    text = "number of these collectives in each stage; two per layer are usual (default 1)"
    add_value(group, "--tp-collectives", "N", whole_number("number of collectives", MOST_CHUNKS), text)
    text = "time of R and G, which a rank's data parallelism takes once a step: reduction, gather (default 0,0)"
    add_value(group, "--reduction", "R,G", reduction_pair, text)
    add_value(group, "--costs", "FILE", str, "profile (JSON) of seconds and bytes per stage, in place of these flags")
    text = "whether copies to the host and back share one lane (default: duplex, or what --costs says)"
    group.add_argument("--host-link", choices=("shared", "duplex"), help=text)


def _add_head_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--head``."""
    text = "time of S and T, the two passes of a rank's part of the head, in vocab-... schedules (default 0,0)"
    add_value(parser, "--head", "S,T", cost_pair, text)


def _add_braid_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--braid``."""
    text = "run two neighbouring actions as one slot where that overlaps collectives and saves time"
    add_switch(parser, "--braid", text)


def _add_objective_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--objective``."""
    text = "what to minimise: the makespan (default), or the longest span of a rank"
    parser.add_argument("--objective", choices=("makespan", "span"), default="makespan", help=text)


def _add_pass_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--separate --braid``."""
    text = "split full backwards and put their weight gradients into bubbles, where that saves time within the memory limit"
    add_switch(parser, "--separate", text)
    _add_braid_flag(parser)


def _add_limit_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--memory-limit``."""
    text = "live activations allowed on a rank, in its share of one microbatch (1F1B needs p)"
    add_value(parser, "--memory-limit", "L", amount("limit", zero=False), text)


def _add_traverse_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--placement --rules --unit-steps``."""
    group = parser.add_argument_group("traverse", "for 'jaxpipe schedule traverse': an order by rules")
    group.add_argument("--placement", choices=PLACEMENTS, help="placement of stages on ranks (default: one-to-one)")
    text = (
        "such as 'interleaved forward=breadth:4 backward=depth:4 in-flight=4,3,2,1', or FILE.py:NAME: a Traversal, a mapping "
        "from ranks to them, or a function (placement, microbatches) that gives one"
    )
    add_value(group, "--rules", "RULES", str, text)
    add_switch(group, "--unit-steps", "order actions as if each took one step (default: by the costs)")
    group.add_argument("--steps", dest="unit_steps", action="store_true", help=argparse.SUPPRESS)  # its name of before


def configure_schedules(parser: argparse.ArgumentParser) -> None:
    add_json_flag(parser)


def configure_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a family ('jaxpipe schedules' lists them), or traverse")
    _add_size_flags(parser)
    _add_group_flag(parser)
    _add_traverse_flags(parser)
    _add_cost_flags(parser)
    _add_head_flag(parser)
    _add_limit_flag(parser)
    _add_objective_flag(parser)
    _add_pass_flags(parser)
    text = "offload up to this fraction of each rank's activations to the host, the longest lived first"
    add_value(parser, "--offload", "FRACTION", amount("fraction", most=1), text)
    add_output_flag(parser, OUTPUTS)
    add_json_flag(parser)


def configure_simulate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _FILE_RULES
    parser.add_argument("file", metavar="FILE", help="a schedule: .sched, .json or .csv (PyTorch's formats)")
    _add_size_flags(parser, from_file=True)
    _add_cost_flags(parser)
    _add_head_flag(parser)
    _add_limit_flag(parser)
    _add_pass_flags(parser)
    group = parser.add_argument_group("several steps", "one after another, with the optimizer's update between them")
    text = "number of steps; reports the time from one step to the next"
    add_value(group, "--steps", "N", whole_number("steps", MOST_STEPS, least=2), text)
    add_value(group, "--update", "T", amount("time of an update"), "time of a rank's update (default 0)")
    text = "ranks update without waiting for each other; the update is validated before the rank's first backward"
    add_switch(group, "--post-validation", text)
    add_output_flag(parser, OUTPUTS)
    add_json_flag(parser)


def _add_choice_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags of ``compare`` and ``best``. ``default``: chunks and groups that are tried."""
    text = "schedules (.sched .json .csv) to compare with the families; all of one size, which becomes the default"
    parser.add_argument("files", metavar="FILE", nargs="*", help=text)
    _add_size_flags(parser, chunks=default)
    parser.set_defaults(ranks=None, microbatches=None)
    _add_chunk_limit_flags(parser)
    _add_group_flag(parser, default)
    _add_cost_flags(parser)
    _add_limit_flag(parser)
    _add_pass_flags(parser)


def configure_compare(parser: argparse.ArgumentParser) -> None:
    _add_choice_flags(parser, "the family's own; with --explore, several")
    text = "let each family choose its best chunks, group and limit (slower); without it, its own defaults"
    add_switch(parser, "--explore", text)
    text = f"draw peak memory against bubble with the Pareto front: {' '.join(PLOTS)}"
    add_value(parser, "--plot", "FILE", str, text)
    add_json_flag(parser)


def configure_best(parser: argparse.ArgumentParser) -> None:
    _add_choice_flags(parser, "several, for each family")
    _add_objective_flag(parser)
    text = "time limit in seconds; then the best schedule so far is the result"
    add_value(parser, "--time-limit", "S", amount("time limit", zero=False), text)
    add_output_flag(parser, OUTPUTS)
    add_json_flag(parser)


def configure_solve(parser: argparse.ArgumentParser) -> None:
    _add_size_flags(parser, chunks="those of the placements that families use")
    parser.set_defaults(ranks=None, microbatches=None)
    _add_chunk_limit_flags(parser)
    text = "placement of stages on ranks (default: all that suit the number of chunks)"
    parser.add_argument("--placement", choices=("auto", *PLACEMENTS), default="auto", help=text)
    text = "start from this schedule and keep its placement, which may be any graph of stages; sizes are the file's"
    add_value(parser, "--start", "FILE", str, text)
    _add_cost_flags(parser)
    _add_limit_flag(parser)
    text = "limit on a rank's activations that are on the host or in transfer at a time"
    add_value(parser, "--offloads-in-flight", "N", whole_number("offloads in flight", MOST_MICROBATCHES, least=0), text)
    _add_braid_flag(parser)
    group = parser.add_argument_group("search")
    text = "minimise the makespan (default), the longest span of a rank, or makespan, then peak, then what is offloaded"
    group.add_argument("--objective", choices=("makespan", "span", "lexicographic"), default="makespan", help=text)
    text = "seconds to search, up to 15 more until quick families have been tried; Ctrl-C ends it with the best so far"
    add_value(group, "--time-limit", "S", amount("time limit", zero=False), text, 60.0)
    add_value(group, "--seed", "N", whole_number("seed", _MOST_SEEDS, least=0), "seed of the search", 0)
    add_value(group, "--workers", "N", whole_number("workers", _MOST_WORKERS), "worker processes", 2)
    text = "same flags, same schedule: --time-limit counts deterministic time, and the cache is not used"
    add_switch(group, "--reproducible", text)
    add_switch(group, "--no-cache", "neither use nor fill the cache of solved problems")
    add_output_flag(parser, OUTPUTS)
    add_json_flag(parser)


def configure_plot(parser: argparse.ArgumentParser) -> None:
    text = f"a schedule (.sched .json .csv) or a recorded timeline ({TIMELINE_SUFFIX}); the first is drawn on top"
    parser.add_argument("files", metavar="FILE", nargs="+", help=text)
    add_output_flag(parser, PLOT_OUTPUTS, required=True)
    parser.add_argument("--title", help="heading of the picture (default: the schedules' names)")
    _add_cost_flags(parser)


def configure_cache(parser: argparse.ArgumentParser) -> None:
    text = "'ls' lists the problems that were solved; 'clear' removes them, and no other file of the folder"
    parser.add_argument("action", metavar="ACTION", help=text)
    text = "the cache's folder (default: $JAXPIPE_CACHE_DIR, else jaxpipe/schedules in $XDG_CACHE_HOME or ~/.cache)"
    add_value(parser, "--dir", "DIR", str, text)
    add_json_flag(parser)
