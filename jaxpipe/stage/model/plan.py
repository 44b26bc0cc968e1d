"""Cuts a model into stages, balanced by cost or by hand; the plan as a value, a table and JSON; what stages take and hand on.

:func:`cut` minimises the largest stage cost exactly, and among those cuts takes one with the least Σ cost², so that the rest is
even too, and among those one that sends the fewest bytes between stages. The loss stays in the stage of the layer before it
(alone, it would have the logits sent to it) unless every layer is a stage. Costs are measured seconds or, from shapes alone,
the forward FLOPs of :func:`analytic_layer_costs`: matrix products only, no memory traffic, no communication, and the backward
taken as proportional to the forward. A balanced stage is still uneven in memory; the plan does not weigh that.

What enters a stage is what its layers take of earlier stages' layers, each result once, in the order of the model's layers, and
so in ascending order of the stages that make them. What leaves is what later stages take, in the same order. A stage of a chain
gets one result and hands on one.
"""

from __future__ import annotations

import json
import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import jax
import numpy as np

from jaxpipe._jax_compat import aval_bytes, only_results
from jaxpipe.errors import StageError
from jaxpipe.stage.jaxprs import EXECUTED, AttentionFormula, array_leaves, fill, jaxpr_flops
from jaxpipe.stage.model.layer import (
    Layer,
    LayerContext,
    Model,
    Params,
    Path,
    every_init_avals,
    given_to,
    key_aval,
    split_result,
    taken_by,
)
from jaxpipe.stage.model.params import find_leaf, is_trained, leaves_of, with_tied_leaves
from jaxpipe.stage.model.reference import calling
from jaxpipe.text import aligned, arrows


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The sources of the inputs of one stage's layers, and what becomes of their results.

    ``takes``: per layer, where each result comes from: the position of a layer of the stage, or ``~k`` for the k-th result that
    enters. ``before``: per result that enters, the stage that makes it and which it is of those that leave there. ``leaving``:
    positions of the layers whose results leave. ``readers``: (stage, which of those it takes), ascending. ``silent``: positions
    among them of those that hand no gradient back. ``losses``: positions of layers that no other takes. ``x_learns``,
    ``y_learns``, ``loss_learns``: by result that enters or leaves, and by loss, whether something trained stands behind it (and
    of one that enters, whether the stage hands its gradient back). ``span``: how many consecutive microbatches the stage takes
    at once; then all that enters does so once for each of them, and nothing leaves.
    """

    takes: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, int], ...]
    leaving: tuple[int, ...]
    readers: tuple[tuple[int, tuple[int, ...]], ...]
    losses: tuple[int, ...]
    x_learns: tuple[bool, ...]
    y_learns: tuple[bool, ...]
    loss_learns: tuple[bool, ...]
    span: int = 1
    silent: tuple[int, ...] = ()

    @property
    def without_loss(self) -> StageLinks:
        """Return the links without the last layer: what it takes leaves the stage, for one microbatch."""
        *takes, leaving = self.takes
        return StageLinks(tuple(takes), self.before, leaving, (), (), self.x_learns, (), ())

    def without(self, dropped: Collection[int]) -> StageLinks:
        """Return the links without the layers at these positions, each of which takes one result: who took theirs takes
        that."""
        positions = [i for i in range(len(self.takes)) if i not in dropped]

        def source(k: int) -> int:
            while k in dropped:
                (k,) = self.takes[k]
            return k if k < 0 else positions.index(k)

        takes = tuple(tuple(map(source, self.takes[i])) for i in positions)
        return replace(
            self, takes=takes, leaving=tuple(map(source, self.leaving)), losses=tuple(map(source, self.losses))
        )

    @property
    def kind(self) -> Hashable:
        """Return a key that is equal for stages that are linked the same, whatever the numbers of their neighbours."""
        before, readers = ((0, k) for k in range(len(self.before))), ((0, entries) for _, entries in self.readers)
        return replace(self, before=tuple(before), readers=tuple(readers))

    def entering(self, leaving: Mapping[int, Any] | Sequence[Any]) -> Any:
        """Return what enters the stage, out of what leaves each earlier one: one result as it is, several as a tuple, None
        where there is none. A tuple of that where it enters for several microbatches."""
        entries = [leaving[t][k] for t, k in self.before]
        one = entries[0] if len(entries) == 1 else tuple(entries) or None
        return one if self.span == 1 else (one,) * self.span

    def members(self, x: Any) -> tuple[Any, ...]:
        """Split what enters into microbatches."""
        return (x,) if self.span == 1 else x

    def exits(self, y: Any) -> tuple[Any, ...]:
        """Split what leaves into results."""
        return (y,) if len(self.leaving) == 1 else y or ()

    def leave(self, results: Sequence[Any], x: Any) -> Any:
        """Return what leaves the stage, out of what each layer returns and what enters."""
        values = tuple(results[k] if k >= 0 else self.entries(x)[~k] for k in self.leaving)
        return values[0] if len(values) == 1 else values or None

    def entries(self, x: Any) -> tuple[Any, ...]:
        """Split what enters, for one microbatch or for all as one, into results."""
        return (x,) if len(self.before) == 1 else x or ()


def links_of(stages: Sequence[Sequence[Layer]], params: Mapping[str, Params]) -> tuple[StageLinks, ...]:
    """Link a model's stages, all of them in order. ``params``: shapes by layer, as
    :func:`~jaxpipe.stage.model.params.compute_avals` gives them; they tell what is trained.

    Raises:
        StageError: a stage has no layers.
    """
    if not all(stages):
        raise StageError(f"stage {list(map(bool, stages)).index(False)} has no layers; cut the model into fewer stages")
    layers = [layer for stage in stages for layer in stage]
    home = [s for s, stage in enumerate(stages) for _ in stage]
    start = [home.index(s) for s in range(len(stages))]
    sources_of = taken_by(layers)
    # A layer's result has a cotangent if anything trained stands behind it: a stage before the first trained layer has no
    # backward.
    learns: list[bool] = []
    for layer, sources in zip(layers, sources_of, strict=True):
        learns.append(_has_trained(layer, params) or any(learns[k] for k in sources))
    read = {k for sources in sources_of for k in sources}
    entering = [sorted({k for i in _of(home, s) for k in sources_of[i] if home[k] < s}) for s in range(len(stages))]
    # Detached layers hand no gradient back for what they take, so an entry that only they read has no cotangent.
    attached = [{k for i in _of(home, s) if not layers[i].detached for k in sources_of[i]} for s in range(len(stages))]
    leaving = [
        sorted({k for entering_results in entering for k in entering_results if home[k] == s})
        for s in range(len(stages))
    ]

    def links(s: int) -> StageLinks:
        mine, inside, out = _of(home, s), entering[s], leaving[s]
        readers = [t for t, results_entering in enumerate(entering) if not set(out).isdisjoint(results_entering)]
        losses = [i for i in mine if i not in read]
        return StageLinks(
            tuple(tuple(k - start[s] if home[k] == s else ~inside.index(k) for k in sources_of[i]) for i in mine),
            tuple((home[k], leaving[home[k]].index(k)) for k in inside),
            tuple(k - start[s] for k in out),
            tuple((t, tuple(n for n, k in enumerate(out) if k in entering[t])) for t in readers),
            tuple(i - start[s] for i in losses),
            tuple(learns[k] and k in attached[s] for k in inside),
            tuple(learns[k] for k in out),
            tuple(learns[i] for i in losses),
            max(layer.span for layer in stages[s]),
            tuple(n for n, t in enumerate(readers) if attached[t].isdisjoint(out)),
        )

    return tuple(map(links, range(len(stages))))


def loss_factor(layer: Layer) -> str:
    """Name the batch array that holds what a loss's gradient is multiplied by, where a model has several losses: the first
    one's weight in the step over its own. The runtime makes it."""
    # With a blank: no batch array of a user's is called so.
    return f"factor of {layer.name}"


