"""Whether a transformation of pieces of parameters gives the pieces of what it gives for the whole.

With ``tp`` above 1 or ZeRO-1 a device holds a piece of a parameter, and the transformation sees only that. Both programs, of
whole leaves and of pieces, are traced and walked side by side. Every value is the *same* in both (counts, rates, parameters
that are not divided), *uniform* (one number in each element) or a *piece*; equations on pieces must be the same in both and
treat each element by itself, on operands that are divided alike. Anything else is refused: Adafactor's factors where it makes
any (from 128 rows on), norms, noise, sorting.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from jaxpipe._jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, only_results, shape_of
from jaxpipe.errors import ConfigError
from jaxpipe.stage.identity import array_key, value_key
from jaxpipe.stage.model.params import Place
from jaxpipe.stage.primitives import Kind, row
from jaxpipe.train.update.layerwise import LayerwiseOptimizer, blamed, places_of
from jaxpipe.train.update.optimizer_state import StateLeaf

Division = Mapping[Place, Hashable]
"""Of each parameter that is divided: equal for those of one shape that are divided alike."""

_SAME, _UNIFORM, _DIFFERENT = "same", "uniform", "different"
_ELEMENTWISE = frozenset({Kind.ELEMENTWISE, Kind.CAST, Kind.SAME})


def check_pieces(whole: LayerwiseOptimizer, local: LayerwiseOptimizer, division: Division) -> None:
    """Refuse a transformation of which devices that hold pieces would compute something else.

    Args:
        whole: traced on whole parameters.
        local: traced on what a device holds of each.
        division: the parameters that are divided.

    Raises:
        ConfigError: names the operation.
    """
    params = [division.get(at, _SAME) for at in places_of(whole.params)]
    state = [_SAME if at is None else division[at] for at in divided_like(whole, local, division)]
    extra = [_SAME] * len(jax.tree.leaves(whole.extra))
    _check(whole.start, local.start, params, state)
    _check(whole.update, local.update, [*params, *state, *params, *extra], [*params, *state])


def divided_like(whole: LayerwiseOptimizer, local: LayerwiseOptimizer, division: Division) -> tuple[Place | None, ...]:
    """By leaf of the state, the parameter that it is divided like, or None; arguments as of :func:`check_pieces`."""
    leaves = zip(jax.tree.leaves(whole.params), jax.tree.leaves(local.params), strict=True)
    shapes = {at: (a.shape, b.shape) for at, (a, b) in zip(places_of(whole.params), leaves, strict=True)}

    def like(leaf: StateLeaf, piece: StateLeaf) -> Place | None:
        at = (leaf.layer or "", leaf.param or ())
        return at if at in division and (leaf.aval.shape, piece.aval.shape) == shapes[at] else None

    return tuple(like(a, b) for a, b in zip(whole.leaves, local.leaves, strict=True))


def _check(
    whole: ClosedJaxpr, local: ClosedJaxpr, input_kinds: Sequence[Hashable], result_kinds: Sequence[Hashable]
) -> None:
    """Compare two programs whose inputs are of ``input_kinds``, and whose results must be of ``result_kinds``."""
    whole, local = (only_results(x, range(len(x.out_avals)), range(len(x.in_avals)))[0] for x in (whole, local))
    pair = _Pair(whole, local, input_kinds)
    for a, b, kind, result_kind in zip(
        whole.jaxpr.outvars, local.jaxpr.outvars, pair.results(), result_kinds, strict=True
    ):
        number = kind == _UNIFORM or (kind == _SAME and not shape_of(a))
        if kind != result_kind and not (number and (result_kind != _SAME or shape_of(a) == shape_of(b))):
            _refuse(pair.maker.get(a) if isinstance(a, Var) else None)


class _Pair:
    """A jaxpr of whole values and the same of pieces. ``kinds``: of the first one's variables; ``twin``: what stands for them
    in the second. A number that is only spread over a shape counts as the number."""

    def __init__(self, whole: ClosedJaxpr, local: ClosedJaxpr, input_kinds: Sequence[Hashable]) -> None:
        self.whole, self.local = whole, local
        self.kinds: dict[Var, Hashable] = dict(zip(whole.jaxpr.invars, input_kinds, strict=True))
        self.twin: dict[Var, Atom] = dict(zip(whole.jaxpr.invars, local.jaxpr.invars, strict=True))
        self.maker = {v: eqn for eqn in whole.jaxpr.eqns for v in eqn.outvars}
        self._spread: dict[Var, Atom] = {}
        for (v, c), (w, d) in zip(_consts(whole), _consts(local), strict=False):
            if array_key(c) == array_key(d):
                self.kinds[v], self.twin[v] = _SAME, w

    def results(self) -> list[Hashable]:
        """The kinds of the results, which must be those of the second program."""
        eqns = [self._without_spreading(p.jaxpr.eqns) for p in (self.whole, self.local)]
        for a, b in zip(*eqns, strict=False):
            alike = a.primitive is b.primitive and len(a.invars) == len(b.invars)
            if not alike or not all(map(self._stands_for, a.invars, b.invars)):
                _refuse(a)
            self.kinds.update(zip(a.outvars, self._through(a, b), strict=True))
            self.twin.update(zip(a.outvars, b.outvars, strict=True))
        if len(eqns[0]) != len(eqns[1]):
            _refuse(max(eqns, key=len)[min(map(len, eqns))])
        outvars = zip(self.whole.jaxpr.outvars, self.local.jaxpr.outvars, strict=True)
        return [self._kind(a) if self._stands_for(a, b) else _DIFFERENT for a, b in outvars]

    def _without_spreading(self, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        remaining = []
        for eqn in eqns:
            if eqn.primitive.name == "broadcast_in_dim" and not shape_of(eqn.invars[0]):
                self._spread[eqn.outvars[0]] = self._number(eqn.invars[0])
            else:
                remaining.append(eqn)
        return remaining

    def _number(self, atom: Atom) -> Atom:
        return self._spread.get(atom, atom) if isinstance(atom, Var) else atom

    def _kind(self, atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return _UNIFORM
        return _UNIFORM if atom in self._spread else self.kinds.get(atom, _DIFFERENT)

    def _stands_for(self, whole: Atom, local: Atom) -> bool:
        a, b = self._number(whole), self._number(local)
        if isinstance(a, Literal) or isinstance(b, Literal):
            return isinstance(a, Literal) and isinstance(b, Literal) and value_key(a.val) == value_key(b.val)
        return self.twin.get(a) is b

    def _through(self, a: JaxprEqn, b: JaxprEqn) -> list[Hashable]:
        """The kinds of an equation's results."""
        kinds = [self._kind(atom) for atom in a.invars]
        pieces = set(kinds) - {_SAME, _UNIFORM}
        if a.primitive.name == "cond" and kinds[0] in (_SAME, _UNIFORM):
            pairs = zip(a.params["branches"], b.params["branches"], strict=True)
            branches = [_Pair(*pair, kinds[1:]).results() for pair in pairs]
            return [_either(a, each) for each in zip(*branches, strict=True)]
        if value_key(a.params) != value_key(b.params):
            _refuse(a)
        if not pieces and _shapes(a) == _shapes(b):
            return [_SAME] * len(a.outvars)
        all_divided = all(kind != _SAME or not shape_of(atom) for kind, atom in zip(kinds, a.invars, strict=True))
        if row(a).kind not in _ELEMENTWISE or not all_divided or len(pieces) > 1:
            _refuse(a)
        return [pieces.pop() if pieces else _UNIFORM]


def _consts(closed: ClosedJaxpr) -> list[tuple[Var, Any]]:
    return list(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def _shapes(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    return [shape_of(a) for a in (*eqn.invars, *eqn.outvars)]


def _either(eqn: JaxprEqn, kinds: Sequence[Hashable]) -> Hashable:
    """The kind of a branch's result."""
    several = set(kinds)
    if len(several) > 1:
        several.discard(_UNIFORM)
    if len(several) > 1 or _DIFFERENT in several:
        _refuse(eqn)
    return several.pop()


def _refuse(eqn: JaxprEqn | None) -> NoReturn:
    function, place = blamed(eqn)
    what = "makes its state" if eqn is None else f"uses {eqn.primitive.name}"
    raise ConfigError(
        f"the optimizer's {function}{place} {what} across a parameter's elements, and with zero1 or tp above 1 a device sees "
        "only a piece of each: use one that treats elements alone (AdamW, SGD, Lion), or zero1=false and tp=1"
    )
