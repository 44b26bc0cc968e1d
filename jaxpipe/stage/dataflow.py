"""Who makes and who reads the values of a flat list of equations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from jaxpipe._jax_compat import Atom, JaxprEqn, Var, variables

_Node = TypeVar("_Node", bound=Hashable)


class Dataflow:
    """``maker``: the equation that makes a value, by position. ``readers``: those that read it. Built once, not changed."""

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self.eqns = eqns
        self.maker: dict[Var, int] = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self.readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(eqns):
            for v in variables(eqn.invars):
                self.readers.setdefault(v, []).append(i)

    def inputs(self, i: int) -> Iterable[int]:
        """The equations whose results equation ``i`` reads."""
        return (self.maker[v] for v in variables(self.eqns[i].invars) if v in self.maker)

    def outputs(self, i: int) -> Iterable[int]:
        """The equations that read results of equation ``i``."""
        return (r for v in self.eqns[i].outvars for r in self.readers.get(v, ()))

    def needed(self, roots: Iterable[Atom], among: Callable[[int], bool]) -> set[int]:
        """Equations that ``roots`` depend on, walking only through those accepted by ``among``."""
        makers = (self.maker[v] for v in variables(roots) if v in self.maker)
        return reachable(filter(among, makers), lambda i: filter(among, self.inputs(i)))


def reachable(start: Iterable[_Node], near: Callable[[_Node], Iterable[_Node]]) -> set[_Node]:
    """``start`` and all that can be reached from there, going from each to those ``near`` it."""
    nodes: set[_Node] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(near(node))
    return nodes


def called(names: Mapping[Var, Atom], atom: Atom) -> Atom:
    """Return the name that ``names`` give a value; the value itself, if they give none."""
    return names.get(atom, atom) if isinstance(atom, Var) else atom