def layer_loss_factor(name: str) -> str:
    """Name the batch array that holds what the gradient of a loss that layers have is multiplied by: its factor, times the
    first loss's weight in the step over its own."""
    return f"factor of the losses {name}"


def stage_edges(links: Sequence[StageLinks]) -> tuple[tuple[int, int], ...]:
    """Return (from, to) of the stages that take results of each other."""
    return tuple(sorted({(t, s) for s, link in enumerate(links) for t, _ in link.before}))


def _of(home: Sequence[int], stage: int) -> list[int]:
    return [i for i, s in enumerate(home) if s == stage]


def _has_trained(layer: Layer, params: Mapping[str, Any]) -> bool:
    tied = [find_leaf(params, (owner, *path)) for owner, path in layer.tied.values()]
    leaves = jax.tree.leaves([params.get(layer.name), tied])
    return any(hasattr(leaf, "dtype") and is_trained(leaf) for leaf in leaves)


_MOST_DIVISIONS = 20_000
"""The most ways of dividing stages among branches that are tried."""

Cut = tuple[tuple[int, int], ...]
"""Half-open ranges of layer indices, one a stage, in order and without gaps."""

Edges = tuple[tuple[int, int], ...]
"""(from, to) of stages that take each other's results."""


@dataclass(frozen=True, slots=True)
class TiedLeaf:
    """A parameter leaf that a stage uses and another layer owns; the owner's stage keeps, updates and sends it."""

    layer: str
    path: Path
    owner_layer: str
    owner_path: Path
    owner_stage: int


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: layers ``start`` to ``stop`` (exclusive) of the model.

    ``param_paths``: ``layer/path`` of each leaf it owns. ``param_bytes``: of those, as ``init`` makes them. ``cost``: in the
    plan's unit. ``cost_share``: its part of the sum over stages.
    """

    index: int
    start: int
    stop: int
    layers: tuple[str, ...]
    param_paths: tuple[str, ...]
    num_params: int
    param_bytes: int
    tied: tuple[TiedLeaf, ...]
    cost: float
    cost_share: float


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A model's stages in order. ``costs_from`` says what the costs are: ``"equal"``, ``"flops"``, ``"measured"`` …"""

    model: str
    stages: tuple[StageSpec, ...]
    layer_costs: tuple[float, ...]
    costs_from: str

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def cut(self) -> Cut:
        return tuple((stage.start, stage.stop) for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """Largest stage cost over the mean, 1.0 when even: no schedule of these stages beats it without a bubble."""
        costs = [stage.cost for stage in self.stages]
        return max(costs) * len(costs) / sum(costs) if sum(costs) > 0 else 1.0

    def __str__(self) -> str:
        """Format a table for people, a row each stage."""
        rows = [("stage", "layers", "parameters", "MB", f"cost ({self.costs_from})", "share", "tied to")]
        for s in self.stages:
            span = s.layers[0] if len(s.layers) == 1 else f"{s.layers[0]} … {s.layers[-1]} ({len(s.layers)})"
            ties = ", ".join(f"{t.owner_layer}/{'/'.join(t.owner_path)} @ {t.owner_stage}" for t in s.tied)
            megabytes = f"{s.param_bytes / 1e6:.2f}"
            rows.append(
                (str(s.index), span, f"{s.num_params:,}", megabytes, f"{s.cost:.4g}", f"{s.cost_share:.1%}", ties)
            )
        title = f"{self.model}: {self.num_stages} stages, largest is {self.imbalance:.3f} of the mean"
        return "\n".join([title, *aligned(rows, left=range(len(rows[0])))])

    def to_json(self) -> str:
        """Write text that :meth:`from_json` reads back to an equal plan."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> StagePlan:
        """Read a plan. Raises StageError, with the reason, when ``text`` is not what :meth:`to_json` writes."""
        try:
            data = json.loads(text)
            stages = tuple(_stage_from(stage) for stage in data.pop("stages"))
            return cls(stages=stages, **{**data, "layer_costs": tuple(map(float, data["layer_costs"]))})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StageError(f"not a stage plan in JSON ({error}); write one with StagePlan.to_json") from error


def cut(
    layers: Sequence[Layer], num_stages: int, costs: Sequence[float] | None = None, edges: Edges | None = None
) -> Cut:
    """Cut ``layers`` into ``num_stages`` runs of consecutive layers so that the largest total cost is least.

    ``costs``: one finite number ≥ 0 a layer, in any unit; None counts every layer the same. Where they are
    :class:`LayerCosts`, bytes between stages decide between equal cuts. The last stage holds the loss and, if there are more
    layers than stages, the layer before it.

    Layers that form a graph are cut branch by branch, a branch being a longest chain: no stage holds layers of two branches,
    unless there are more of these than stages. Then a branch may be joined to a neighbour in the list that takes its result,
    and if that is not enough to any. ``edges``: (from, to) of stages that the cut must have, None for any.

    Raises:
        StageError: there are more stages than layers, the costs do not fit the layers, or no such cut has these edges.
    """
    n = len(layers)
    if not 1 <= num_stages <= n:
        raise StageError(f"{num_stages} stages of {n} layers; every stage needs a layer, so use 1 to {n} stages")
    # Integers make "the least" exact, and the cut the same on every machine.
    units = _whole_numbers(_checked_costs(layers, costs))
    crossing = list(costs.boundary_bytes) if isinstance(costs, LayerCosts) else [0] * n
    sources_of = taken_by(layers)
    counts = Counter(k for sources in sources_of for k in sources)
    follows = [i for i in range(1, n) if i - 1 in sources_of[i]]
    straight = {i for i in follows if sources_of[i] == (i - 1,) and counts[i - 1] == 1}
    evenly = cache(lambda a, b, count: _evenly(a, b, count, units, crossing, ends_alone=counts[b - 1] == 0))
    candidates: list[tuple[int, int, Cut]] = []
    # From the strictest rule of what may share a stage to the loosest; the first that gives a cut counts, so branches are
    # joined only where there are fewer stages than branches.
    for joined in (straight, set(follows), set(range(1, n))):
        ends = [*(i for i in range(1, n) if i not in joined), n]
        if math.comb(num_stages - 1, len(ends) - 1) > _MOST_DIVISIONS:
            continue
        for parts in _divided(num_stages, [b - a for a, b in pairwise([0, *ends])]):
            ranges: list[tuple[int, int]] = []
            for start, stop, count in zip([0, *ends], ends, parts, strict=False):
                ranges += evenly(start, stop, count)
            if edges is None or cut_edges(sources_of, ranges) == tuple(sorted(edges)):
                sums = [sum(units[a:b]) for a, b in ranges]
                candidates.append((max(sums), sum(x * x for x in sums), tuple(ranges)))
        if candidates:
            return min(candidates)[-1]
    assert edges is not None, "any number of stages up to that of layers can be cut"
    raise StageError(
        f"no cut of these {n} layers, branch by branch, into {num_stages} stages has the edges {arrows(edges)}; say where "
        "stages begin, or use a placement with the edges that follow from what the layers take"
    )


def cut_edges(sources_of: Sequence[Sequence[int]], ranges: Cut | Sequence[tuple[int, int]]) -> Edges:
    """Return (from, to) of the stages of a cut, ascending, by what each layer takes
    (:func:`~jaxpipe.stage.model.layer.taken_by`)."""
    home = [s for s, (start, stop) in enumerate(ranges) for _ in range(start, stop)]
    return tuple(
        sorted({(home[k], home[i]) for i, sources in enumerate(sources_of) for k in sources if home[k] != home[i]})
    )


def _divided(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to give each of some branches 1 to ``most`` stages, ``total`` in all."""
    for ends in combinations(range(1, total), len(most) - 1):
        parts = tuple(b - a for a, b in pairwise([0, *ends, total]))
        if all(map(operator.le, parts, most)):
            yield parts


def _evenly(
    start: int, stop: int, count: int, units: Sequence[int], crossing: Sequence[int], ends_alone: bool
) -> list[tuple[int, int]]:
    """Divide layers ``start`` to ``stop`` into ``count`` stages. A loss at the end (nothing takes it: ``ends_alone``) stays
    with the layer before it, unless every layer is a stage."""
    # Done by making the two one layer for the search.
    layer_units, sent = list(units[start:stop]), list(crossing[start:stop])
    joined = 1 if ends_alone and 1 < count < len(layer_units) else 0
    if joined:
        layer_units = [*layer_units[:-2], layer_units[-2] + layer_units[-1]]
    prefix = list(accumulate(layer_units, initial=0))
    ends = _most_even(prefix, count, _least_largest(prefix, count), sent)
    ends[-1] += joined
    return [(start + a, start + b) for a, b in pairwise([0, *ends])]


def cut_at(layers: Sequence[Layer], boundaries: Sequence[int | str]) -> Cut:
    """Return the cut whose stages, from the second on, start at ``boundaries``: layer indices or names, in order.

    Raises StageError for a layer that does not exist and for boundaries out of order.
    """
    names = [layer.name for layer in layers]
    starts = [0]
    for boundary in boundaries:
        if not isinstance(boundary, str) and not _is_index(boundary):
            raise StageError(f"a stage can't start at layer {boundary!r}; want the index of a layer, or its name")
        if isinstance(boundary, str) and boundary not in names:
            raise StageError(f"no layer {boundary!r} to start a stage at; layers are {', '.join(names)}")
        start = names.index(boundary) if isinstance(boundary, str) else int(boundary)
        if not starts[-1] < start < len(layers):
            possible = (
                f"{starts[-1] + 1} to {len(layers) - 1}" if starts[-1] + 1 < len(layers) else "none, no layer is left"
            )
            raise StageError(
                f"a stage can't start at layer {boundary!r} after one that starts at {starts[-1]}; possible: {possible}"
            )
        starts.append(start)
    return tuple(zip(starts, [*starts[1:], len(layers)], strict=True))


def checked_cut(layers: Sequence[Layer], ranges: Sequence[tuple[int, int]]) -> Cut:
    """Return ``ranges``, one ``(first, one past last)`` a stage, if they are a cut: all layers in order, each once.

    Raises StageError, naming the stage, for gaps, overlaps, another order, empty stages, layers that do not exist, and what is
    no range.
    """
    for stage, stage_range in enumerate(ranges):
        if (
            not isinstance(stage_range, Sequence | np.ndarray)
            or len(stage_range) != 2
            or not all(map(_is_index, stage_range))
        ):
            raise StageError(
                f"stage {stage} is given layers {stage_range!r}; want a range (start, stop) of layer indices for each stage, "
                f"as in [(0, 3), (3, {len(layers)})]; plan_stages(model, boundaries=[3]) takes where stages start"
            )
    end = 0
    for stage, (start, stop) in enumerate(ranges):
        last = stage == len(ranges) - 1
        if start != end or not start < stop <= len(layers) or (last and stop != len(layers)):
            most = len(layers) - (len(ranges) - 1 - stage)
            expected = f"({end}, {most})" if last else f"({end}, n) with n from {end + 1} to {most}"
            raise StageError(
                f"stage {stage} is given layers ({start}, {stop}); want {expected}: the stages take all {len(layers)} layers "
                "in order, each once (jaxpipe.stage.model.plan.cut makes such a cut)"
            )
        end = stop
    return tuple((int(start), int(stop)) for start, stop in ranges)


def plan_stages(
    model: Model,
    num_stages: int | None = None,
    *,
    costs: Sequence[float] | None = None,
    costs_from: str = "",
    boundaries: Sequence[int | str] | None = None,
    edges: Edges | None = None,
) -> StagePlan:
    """Plan ``model`` in ``num_stages`` balanced stages, or cut at ``boundaries``; give one of the two.

    ``costs`` and ``edges`` as in :func:`cut`, and ``costs_from`` their name for the table. Shapes come from ``init`` by
    abstract evaluation: nothing is allocated. Raises StageError as :func:`cut` and :func:`cut_at` do.
    """
    if (num_stages is None) == (boundaries is None):
        raise StageError("a stage plan needs either num_stages or boundaries, and not both")
    layers = model.layers
    values = _checked_costs(layers, costs)
    if boundaries is not None:
        ranges = cut_at(layers, boundaries)
    else:
        assert num_stages is not None
        ranges = cut(layers, num_stages, costs, edges)
    stage_of = {layers[i].name: s for s, (start, stop) in enumerate(ranges) for i in range(start, stop)}
    avals = param_avals(model)
    # For its error: an owner may lack the leaf that is tied to it.
    for layer in layers:
        with_tied_leaves(layer, avals)
    total = math.fsum(values)
    stages = []
    for index, (start, stop) in enumerate(ranges):
        mine = layers[start:stop]
        leaves = {"/".join((layer.name, *path)): leaf for layer in mine for path, leaf in leaves_of(layer.name, avals)}
        cost = math.fsum(values[start:stop])
        stages.append(
            StageSpec(
                index=index,
                start=start,
                stop=stop,
                layers=tuple(layer.name for layer in mine),
                param_paths=tuple(leaves),
                num_params=sum(leaf.size for leaf in leaves.values()),
                param_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values()),
                tied=tuple(
                    TiedLeaf(layer.name, path, owner, owner_path, stage_of[owner])
                    for layer in mine
                    for path, (owner, owner_path) in layer.tied.items()
                ),
                cost=cost,
                cost_share=cost / total if total > 0 else 1 / len(ranges),
            )
        )
    return StagePlan(model.name, tuple(stages), values, costs_from or ("equal" if costs is None else "given"))


