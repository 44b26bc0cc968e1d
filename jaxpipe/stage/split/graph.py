"""The dataflow of a traced stage, and the program of one operation cut from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from jaxpipe.stage.primitives import Kind, kind, row
from jaxpipe.stage.split.trace import StageTrace

Saveable = Callable[[Var], bool]
"""Whether F may save a value it computed."""


class Level(IntEnum):
    """What a value depends on, at most: parameters and constants; inputs of the microbatch; cotangents."""

    FIXED = 0
    FORWARD = 1
    BACKWARD = 2


@dataclass(frozen=True, slots=True)
class Part:
    """The program of one operation: equations between ports."""

    inputs: tuple[Port, ...]
    invars: tuple[Var, ...]
    outputs: tuple[Port, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[JaxprEqn, ...]

    def close(self, consts: Mapping[Var, Any]) -> ClosedJaxpr:
        """A jaxpr with these constants bound (those it uses)."""
        read = {a for eqn in self.eqns for a in eqn.invars if isinstance(a, Var)}
        read.update(a for a in self.outvars if isinstance(a, Var))
        return close_jaxpr([(v, c) for v, c in consts.items() if v in read], self.invars, self.eqns, self.outvars)


class Graph:
    """Dataflow of a trace: who makes a value, and what it depends on. Built once, not changed."""

    def __init__(self, trace: StageTrace) -> None:
        self.trace = trace
        self.eqns = trace.eqns
        self.maker: dict[Var, int] = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for v in variables(eqn.invars):
                self.readers.setdefault(v, []).append(i)
        self.level: dict[Var, Level] = {v: _port_level(p) for v, p in trace.inputs.items()}
        if trace.seed is not None:
            self.level[trace.seed] = Level.BACKWARD
        self.eqn_level = [self._classify(i, eqn) for i, eqn in enumerate(self.eqns)]

    def _classify(self, i: int, eqn: JaxprEqn) -> Level:
        keys = [v for v in variables(eqn.invars) if is_key(v) or self._is_key_port(v)]
        level = max(
            (self.level.get(v, Level.FIXED) for v in variables(eqn.invars) if not self._is_key_port(v)),
            default=Level.FIXED,
        )
        plumbing = kind(eqn) is Kind.KEY or all(is_key(v) for v in eqn.outvars)
        if keys and not plumbing:
            level = max(level, Level.FORWARD)
        if i in self.trace.recomputed and level is Level.FORWARD:
            level = Level.BACKWARD
        for v in eqn.outvars:
            self.level[v] = level
        return level

    def _is_key_port(self, v: Var) -> bool:
        port = self.trace.inputs.get(v)
        return port is not None and port.kind == "key"

    def of(self, atom: Atom) -> Level:
        return Level.FIXED if isinstance(atom, Literal) else self.level.get(atom, Level.FIXED)

    def needed(self, roots: Iterable[Atom], among: Callable[[int], bool]) -> set[int]:
        """Equations that ``roots`` depend on, walking only through those accepted by ``among``."""
        found: set[int] = set()
        stack = list(variables(roots))
        while stack:
            i = self.maker.get(stack.pop())
            if i is not None and i not in found and among(i):
                found.add(i)
                stack.extend(variables(self.eqns[i].invars))
        return found

    def view_base(self, v: Var) -> Var | None:
        """The operand of which ``v`` is a view that takes no fewer bytes, if it is one."""
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
