"""Add the flags of the schedule verbs. Imports no schedules, so that ``--help`` is fast."""

from __future__ import annotations

import argparse

from jaxpipe.cli.flags import (
    PICTURE_SUFFIXES,
    SCHEDULE_SUFFIXES,
    add_json_flag,
    add_output_flag,
    add_switch,
    add_value,
    amount,
    cost_pair,
    cost_triple,
    whole_number,
)

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
    """Add ``--cost --comm --w-residual --offload-time --tp-comm --tp-collectives --host-link --costs``."""
    text = "one rank's share of one microbatch; divided by the chunks of the schedule"
    group = parser.add_argument_group("costs", text)
    add_value(group, "--cost", "F,B,W", cost_triple, "time of F, B and W (default 1,1,1)")
    add_value(group, "--comm", "C", amount("time of a transfer"), "time until another rank has a result (default 0)")
    text = "fraction of an activation kept from B's end to W's end (default 1)"
    add_value(group, "--w-residual", "X", amount("fraction", most=1), text)
    text = "time to copy a share's activations to the host and back (0: free); required for schedules that offload"
    add_value(group, "--offload-time", "T", amount("offload time"), text)
    text = "time of the tensor-parallel collectives of a share's F, and the same again of its B (default 0)"
    add_value(group, "--tp-comm", "T", amount("time of TP collectives"), text)
    text = "number of these collectives in each stage; two per layer are usual (default 1)"
    add_value(group, "--tp-collectives", "N", whole_number("number of collectives", MOST_CHUNKS), text)
    add_value(group, "--costs", "FILE", str, "profile (JSON) of seconds and bytes per stage, in place of these flags")
    text = "whether copies to the host and back share one lane (default: duplex, or what --costs says)"
    group.add_argument("--host-link", choices=("shared", "duplex"), help=text)


def _add_head_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--head``."""
    text = "time of S and T, the two passes of a rank's part of the head, in vocab-... schedules (default 0,0)"
    add_value(parser, "--head", "S,T", cost_pair, text)


def _add_braid_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--braid``."""
    text = "run two neighbouring actions as one slot where that overlaps TP collectives and saves time"
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