def param_avals(model: Model) -> dict[str, Any]:
    """Return ``{layer name: pytree of ShapeDtypeStruct}`` of what ``init`` makes. Raises StageError, as
    :func:`~jaxpipe.stage.model.layer.init_avals`."""
    return every_init_avals(model.layers)


class LayerCosts(tuple[float, ...]):
    """The cost of each layer, as a tuple; and ``boundary_bytes``: those that each sends on, if a stage ends with it."""

    boundary_bytes: tuple[int, ...]

    def __new__(cls, costs: Iterable[float], boundary_bytes: Iterable[int]) -> LayerCosts:
        layer_costs = super().__new__(cls, costs)
        layer_costs.boundary_bytes = tuple(boundary_bytes)
        assert len(layer_costs) == len(layer_costs.boundary_bytes), "as many costs as layers"
        return layer_costs


def analytic_layer_costs(
    model: Model, microbatch_size: int, cache: dict[Any, Any] | None = None, attention: AttentionFormula = EXECUTED
) -> LayerCosts:
    """Count the forward FLOPs of each layer on one microbatch: multiplications and additions of its matrix products.

    Counted from the layer's jaxpr in training mode, what nothing returned depends on left out. Layers that are alike or
    share an ``apply`` function, and shapes, are traced once, also over calls that share a ``cache``. ``attention``: what is
    counted of an attention kernel. An embedding look-up and the loss count nothing.

    Raises:
        StageError: a layer fails; says which.
    """
    params = param_avals(model)
    batch = model.batch_spec(microbatch_size)
    costs_of: dict[Any, tuple[float, Any]] = {} if cache is None else cache
    costs, sent = [], []
    outputs: list[Any] = []
    for layer, sources in zip(model.layers, taken_by(model.layers), strict=True):
        x = given_to(layer, [outputs[k] for k in sources])
        arguments = (with_tied_leaves(layer, params), x, {name: batch[name] for name in layer.reads}, key_aval())
        leaves, structure = jax.tree.flatten(arguments)
        same = layer.apply if layer.alike is None else layer.alike
        signature = (same, attention, layer.uses_key, structure, *(_shape(leaf) for leaf in leaves))
        if signature not in costs_of:
            costs_of[signature] = _forward_flops(layer, arguments, attention)
        flops, y = costs_of[signature]
        outputs.append(y)
        costs.append(flops)
        sent.append(sum(aval_bytes(leaf) for leaf in jax.tree.leaves(y) if isinstance(leaf, jax.ShapeDtypeStruct)))
    return LayerCosts(costs, sent)


