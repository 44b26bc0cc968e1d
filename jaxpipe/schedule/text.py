"""The text form of a schedule, which ``str(schedule)`` prints, and its strict parser.

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
(``0->2 1->2``). Braided slots print as ``F3.5+BW1.2``. Names that would not survive as bare text are JSON strings. Blank lines
and lines that start with ``#`` are skipped. ``parse_schedule(str(s)) == s``; user ops must be registered before parsing.

Written by hand, the ``rank`` lines alone will do: the name is then the file's, the rest is inferred (:mod:`.infer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import NoReturn, TypeVar

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule.infer import MAX_STAGES, schedule_of
from jaxpipe.schedule.ir import FIRST_LINE, Action, Braid, Row, Schedule, Slot, is_op, registered_ops
from jaxpipe.schedule.placement import CONSTRUCTORS, Edges, Placement, chain
from jaxpipe.wording import clipped, closest

_K = TypeVar("_K")
_T = TypeVar("_T")

_FEW_STAGES = 10_000  # up to which a placement may have more stages than the rows have actions

_ACTION = re.compile(r"([^\W\d]+)(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})")
_RANK = re.compile(r"rank (0|[1-9][0-9]*)")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_HEADERS = ("name", "microbatches", "placement", "edges")
_EXCERPT = 60


def parse_schedule(text: str, path: str = "<text>") -> Schedule:
    """The schedule that ``text`` describes; its validity is the checker's business.

    Raises:
        ScheduleParseError: naming ``path``, the line, an excerpt and what to write instead.
    """
    return _Parser(text, path).schedule()


def parse_slot(token: str) -> Slot:
    """``F2.0`` as an :class:`Action`, ``F3.5+BW1.2`` as a :class:`Braid`.

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
            known = sorted(spec.name for spec in registered_ops())
            raise ScheduleParseError(
                f"op {_clip(op)!r} in {_clip(part)!r} is not registered{_known(op, known)} "
                "(register_op makes new ones, --import loads them)"
            )
        actions.append(Action(op, int(stage), int(microbatch)))
    return actions[0] if len(actions) == 1 else Braid(tuple(actions))


def _known(word: str, known: Iterable[str]) -> str:
    return closest(word, known, f"; known: {' '.join(known)}")


def _clip(text: str) -> str:
    return clipped(text, _EXCERPT)


def _unquote(text: str) -> str:
    if not text.startswith('"'):
        return text
    value = json.loads(text)
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value


# Placements.


def _parse_placement(text: str, edges: str, num_rows: int, num_slots: int) -> Placement:
    """Raises ScheduleError, or ValueError for a malformed ``edges``."""
    kind, arguments = _split_kind(text)
    sizes: dict[str, int] = {}
    flows: list[tuple[tuple[int, ...], ...]] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == "flow" and equals:
            flows.append(tuple(tuple(_number(r, argument) for r in group.split("+")) for group in value.split(",")))
        elif key not in ("ranks", "chunks") or not equals:
            raise ScheduleError(
                f"unknown placement argument {_clip(argument)!r}{_known(key, ('ranks', 'chunks', 'flow'))}"
            )
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
    if flows:
        return Placement(kind, sizes["ranks"], tuple(flows), _parse_edges(edges, len(flows[0])))
    if (stages := sizes["ranks"] * sizes.get("chunks", 1)) > max(num_slots, _FEW_STAGES) and stages <= MAX_STAGES:
        raise ScheduleError(f"the placement has {stages} stages, but the rows hold {num_slots} actions in all")
    placement = _construct(kind, sizes)
    if edges == "chain":
        return placement
    return Placement(kind, placement.num_ranks, placement.flows, _parse_edges(edges, placement.num_stages))


def _split_kind(text: str) -> tuple[str, list[str]]:
    if text.startswith('"'):
        value, end = json.JSONDecoder().raw_decode(text)
        return str(value), text[end:].split()
    kind, *arguments = text.split() or [""]
    return kind, arguments


def _construct(kind: str, sizes: dict[str, int]) -> Placement:
    known = CONSTRUCTORS.get(kind)
    if known is None:
        raise ScheduleError(
            f"unknown placement {_clip(kind)!r}{_known(kind, CONSTRUCTORS)}; a placement of another kind lists its ranks "
            "stage by stage: flow=0,1,2"
        )
    wanted, make = known
    if set(sizes) != set(wanted):
        raise ScheduleError(f"placement {kind!r} takes {' and '.join(wanted)}, got {' and '.join(sizes)}")
    if sizes["ranks"] * sizes.get("chunks", 1) > MAX_STAGES:
        raise ScheduleError(f"the placement has more than {MAX_STAGES} stages; is the number of chunks right?")
    return make(**sizes)


def _parse_edges(text: str, num_stages: int) -> Edges:
    if text == "chain":
        return chain(num_stages)
    if text == "none":
        return ()
    edges = []
    for word in text.split():
        a, arrow, b = word.partition("->")
        if not arrow:
            raise ScheduleError(f"{_clip(word)!r} is not an edge; write 'chain', 'none' or edges such as 0->2 1->2")
        edges.append((_number(a, word), _number(b, word)))
    if not edges:
        raise ScheduleError("'edges:' is empty; write 'chain', 'none' or edges such as 0->2 1->2")
    return tuple(edges)


