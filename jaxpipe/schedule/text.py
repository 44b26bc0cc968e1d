"""Schedules and timelines as text: the form of a schedule that ``str(schedule)`` prints, its strict parser, and a picture.

::

    # jaxpipe schedule 1
    name: 1f1b
    microbatches: 2
    placement: one-to-one ranks=2
    edges: chain
    rank 0: F0.0 F0.1 BW0.0 BW0.1
    rank 1: F1.0 BW1.0 F1.1 BW1.1

Placements that a constructor makes are written by its arguments (``circular ranks=4 chunks=2``); others list their flows,
stage by stage, groups joined by ``+`` (``two-towers ranks=3 flow=0,1,0+1+2``). Edges are ``chain``, ``none`` or a list
(``0->2 1->2``). A line ``spans: 1 1 4`` follows where a stage runs once for several microbatches. Braided slots print as
``F3.5+BW1.2``. Names that would not survive as bare text are JSON strings. Blank lines and lines that start with ``#`` are
skipped. ``parse_schedule(str(s)) == s``; user ops must be registered before parsing.

Written by hand, the ``rank`` lines alone will do: the name is then the file's, the rest is inferred (:func:`schedule_of`), as
for the other files that hold no more than rows: PyTorch's CSV, JSON with ``rows`` only. Stages are then taken for a chain; a
stage runs where its actions stand, for one flow of microbatches or two.

The picture (:func:`draw`) of a timeline has one line per rank, one column per unit of time. It is for docstrings, terminals and
tests; :mod:`jaxpipe.plot` draws the real pictures. A cell holds op and microbatch (``F0``); an
action longer than one column goes on in dashes, and the second, third, … chunk of a rank is marked ``b``, ``c``, …::

    rank 0 |F0 F1 F2 F3 BW0-- …
    rank 1 |   F0 F1 BW0-- F2 …

Host lanes, transfers to other ranks and what takes no time are left out. Times that are no multiple of the unit are rounded
to a column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import NoReturn

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.files import located
from jaxpipe.schedule.ir import FIRST_LINE, Action, Braid, Row, Schedule, Slot, is_op, registered_ops
from jaxpipe.schedule.placement import CONSTRUCTORS, Edges, Placement, chain
from jaxpipe.schedule.timeline import Event, Timeline, chunks_in
from jaxpipe.text import closest, truncate

MAX_STAGES = 1_000_000

Homes = dict[int, dict[int, set[int]]]
"""stage -> microbatch -> ranks that run it."""


def schedule_of(name: str, rows: Sequence[Row]) -> Schedule:
    """Return the schedule called ``name`` with these rows. Raises as :func:`infer_placement`."""
    return Schedule(name, infer_placement(rows), infer_microbatches(rows), tuple(rows))


def infer_microbatches(rows: Sequence[Row]) -> int:
    """One more than the highest microbatch; 0 without actions."""
    return 1 + max((a.microbatch for row in rows for slot in row for a in slot.actions), default=-1)


def infer_placement(rows: Sequence[Row]) -> Placement:
    """Return the simplest placement in which every action of rank r stands in ``rows[r]``.

    Raises:
        ScheduleError: there is no action, stage numbers have gaps, or a stage moves between ranks in no pattern that a
            placement can say.
    """
    homes: Homes = {}
    for rank, row in enumerate(rows):
        for slot in row:
            for action in slot.actions:
                homes.setdefault(action.stage, {}).setdefault(action.microbatch, set()).add(rank)
    if not homes:
        raise ScheduleError("the rows hold no action; write one row per rank")
    num_ranks, num_stages = len(rows), len(homes)
    if max(homes) >= num_stages:
        gap = next(s for s in range(num_stages) if s not in homes)
        raise ScheduleError(
            f"stage {gap} runs nowhere, but stage {max(homes)} exists; number stages from 0 without gaps"
        )
    # one flow of microbatches, or two that alternate (bidirectional)
    flows = _flows(homes, 1) or _flows(homes, 2)
    if flows is None:
        stage = next(s for s in range(num_stages) if _flows({0: homes[s]}, 1) is None)
        ranks = sorted(set().union(*homes[stage].values()))
        raise ScheduleError(
            f"stage {stage} runs on ranks {', '.join(map(str, ranks))}, changing from microbatch to microbatch: "
            "no placement fits; is an action in the wrong row?"
        )
    chunks, rest = divmod(num_stages, num_ranks)
    # the first placement by name that fits; kinds are tried in the order of the table
    for names, make in CONSTRUCTORS.values() if not rest and num_stages <= MAX_STAGES else ():
        placement = make(num_ranks, chunks) if "chunks" in names else make(num_ranks)
        if placement.flows == flows:
            return placement
    return Placement("explicit", num_ranks, flows, chain(num_stages))


def _flows(homes: Homes, num_flows: int) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    """Groups per flow and stage, if every stage stays with one group per flow."""
    groups_of = [
        [{tuple(sorted(ranks)) for i, ranks in homes[s].items() if i % num_flows == k} for s in range(len(homes))]
        for k in range(num_flows)
    ]
    if any(len(groups) != 1 for flow in groups_of for groups in flow):
        return None
    return tuple(tuple(groups.pop() for groups in flow) for flow in groups_of)


_FEW_STAGES = 10_000  # up to which a placement may have more stages than the rows have actions

_ACTION = re.compile(r"([^\W\d]+)(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})")
_RANK = re.compile(r"rank (0|[1-9][0-9]*)")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_LISTS = ("spans", "detached")
_HEADERS = ("name", "microbatches", "placement", "edges", *_LISTS)
_EXCERPT = 60


def parse_schedule(text: str, path: str = "<text>") -> Schedule:
    """Return the schedule that ``text`` describes; its validity is the checker's business.

    Raises:
        ScheduleParseError: naming ``path``, the line, an excerpt and what to write instead.
    """
    return _Parser(text, path).schedule()


def parse_slot(token: str) -> Slot:
    """Return ``F2.0`` as an :class:`Action`, ``F3.5+BW1.2`` as a :class:`Braid`.

    Raises:
        ScheduleParseError: the token is malformed or names an op that is not registered.
    """
    actions = []
    for part in token.split("+"):
        match = _ACTION.fullmatch(part)
        if match is None:
            raise ScheduleParseError(
                f"{_clip(part)!r} is not an action; write op, stage, '.', microbatch, for example F2.0 (braided: F3.5+BW1.2)"
            )
        op, stage, microbatch = match.groups()
        if not is_op(op):
            op_names = sorted(spec.name for spec in registered_ops())
            raise ScheduleParseError(
                f"op {_clip(op)!r} in {_clip(part)!r} is not registered{_suggestion(op, op_names)} "
                "(register_op makes new ones, --import loads them)"
            )
        actions.append(Action(op, int(stage), int(microbatch)))
    return actions[0] if len(actions) == 1 else Braid(tuple(actions))


def _suggestion(word: str, names: Iterable[str]) -> str:
    return closest(word, names, f"; known: {' '.join(names)}")


def _clip(text: str) -> str:
    return truncate(text, _EXCERPT)


# Placements.


def _parse_placement(text: str, edges: str, lists: Sequence[str], num_rows: int, num_slots: int) -> Placement:
    """Parse a placement. Raises ScheduleError."""
    kind, arguments = _split_kind(text)
    sizes: dict[str, int] = {}
    flows: list[tuple[tuple[int, ...], ...]] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == "flow" and equals:
            flows.append(tuple(tuple(_number(r, argument) for r in group.split("+")) for group in value.split(",")))
        elif key not in ("ranks", "chunks") or not equals:
            near = _suggestion(key, ("ranks", "chunks", "flow"))
            raise ScheduleError(f"unknown placement argument {_clip(argument)!r}{near}")
        elif key in sizes:
            raise ScheduleError(f"placement argument {key!r} is given twice")
        else:
            sizes[key] = _number(value, argument)
    if "ranks" not in sizes:
        raise ScheduleError(f"the placement lacks its number of ranks; write for example '{_clip(kind)} ranks=4'")
    if sizes["ranks"] != num_rows:
        raise ScheduleError(
            f"the placement has {sizes['ranks']} ranks but there are {num_rows} 'rank' lines; is the file truncated?"
        )
    if not flows:
        flows = list(_construct(kind, sizes, num_slots).flows)
    span, detached = (tuple(_number(g, f"{key}: {x}") for g in x.split()) for key, x in zip(_LISTS, lists, strict=True))
    return Placement(kind, sizes["ranks"], tuple(flows), _parse_edges(edges, len(flows[0])), span, detached)


def _split_kind(text: str) -> tuple[str, list[str]]:
    if text.startswith('"'):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            raise ScheduleError("the kind of placement is not a JSON string; close its quotes") from None
        return str(value), text[end:].split()
    kind, *arguments = text.split() or [""]
    return kind, arguments


def _construct(kind: str, sizes: dict[str, int], num_slots: int) -> Placement:
    if kind not in CONSTRUCTORS:
        raise ScheduleError(
            f"unknown placement {_clip(kind)!r}{_suggestion(kind, CONSTRUCTORS)}; a placement of another kind lists its ranks "
            "stage by stage: flow=0,1,2"
        )
    size_names, make = CONSTRUCTORS[kind]
    if set(sizes) != set(size_names):
        raise ScheduleError(f"placement {kind!r} takes {' and '.join(size_names)}, got {' and '.join(sizes)}")
    stages = sizes["ranks"] * sizes.get("chunks", 1)
    if stages > MAX_STAGES:
        raise ScheduleError(f"the placement has more than {MAX_STAGES} stages; is the number of chunks right?")
    # sizes that the rows can't fill are a mistake, and would take memory before anyone noticed
    if stages > max(num_slots, _FEW_STAGES):
        raise ScheduleError(f"the placement has {stages} stages, but the rows hold {num_slots} actions in all")
    return make(**sizes)


def _parse_edges(text: str, num_stages: int) -> Edges:
    """Parse edges. Raises ScheduleError with ``edge`` in its text."""
    if text in ("chain", "none"):
        return chain(num_stages) if text == "chain" else ()
    advice = "write 'chain', 'none' or edges such as 0->2 1->2"
    if not text:
        raise ScheduleError(f"'edges:' is empty; {advice}")
    pairs = [word.partition("->") for word in text.split()]
    bad = next(("".join(pair) for pair in pairs if not pair[1]), None)
    if bad is not None:
        raise ScheduleError(f"{_clip(bad)!r} is not an edge; {advice}")
    return tuple((_number(a, f"{a}->{b}"), _number(b, f"{a}->{b}")) for a, _, b in pairs)


def _number(text: str, where: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ScheduleError(f"{_clip(text)!r} in {_clip(where)!r} is not a whole number >= 0")
    return int(text)


class _Parser:
    """Reads lines by key (``name``, ``rank 0``), each with its number, then builds the schedule."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.raw = [line.rstrip("\r") for line in text.split("\n")]
        self.lines: dict[str, tuple[int, str]] = {}

    def schedule(self) -> Schedule:
        lines = [(n, line) for n, line in enumerate(self.raw, start=1) if line.strip() and not line.startswith("#")]
        bare = bool(lines) and _RANK.match(lines[0][1]) is not None and not self.raw[0].startswith("# jaxpipe")
        if not bare:
            self._first_line(self.raw[0])
        for number, line in lines:
            self._line(number, line)
        return self._bare() if bare else self._whole()

    def _bare(self) -> Schedule:
        """Read a schedule from ``rank`` lines alone."""
        for key in filter(self.lines.get, _HEADERS):
            self._fail(*self.lines[key], f"a file with a line like this one must begin with the line '{FIRST_LINE}'")
        rows = [self._row(rank) for rank in range(len(self.lines))]
        return located(self.path, schedule_of, PurePath(self.path).stem, rows)

    def _whole(self) -> Schedule:
        for key in _HEADERS[:3]:
            if key not in self.lines:
                self._fail(len(self.raw), "", f"the line '{key}: …' is missing; is the file truncated?")
        number, text = self.lines["name"]
        try:
            name = str(json.loads(text)) if text.startswith('"') else text
        except ValueError:
            self._fail(number, f"name: {text}", "write plain text or a JSON string")
        number, text = self.lines["microbatches"]
        if not _NUMBER.fullmatch(text):
            self._fail(number, f"microbatches: {text}", "write a whole number, for example 'microbatches: 8'")
        rows = [text.split() for key, (_, text) in self.lines.items() if key not in _HEADERS]
        line = self.lines["placement"]
        edges, *lists = (
            self.lines.get(k, (line[0], text)) for k, text in (("edges", "chain"), *((k, "") for k in _LISTS))
        )
        try:
            placement = _parse_placement(line[1], edges[1], [x for _, x in lists], len(rows), sum(map(len, rows)))
        except ScheduleError as error:
            named = zip(("edge", *_LISTS), (edges, *lists), strict=True)
            self._fail(*next((at for word, at in named if word in str(error)), line), str(error))
        return Schedule(name, placement, int(text), tuple(self._row(rank) for rank in range(placement.num_ranks)))

    def _first_line(self, first: str) -> None:
        if re.fullmatch(r"# jaxpipe schedule \d+", first) and first != FIRST_LINE:
            self._fail(1, first, f"this version of the format is not known; this jaxpipe reads '{FIRST_LINE}'")
        if first != FIRST_LINE:
            self._fail(1, first, f"this is not a schedule in text form; write rank lines, or '{FIRST_LINE}' first")

    def _line(self, number: int, line: str) -> None:
        key, colon, value = line.partition(":")
        if not colon:
            self._fail(number, line, "expected 'key: value' or 'rank N: actions'")
        if key not in _HEADERS and not _RANK.fullmatch(key):
            self._fail(number, line, f"unknown key {_clip(key)!r}{_suggestion(key, (*_HEADERS, 'rank N'))}")
        if key in self.lines:
            self._fail(number, line, f"this line repeats line {self.lines[key][0]}; keep one of them")
        self.lines[key] = number, value.strip()

    def _row(self, rank: int) -> Row:
        key = f"rank {rank}"
        if key not in self.lines:
            extra = max(self.lines.keys() - _HEADERS, key=lambda key: (len(key), key))
            self._fail(self.lines[extra][0], f"{extra}: …", f"there is no line '{key}: …'; is the file truncated?")
        number, text = self.lines[key]
        row = []
        for token in text.split():
            try:
                row.append(parse_slot(token))
            except ScheduleParseError as error:
                # the excerpt shows a little of what stands before the wrong token
                at = text.index(token)
                self._fail(number, ("…" if at > 20 else "") + text[max(0, at - 20) : at + len(token)][:80], str(error))
        return tuple(row)

    def _fail(self, number: int, excerpt: str, what: str) -> NoReturn:
        shown = f" (in {_clip(excerpt)!r})" if excerpt else ""
        raise ScheduleParseError(f"{self.path}: line {number}: {what}{shown}")


