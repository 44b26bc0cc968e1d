"""Read the flags that several schedule verbs share: sizes, costs, memory limit; and build the cost profile they describe.

Costs given as ``--cost F,B,W`` are one rank's share of one microbatch and are divided by the chunks of the schedule; a file
given as ``--costs`` has an entry per stage and is used as it is.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpipe.cli.schedule_flags import DEFAULT_SIZES, FREE_CHUNKS, MOST_ACTIONS
from jaxpipe.errors import ConfigError
from jaxpipe.plot.figure import Units
from jaxpipe.schedule import CostProfile, Placement, Schedule, Timeline, read_costs
from jaxpipe.schedule.memory import UNPRICED, offloaded_share
from jaxpipe.schedule.tolerance import at_most


def most_chunks(arguments: argparse.Namespace, costs: CostChoice) -> int | None:
    """Return the most chunks per rank that may be tried; None: as many as the families try by themselves.

    Raises:
        ConfigError: fewer layers than ranks, or ``--chunks`` above the limit.
    """
    limits = {"--max-chunks": arguments.max_chunks}
    if arguments.layers is not None:
        if arguments.layers < arguments.ranks:
            raise ConfigError(
                f"--layers {arguments.layers} can't be spread over {arguments.ranks} ranks; lower --ranks"
            )
        limits["--layers"] = arguments.layers // arguments.ranks
    most, flag = min(((limit, flag) for flag, limit in limits.items() if limit is not None), default=(None, ""))
    if most is not None and arguments.chunks is not None and arguments.chunks > most:
        raise ConfigError(f"--chunks {arguments.chunks} contradicts {flag}, which allows {most} per rank")
    return FREE_CHUNKS if most is None and chunks_are_free(arguments, costs) else most


def chunks_are_free(arguments: argparse.Namespace, costs: CostChoice) -> bool:
    """Return whether no flag or profile limits the number of chunks: no transfer time, no limit, no profile."""
    constraints = (arguments.layers, arguments.max_chunks, arguments.chunks, costs.profile)
    return not costs.comm and all(x is None for x in constraints)


_UNIFORM = ("cost", "head", "comm", "w_residual", "offload_time", "tp_comm", "tp_collectives")
"""Flags that a file given as ``--costs`` replaces."""


@dataclass(frozen=True, slots=True)
class CostChoice:
    """The costs that a user chose: a profile read from ``path``, or uniform costs with the values of ``flags``."""

    path: str | None
    profile: CostProfile | None
    flags: Mapping[str, Any]

    @property
    def comm(self) -> float:
        return float(self.flags.get("comm", 0.0))

    @property
    def offload_time(self) -> float | None:
        """The time of an offload in the unit of the costs, or None if no flag describes the host link; see
        :func:`check_copies`."""
        return self.flags.get("offload_time")

    @property
    def units(self) -> Units:
        """A profile from a file is in seconds and bytes; costs given as flags are in whatever unit their user means."""
        return "si" if self.profile is not None else "plain"

    def describe(self) -> str:
        """Describe the costs in a few words, for a heading."""
        if self.path is not None:
            return f"costs of {Path(self.path).name}"
        parts = ["F, B, W = " + ", ".join(f"{x:g}" for x in self.flags.get("cost", (1, 1, 1)))]
        parts += ["S, T = " + ", ".join(f"{x:g}" for x in self.flags["head"])] if "head" in self.flags else []
        parts += [f"transfers {self.comm:g}"] if self.comm else []
        parts += [f"TP collectives {self.flags['tp_comm']:g}"] if self.flags.get("tp_comm") else []
        parts += [f"offload {self.offload_time:g}"] if self.offload_time is not None else []
        return ", ".join(parts)

    def for_placement(self, placement: Placement, name: str) -> CostProfile:
        """Return the profile for a schedule called ``name``.

        Raises:
            ConfigError: the file has another number of stages.
        """

        if self.profile is None:
            # flags that were not given are absent here, so that CostProfile.on has the only table of defaults
            uniform_costs = {name: value for name, value in self.flags.items() if name != "cost"}
            uniform_costs |= zip("fbw", self.flags.get("cost", ()), strict=False)
            if "head" in uniform_costs and len(placement.trunk) == placement.num_stages:
                raise ConfigError(f"{name} does not divide the head, so --head does not apply; use vocab-1f1b")
            return CostProfile.on(placement, source="command line", **uniform_costs)
        if self.profile.num_stages != placement.num_stages:
            raise ConfigError(
                f"{self.path}: costs of {self.profile.num_stages} stages, but {name} with {placement.num_ranks} ranks and "
                f"{placement.num_chunks} chunks per rank has {placement.num_stages} stages"
            )
        return self.profile


def chosen_costs(arguments: argparse.Namespace) -> CostChoice:
    """Build the costs from the flags.

    Raises:
        ConfigError: ``--costs`` together with a flag it replaces.
        JaxpipeError, OSError: the file can't be read.
    """
    flags = {name: value for name in _UNIFORM if (value := getattr(arguments, name, None)) is not None}
    link = arguments.host_link
    if arguments.costs is None:
        return CostChoice(None, None, flags if link is None else {**flags, "host_mode": link})
    if flags:
        raise ConfigError(
            f"--costs FILE and --{next(iter(flags)).replace('_', '-')} contradict each other; give one of them"
        )

    require_file(arguments.costs)
    profile = read_costs(arguments.costs)
    # --host-link is no replacement of the file's costs but a question about them: what if the lanes were shared?
    if link is not None:
        profile = replace(profile, host=replace(profile.host, mode=link))
    return CostChoice(arguments.costs, profile, flags)


def check_size(ranks: int, microbatches: int, chunks: int) -> None:
    """Refuse sizes whose schedule would not fit a picture, a file or this machine.

    Raises:
        ConfigError: more than ``MOST_ACTIONS`` pairs of stage and microbatch.
    """
    pairs = ranks * microbatches * chunks
    if pairs > MOST_ACTIONS:
        fitting = MOST_ACTIONS // (ranks * chunks) or 1
        raise ConfigError(
            f"too large: {ranks} ranks x {chunks} chunk(s) x {microbatches} microbatches are {pairs} pairs of stage and "
            f"microbatch, and at most {MOST_ACTIONS} are handled; lower one, for example --microbatches {fitting}"
        )


def check_agreement(arguments: argparse.Namespace, schedules: Mapping[str, Schedule], flags: Iterable[str]) -> None:
    """Refuse schedules, keyed by file, that differ in size, and size flags that differ from them.

    Raises:
        ConfigError: names the flag and both values, or the files.
    """
    for flag in flags:
        sizes = {path: getattr(schedule, f"num_{flag}") for path, schedule in schedules.items()}
        for first, path in itertools.pairwise(sizes):
            if sizes[first] != sizes[path]:
                raise ConfigError(
                    f"{first} has {sizes[first]} {flag} and {path} has {sizes[path]}; compare schedules of one size"
                )
        flag_value = getattr(arguments, flag)
        for path, size in sizes.items():
            if flag_value not in (None, size):
                raise ConfigError(f"--{flag} {flag_value} contradicts {path}, which has {size} {flag}")


def set_sizes(arguments: argparse.Namespace, schedules: Mapping[str, Schedule]) -> None:
    """Set ``--ranks`` and ``--microbatches`` to those of the schedules, keyed by file; without schedules the flags or
    defaults hold.

    Raises:
        ConfigError: as :func:`check_agreement`.
    """
    check_agreement(arguments, schedules, DEFAULT_SIZES)
    for flag, default in DEFAULT_SIZES.items():
        sizes = [getattr(schedule, f"num_{flag}") for schedule in schedules.values()] + [getattr(arguments, flag)]
        setattr(arguments, flag, sizes[0] or default)


def check_copies(schedule: Schedule, profile: CostProfile, costs: CostChoice) -> None:
    """Refuse a schedule that offloads where nothing says how long that takes. ``--offload-time 0`` says it.

    Raises:
        ConfigError: names the schedule and the flag.
    """
    if costs.offload_time is not None or any(profile.offload_s) or any(profile.load_s):
        return

    # a silent 0 would let schedules that offload win every comparison
    if offloaded_share(schedule, profile) > 0:
        raise ConfigError(f"{schedule.name} {UNPRICED}")


def check_limit(timeline: Timeline, limit: float | None) -> None:
    """Refuse a schedule that needs more than ``--memory-limit``.

    Raises:
        ConfigError: names the rank with the highest peak.
    """

    peaks: Sequence[float] = timeline.peak_activations
    if limit is not None and peaks and not at_most(max(peaks), limit):
        rank = peaks.index(max(peaks))
        raise ConfigError(
            f"{timeline.name} holds {max(peaks):g} activations on rank {rank}, above --memory-limit {limit:g}"
        )


def require_file(path: str) -> None:
    """Refuse a path that is not a readable regular file.

    Raises:
        ConfigError: it does not exist, is a directory or no regular file (reading a pipe could take for ever).
    """
    where = Path(path)
    if where.is_dir():
        raise ConfigError(f"{path!r} is a directory; want a file")
    if not where.exists():
        from jaxpipe.schedule.families import FAMILIES, VOCABULARY_FAMILIES

        family = path in FAMILIES or path in VOCABULARY_FAMILIES
        advice = f": 'jaxpipe schedule {path} -o {path}.sched' makes a file of that family" if family else ""
        raise ConfigError(f"{path!r} does not exist{advice}")
    if not where.is_file():
        raise ConfigError(f"{path!r} is not a regular file; want one")