def _forward_flops(layer: Layer, arguments: tuple[Any, ...], attention: AttentionFormula) -> tuple[float, Any]:
    """Count the FLOPs of one layer; return them with what it returns, arrays as ShapeDtypeStruct. Leaves that are no arrays
    pass as they are."""
    outputs: list[Any] = []

    def forward(arrays: list[jax.Array]) -> list[Any]:
        params, x, data, key = fill(arguments, arrays)
        result = calling(layer, params, x, LayerContext(data, key if layer.uses_key else None))
        outputs.append(split_result(result).y)
        return array_leaves(outputs[0])

    jaxpr, out = jax.make_jaxpr(forward, return_shape=True)(array_leaves(arguments))
    return float(jaxpr_flops(only_results(jaxpr, range(len(out)))[0], attention=attention)), fill(outputs[0], out)


def _is_index(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """Express costs as whole numbers of a unit of about 2^-60 of the largest: sums of floats would depend on their order, and
    cuts that are equal would not compare as equal."""
    exponent = 60 - math.frexp(max(costs))[1]
    return [int(math.ldexp(cost, exponent)) for cost in costs]


def _least_largest(prefix: Sequence[int], num_stages: int) -> int:
    """Find the least possible largest stage cost, by bisection. ``prefix``: summed costs of the first i layers."""
    low, high = max(b - a for a, b in pairwise(prefix)), prefix[-1]
    while low < high:
        limit = (low + high) // 2
        if _furthest(prefix, num_stages, limit)[-1] == len(prefix) - 1:
            high = limit
        else:
            low = limit + 1
    return low


def _furthest(prefix: Sequence[int], num_stages: int, limit: int) -> list[int]:
    """Count how many layers fit into the first s stages, for s = 0 …, none above ``limit``."""
    ends = [0]
    for _ in range(num_stages):
        ends.append(bisect_right(prefix, prefix[ends[-1]] + limit) - 1)
    return ends


def _most_even(prefix: Sequence[int], num_stages: int, limit: int, crossing: Sequence[int]) -> list[int]:
    """Find the ends of the stages with the least Σ cost² among cuts with no stage above ``limit``; then with the fewest bytes
    ``crossing`` between stages (``crossing[i]``: after layer i); then with the first stages long.

    Where the next stage best begins moves up with where it ends (squares of sums satisfy the quadrangle inequality), so each
    stage takes O(layers · log layers).
    """
    n = len(prefix) - 1
    backwards = [prefix[-1] - p for p in reversed(prefix)]
    first = [n - end for end in reversed(_furthest(backwards, num_stages, limit))]
    last = _furthest(prefix, num_stages, limit)
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    begins: list[dict[int, int]] = []
    for s in range(1, num_stages + 1):
        ends = range(max(first[s], s), min(last[s], n - num_stages + s) + 1)
        begin: dict[int, int] = {}
        row: dict[int, tuple[int, int]] = {}
        # Divide and conquer: the middle end's best begin bounds the begins of all ends before it and behind it.
        spans = [(ends.start, ends.stop, min(best), max(best))]
        while spans:
            start, stop, low, high = spans.pop()
            if start == stop:
                continue
            end = (start + stop) // 2
            least = max(low, bisect_left(prefix, prefix[end] - limit))
            (squares, sent, minus) = min(
                (best[j][0] + (prefix[end] - prefix[j]) ** 2, best[j][1] + (crossing[j - 1] if j else 0), -j)
                for j in range(least, min(high, end - 1) + 1)
            )
            row[end], begin[end] = (squares, sent), -minus
            spans += [(start, end, low, -minus), (end + 1, stop, -minus, high)]
        best = row
        begins.append(begin)
    ends_found = [n]
    for begin in reversed(begins[1:]):
        ends_found.append(begin[ends_found[-1]])
    return ends_found[::-1]


def _checked_costs(layers: Sequence[Layer], costs: Sequence[float] | None) -> tuple[float, ...]:
    if costs is None:
        return (1.0,) * len(layers)
    if len(costs) != len(layers):
        raise StageError(f"{len(costs)} costs for {len(layers)} layers; give one a layer")
    for layer, cost in zip(layers, costs, strict=True):
        if not 0 <= cost < math.inf:
            raise StageError(f"the cost of layer {layer.name} is {cost}; want a finite number >= 0")
    return tuple(map(float, costs))


def _stage_from(data: Mapping[str, Any]) -> StageSpec:
    tied = tuple(
        TiedLeaf(**{**leaf, "path": tuple(leaf["path"]), "owner_path": tuple(leaf["owner_path"])})
        for leaf in data["tied"]
    )
    lists = {name: tuple(data[name]) for name in ("layers", "param_paths")}
    return StageSpec(**{**data, **lists, "tied": tied})
