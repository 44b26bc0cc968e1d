"""The schedule as a plain value: operations, actions, rows.

An :class:`OpSpec` says as data what an operation waits for, which cost it takes and what it does to memory; the checker,
the simulator, the renderer and the runtime read it and never compare op names. An :class:`Action` is one operation of one
stage on one microbatch, printed ``F2.0``. A :class:`Schedule` is, per rank, the order in which actions are issued; it
holds no times. Words are those of :file:`jaxpipe/README.md`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.placement import Placement, format_edges, format_placement
from jaxpipe.schedule.plugins import load_installed

FIRST_LINE = "# jaxpipe schedule 1"

Lane = Literal["compute", "d2h", "h2d", "net"]
HOST_LANES = ("d2h", "h2d")
Where = Literal["self", "group", "pred", "succ", "peer"]
Sends = Literal["succ", "pred", "peer", "none"]
Instant = Literal["start", "end"]


@dataclass(frozen=True, slots=True)
class Wait:
    """One rule of what an operation waits for.

    ``ops``: the operations that may satisfy the rule (``("B", "BW")``: whichever of the two the schedule contains).
    ``where``: ``self`` the same stage and microbatch, ``group`` the same on every rank of its group, ``pred``/``succ`` every
    predecessor/successor stage (of these, those that hand a gradient back), ``peer`` every other stage whose result one of its
    successors takes, same microbatch; where spans differ, every action that has a microbatch in common with it.
    ``optional``: the rule holds only if the schedule contains such an action (B waits for L when there is one).
    An op that runs once a step has every microbatch of its step in common with the others.
    """

    ops: tuple[str, ...]
    where: Where
    optional: bool = False


@dataclass(frozen=True, slots=True)
class MemoryEffect:
    """Bytes taken (+1) or given back (-1) at an instant of an action: ``sign * costs.<field>[stage]``."""

    at: Instant
    sign: int
    field: str


@dataclass(frozen=True, slots=True)
class OpSpec:
    """An operation, as data.

    ``lane``: where it runs; ranks run the ``compute`` lane one action at a time, in row order.
    ``cost``: name of the :class:`~jaxpipe.schedule.costs.CostProfile` property that gives its seconds per stage; empty: it
    computes nothing, takes 0 s and only makes what stands after it on its rank wait (a *sync*).
    ``parts``: the elementary operations it performs (``BW`` performs ``B`` and ``W``); an op performs itself by default.
    ``required``: every (stage, microbatch) must have this part performed exactly once.
    ``sends``: where what consumes its result is (``succ`` for F's activation, ``pred`` for B's cotangent).
    ``collective``: the property that gives the seconds of the collectives it waits for
    (:mod:`~jaxpipe.schedule.engine`); empty: it has none, or its parts have them.
    ``colour``: fill used by the renderers. ``together``: on a stage spread over ranks, an op that sends starts on all of them
    at once; if False each rank runs it by itself, and other stages wait for all of them and a collective (``group_comm_s``).
    ``per_step``: one action a step for all microbatches of a stage on a rank; it has the number of the first of them.
    """

    name: str
    lane: Lane
    waits: tuple[Wait, ...]
    cost: str
    memory: tuple[MemoryEffect, ...] = ()
    parts: tuple[str, ...] = ()
    required: bool = False
    sends: Sends = "none"
    colour: str = "#9aa0a6"
    description: str = ""
    collective: str = ""
    together: bool = True
    per_step: bool = False

    def performs(self) -> tuple[str, ...]:
        """Return the elementary operations this one performs."""
        return self.parts or (self.name,)

    @property
    def is_joint(self) -> bool:
        """Return whether the ranks of a group start it together."""
        return self.together and self.sends != "none"

    @property
    def is_sync(self) -> bool:
        """Return whether it computes nothing and only waits."""
        return not self.cost

    @property
    def runs_function(self) -> bool:
        """Return whether it runs a function of its stage. (O and L copy, S waits for an O, R and G communicate.)"""
        return self.lane == "compute" and not self.is_sync


_REGISTRY: dict[str, OpSpec] = {}


def register_op(spec: OpSpec) -> OpSpec:
    """Register ``spec`` under its name; idempotent for an equal spec.

    Names are an upper-case letter followed by letters or underscores (digits would make ``F2.0`` ambiguous).

    Only ops on the compute lane send: transfers leave in the order of that lane. An op without a cost is a sync: it runs on
    the compute lane, sends nothing, holds no memory and performs nothing that is required.

    An op that runs once a step is for its own stage alone, and no schedule must have it.

    Raises:
        ScheduleError: the name is malformed or is taken by a different spec, the spec waits or sends nowhere that there is or
            from another lane, it has no cost and does more than wait, or it runs once a step and does what such an op can't.
    """
    if not spec.name or not spec.name[0].isupper() or not all(c.isalpha() or c == "_" for c in spec.name):
        raise ScheduleError(f"op name {spec.name!r}: use an upper-case letter followed by letters or '_'")
    choices = [("is on lane", spec.lane, Lane), ("sends to", spec.sends, Sends)]
    for what, chosen, kind in [*choices, *(("waits for", wait.where, Where) for wait in spec.waits)]:
        if chosen not in get_args(kind):
            raise ScheduleError(f"op {spec.name!r} {what} {chosen!r}; want one of {', '.join(get_args(kind))}")
    if texts := [wait.ops for wait in spec.waits if isinstance(wait.ops, str)]:
        raise ScheduleError(f"op {spec.name!r} waits for {texts[0]!r}; want a tuple of names: {(texts[0],)}")
    if spec.sends != "none" and spec.lane != "compute":
        raise ScheduleError(f"op {spec.name!r} sends to {spec.sends!r} from lane {spec.lane!r}; only compute ops send")
    if spec.is_sync and (spec.lane != "compute" or spec.sends != "none" or spec.memory or spec.required or spec.parts):
        raise ScheduleError(f"op {spec.name!r} has no cost, so it only waits, on the compute lane; name its cost")
    if spec.per_step and (spec.required or spec.sends != "none" or any(wait.where != "self" for wait in spec.waits)):
        raise ScheduleError(f"op {spec.name!r} is per_step: it can't be required, send, or wait for other stages")
    registered = _REGISTRY.get(spec.name)
    if registered is not None and registered != spec:
        raise ScheduleError(f"op {spec.name!r} is already registered with another meaning; choose another name")
    _REGISTRY[spec.name] = spec
    return spec


def op_spec(name: str) -> OpSpec:
    """Return the registered spec called ``name``.

    Raises:
        ScheduleError: no such op.
    """
    if not is_op(name):
        raise ScheduleError(f"unknown op {name!r}; known: {' '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def is_op(name: str) -> bool:
    """Return whether an op called ``name`` is registered, here or by an installed package."""
    if name not in _REGISTRY:
        load_installed("jaxpipe.ops", OpSpec, _register_installed)
    return name in _REGISTRY


def _register_installed(spec: OpSpec) -> None:
    if spec.required:
        raise ScheduleError("an op that every schedule must have can't come from an entry point; register it yourself")
    register_op(spec)


def registered_ops() -> tuple[OpSpec, ...]:
    """Return all registered ops, in order of registration; those of installed packages once one of them was asked for."""
    return tuple(_REGISTRY.values())


_takes, _frees = partial(MemoryEffect, "start", +1), partial(MemoryEffect, "end", -1)
_AFTER_F, _AFTER_O = Wait(("F",), "self"), Wait(("O",), "self")
_BACKWARD = (_AFTER_F, Wait(("B", "BW"), "succ"), Wait(("L",), "self", optional=True))
_FORWARD = (Wait(("F",), "pred"), Wait(("G",), "self", optional=True))
_AFTER_B, _LOAD = (Wait(("B",), "self"),), (_AFTER_O, Wait(("S",), "self", optional=True))
_KEPT = MemoryEffect("end", +1, "w_residual_bytes")
_B = (_takes("cotangent_bytes"), _frees("residual_bytes"), _frees("cotangent_bytes"), _KEPT)
_F, _W, _BW = (_takes("residual_bytes"),), (_frees("w_residual_bytes"),), (_frees("residual_bytes"),)
_O, _L = (_frees("offloadable_bytes"),), (_takes("offloadable_bytes"),)
_BOTH = "gradients of input and weights together"
_REDUCE, _GATHER = "reduce the stage's gradients over dp", "gather the stage's parameters (ZeRO-1)"
_SPECS = (  # name, lane, waits, cost, memory, parts, required, sends, colour, description, collective
    OpSpec("F", "compute", _FORWARD, "f_s", _F, (), True, "succ", "#0072b2", "forward", "f_comm_s"),
    OpSpec(
        "B", "compute", _BACKWARD, "b_s", _B, (), True, "pred", "#f0b429", "gradient of the stage input", "b_comm_s"
    ),
    OpSpec("W", "compute", _AFTER_B, "w_s", _W, (), True, "none", "#009e73", "gradient of the stage weights"),
    OpSpec("BW", "compute", _BACKWARD, "bw_s", _BW, ("B", "W"), False, "pred", "#d55e00", _BOTH),
    OpSpec("O", "d2h", (_AFTER_F,), "offload_s", _O, colour="#cc79a7", description="offload residuals to host memory"),
    OpSpec("L", "h2d", _LOAD, "load_s", _L, colour="#56b4e9", description="load residuals back"),
    OpSpec("S", "compute", (_AFTER_O,), "", colour="#5f6368", description="wait for an offload to end"),
    OpSpec("R", "net", (Wait(("W", "BW"), "self"),), "reduce_s", colour="#8c564b", description=_REDUCE, per_step=True),
    OpSpec("G", "net", (), "gather_s", colour="#c49c94", description=_GATHER, per_step=True),
)
F, B, W, BW, O, L, S, R, G = map(register_op, _SPECS)  # noqa: E741


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One operation of one stage on one microbatch; prints as ``F2.0`` (op, stage, microbatch)."""

    op: str
    stage: int
    microbatch: int

    @property
    def actions(self) -> tuple[Action, ...]:
        """Return the actions of this slot: itself. (A :class:`Braid` has two.)"""
        return (self,)

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Braid:
    """One compute slot that holds several actions run as one woven function; prints as ``F3.5+BW1.2``."""

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if len(self.actions) < 2:
            raise ScheduleError(f"a braided slot holds at least two actions, got {len(self.actions)}")

    def __str__(self) -> str:
        return "+".join(map(str, self.actions))


