"""The dataflow of a traced stage, and the program of one operation cut from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from jaxpipe._jax_compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_bytes,
    close_jaxpr,
    is_key_dtype,
    variables,
)
from jaxpipe.stage.functions import Port
from jaxpipe.stage.jaxprs import Dataflow, EqnKind, kind, row
from jaxpipe.stage.split.trace import StageTrace

Saveable = Callable[[Var], bool]
"""Whether F may save a value it computed."""


class Level(IntEnum):
    """What a value depends on, at most: parameters and constants; inputs of the microbatch; cotangents."""

    FIXED = 0
    FORWARD = 1
    BACKWARD = 2


@dataclass(frozen=True, slots=True)
class StagePart:
    """The program of one operation: equations between ports."""

    inputs: tuple[Port, ...]
    invars: tuple[Var, ...]
    outputs: tuple[Port, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[JaxprEqn, ...]

    def close(self, consts: Mapping[Var, Any]) -> ClosedJaxpr:
        """Return a jaxpr with these constants bound (those it uses)."""
        read = {a for eqn in self.eqns for a in eqn.invars if isinstance(a, Var)}
        read.update(a for a in self.outvars if isinstance(a, Var))
        return close_jaxpr([(v, c) for v, c in consts.items() if v in read], self.invars, self.eqns, self.outvars)


class Graph(Dataflow):
    """Dataflow of a trace, and what each value depends on. Built once, not changed."""

    def __init__(self, trace: StageTrace) -> None:
        super().__init__(trace.eqns)
        self.trace = trace
        self.level: dict[Var, Level] = {v: _port_level(p) for v, p in trace.inputs.items()}
        if trace.seed is not None:
            self.level[trace.seed] = Level.BACKWARD
        self.eqn_level = [self._classify(i, eqn) for i, eqn in enumerate(self.eqns)]

    def _classify(self, i: int, eqn: JaxprEqn) -> Level:
        keys = [v for v in variables(eqn.invars) if is_key(v) or self.port_kind(v) == "key"]
        level = max(
            (self.level.get(v, Level.FIXED) for v in variables(eqn.invars) if self.port_kind(v) != "key"),
            default=Level.FIXED,
        )
        # Folding keys costs nothing and is repeated where bits are drawn; only drawing makes a value of the microbatch.
        plumbing = kind(eqn) is EqnKind.KEY or all(is_key(v) for v in eqn.outvars)
        if keys and not plumbing:
            level = max(level, Level.FORWARD)
        # A model's own jax.checkpoint: its recomputation belongs to the backward pass, though it reads no cotangent.
        if i in self.trace.recomputed and level is Level.FORWARD:
            level = Level.BACKWARD
        for v in eqn.outvars:
            self.level[v] = level
        return level

    def port_kind(self, v: Var) -> str:
        """Return the kind of the port through which a value enters the stage; "" for others."""
        port = self.trace.inputs.get(v)
        return "" if port is None else port.kind

    def of(self, atom: Atom) -> Level:
        return Level.FIXED if isinstance(atom, Literal) else self.level.get(atom, Level.FIXED)

    def early(self, eqns: Sequence[JaxprEqn]) -> set[int]:
        """Return the positions of those among backward equations, in the order of a program, that depend on no cotangent."""
        late = {v for v, p in self.trace.inputs.items() if p.kind == "dy"} | {self.trace.seed}
        positions = set()
        for k, eqn in enumerate(eqns):
            if eqn.effects or any(v in late for v in variables(eqn.invars)):
                late.update(eqn.outvars)
            else:
                positions.add(k)
        return positions

    def is_fixed(self, v: Var) -> bool:
        return self.of(v) is Level.FIXED

    def is_view(self, v: Var) -> bool:
        """Whether a value is cheaper to make again than to keep."""
        return self.view_base(v) is not None

    def view_base(self, v: Var) -> Var | None:
        """Return the operand of which ``v`` is a view, None if it is none, or takes fewer bytes than the operand: then it pays
        to keep the view."""
        i = self.maker.get(v)
        if i is None or not row(self.eqns[i]).view:
            return None
        operands = list(variables(self.eqns[i].invars))
        if len(operands) != 1 or aval_bytes(operands[0].aval) > aval_bytes(v.aval):
            return None
        return operands[0]


def is_key(v: Var) -> bool:
    return is_key_dtype(v.aval.dtype) if hasattr(v.aval, "dtype") else False


def _port_level(port: Port) -> Level:
    match port.kind:
        case "param":
            return Level.FIXED
        case "x" | "data" | "key":
            return Level.FORWARD
        case _:
            return Level.BACKWARD