def _number(text: str, where: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ScheduleError(f"{_clip(text)!r} in {_clip(where)!r} is not a whole number >= 0")
    return int(text)


class _Parser:
    """Reads lines into headers and rows, each with its line number, then builds the schedule."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.lines = text.split("\n")
        self.headers: dict[str, tuple[int, str]] = {}
        self.rows: dict[int, tuple[int, str]] = {}

    def schedule(self) -> Schedule:
        lines = [(number, raw.rstrip("\r")) for number, raw in enumerate(self.lines, start=1)]
        lines = [(number, line) for number, line in lines if line.strip() and not line.startswith("#")]
        bare = bool(lines) and _RANK.match(lines[0][1]) is not None and not self.lines[0].startswith("# jaxpipe")
        if not bare:
            self._first_line()
        for number, line in lines:
            self._line(number, line)
        return self._bare() if bare else self._whole()

    def _bare(self) -> Schedule:
        """From ``rank`` lines alone."""
        for number, line in self.headers.values():
            self._fail(number, line, f"a file with a line like this one must begin with the line '{FIRST_LINE}'")
        rows = [self._row(rank) for rank in range(len(self.rows))]
        try:
            return schedule_of(PurePath(self.path).stem, rows)
        except ScheduleError as error:
            raise ScheduleParseError(f"{self.path}: {error}", error.problems) from None

    def _whole(self) -> Schedule:
        for key in _HEADERS[:3]:
            if key not in self.headers:
                self._fail(len(self.lines), "", f"the line '{key}: …' is missing; is the file truncated?")
        name = self._header("name", _unquote, "write plain text or a JSON string")
        microbatches = self._header(
            "microbatches", lambda text: _number(text, text), "write a whole number, for example 'microbatches: 8'"
        )
        placement = self._placement()
        return Schedule(name, placement, microbatches, tuple(self._row(rank) for rank in range(placement.num_ranks)))

    def _first_line(self) -> None:
        first = self.lines[0].rstrip("\r")
        if first == FIRST_LINE:
            return
        if re.fullmatch(r"# jaxpipe schedule \d+", first):
            self._fail(1, first, f"this version of the format is not known; this jaxpipe reads '{FIRST_LINE}'")
        self._fail(1, first, f"this is not a schedule in text form; write rank lines, or '{FIRST_LINE}' first")

    def _line(self, number: int, line: str) -> None:
        key, colon, value = line.partition(":")
        value = value.strip()
        if not colon:
            self._fail(number, line, "expected 'key: value' or 'rank N: actions'")
        rank = _RANK.fullmatch(key)
        if rank:
            self._once(self.rows, int(rank.group(1)[:9]), number, line, value)
        elif key in _HEADERS:
            self._once(self.headers, key, number, line, value)
        else:
            self._fail(number, line, f"unknown key {_clip(key)!r}{_known(key, (*_HEADERS, 'rank N'))}")

    def _once(self, where: dict[_K, tuple[int, str]], key: _K, number: int, line: str, value: str) -> None:
        if key in where:
            self._fail(number, line, f"this line repeats line {where[key][0]}; keep one of them")
        where[key] = (number, value)

    def _header(self, key: str, read: Callable[[str], _T], fix: str) -> _T:
        number, value = self.headers[key]
        try:
            return read(value)
        except (ValueError, ScheduleError):
            self._fail(number, f"{key}: {value}", fix)

    def _placement(self) -> Placement:
        number, text = self.headers["placement"]
        edge_line, edges = self.headers.get("edges", (number, "chain"))
        try:
            num_slots = sum(len(row.split()) for _, row in self.rows.values())
            return _parse_placement(text, edges, len(self.rows), num_slots)
        except ValueError:
            self._fail(number, text, "the kind of placement is not a JSON string; close its quotes")
        except ScheduleError as error:
            at_edges = "edge" in str(error)
            self._fail(*((edge_line, edges) if at_edges else (number, text)), str(error))

    def _row(self, rank: int) -> Row:
        if rank not in self.rows:
            extra = max(self.rows)
            self._fail(
                self.rows[extra][0], f"rank {extra}: …", f"there is no line 'rank {rank}: …'; is the file truncated?"
            )
        number, text = self.rows[rank]
        row = []
        for token in text.split():
            try:
                row.append(parse_slot(token))
            except ScheduleParseError as error:
                at = text.index(token)
                self._fail(number, ("…" if at > 20 else "") + text[max(0, at - 20) : at + len(token)][:80], str(error))
        return tuple(row)

    def _fail(self, number: int, excerpt: str, what: str) -> NoReturn:
        shown = f" (in {_clip(excerpt)!r})" if excerpt else ""
        raise ScheduleParseError(f"{self.path}: line {number}: {what}{shown}")