Slot = Action | Braid
Row = tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Per rank, the order in which slots are issued. Order is the only truth; there are no times inside.

    ``name``: what generated it. ``placement``: which ranks run which stage, and the DAG of stages.
    ``rows[rank]``: the slots of that rank, in issue order. Validity is :func:`jaxpipe.schedule.check.check_schedule`'s
    business; building an invalid schedule is allowed so that it can be shown and explained.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[Row, ...]

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_chunks(self) -> int:
        """Chunks per rank (v): the largest number of stages that one rank runs."""
        return self.placement.num_chunks

    def actions(self, rank: int | None = None) -> Iterator[Action]:
        """Return the actions of one rank in issue order, braided slots flattened; by default of all ranks, one after the
        other."""
        rows = self.rows if rank is None else [self.rows[rank]]
        return (action for row in rows for slot in row for action in slot.actions)

    @property
    def offloads(self) -> bool:
        """Return whether anything is copied to the host."""
        return any(op_spec(a.op).lane in HOST_LANES for a in self.actions())

    def functions(self, rank: int) -> Counter[Action]:
        """Return the actions of a rank that run functions of its stages."""
        return Counter(a for a in self.actions(rank) if op_spec(a.op).runs_function)

    def weight_order(self, rank: int) -> dict[int, list[int]]:
        """Return, per stage of a rank, the microbatches in the order in which their weight gradients are added."""
        order: dict[int, list[int]] = {}
        for action in self.actions(rank):
            if W.name in op_spec(action.op).performs():
                order.setdefault(action.stage, []).append(action.microbatch)
        return order

    def __str__(self) -> str:
        """Return the text form (:mod:`~jaxpipe.schedule.text`), ending in a newline."""
        plain = self.name.isprintable() and self.name == self.name.strip() != "" and not self.name.startswith('"')
        lines = [
            FIRST_LINE,
            f"name: {self.name if plain else json.dumps(self.name)}",
            f"microbatches: {self.num_microbatches}",
            f"placement: {format_placement(self.placement)}",
            f"edges: {format_edges(self.placement)}",
            *([f"spans: {' '.join(map(str, self.placement.span))}"] if self.placement.has_spans else []),
            *([f"detached: {' '.join(map(str, self.placement.detached))}"] if self.placement.detached else []),
        ]
        lines += [" ".join([f"rank {rank}:", *map(str, row)]) for rank, row in enumerate(self.rows)]
        return "\n".join(lines) + "\n"