def draw(timeline: Timeline, unit_s: float = 1.0) -> str:
    """Return the compute lanes of ``timeline`` as text, ``unit_s`` seconds a column.

    Raises:
        ScheduleError: ``unit_s`` is not positive.
    """
    if not unit_s > 0:
        raise ScheduleError(f"unit_s is {unit_s}; want seconds per column, above 0")
    shown = [_shown(timeline, rank) for rank in range(timeline.num_ranks)]
    chunk_of = chunks_in(event for row in shown for event in row)
    cells = [[(round(e.start_s / unit_s), round(e.end_s / unit_s), _label(e, chunk_of)) for e in row] for row in shown]
    width = max((-(-(len(label) + 1) // max(1, b - a)) for row in cells for a, b, label in row), default=1)
    margin = len(f"rank {timeline.num_ranks - 1}")
    return "\n".join(f"{f'rank {r}':<{margin}} |{_line(row, width)}" for r, row in enumerate(cells))


def _line(row: list[tuple[int, int, str]], width: int) -> str:
    line = ""
    for start, end, label in row:
        room = max(1, end - start) * width - 1
        line = f"{line:<{start * width}}{label:-<{room}} "
    return line.rstrip()


def _shown(timeline: Timeline, rank: int) -> list[Event]:
    """Return the events that take time on the compute lane."""
    return [e for e in timeline.of(rank, "compute") if e.end_s > e.start_s]


def _label(event: Event, chunk_of: dict[tuple[int, int], int]) -> str:
    chunks = [(a, chunk_of[event.rank, a.stage]) for a in event.action.actions]
    return "+".join(f"{a.op}{a.microbatch}{chr(ord('a') + chunk) if chunk else ''}" for a, chunk in chunks)
