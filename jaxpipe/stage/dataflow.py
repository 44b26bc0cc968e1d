"""Who makes and who reads the values of a flat list of equations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxpipe._jax_compat import Atom, JaxprEqn, Var, variables


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


def called(names: Mapping[Var, Atom], atom: Atom) -> Atom:
    """What a value is called by ``names``; itself, if they do not name it."""
    return names.get(atom, atom) if isinstance(atom, Var) else atom
