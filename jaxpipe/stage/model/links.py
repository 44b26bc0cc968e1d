"""Links the layers of a model once it is cut: who takes whose results, inside each stage and from stage to stage.

What enters a stage is what its layers take of earlier stages' layers, each result once, in the order of the model's layers, and
so in ascending order of the stages that make them. What leaves is what later stages take, in the same order. A stage of a chain
gets one result and hands on one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpipe.errors import StageError
from jaxpipe.stage.model.layer import Layer, Params, taken_by
from jaxpipe.stage.model.params import find_leaf, is_trained


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


def stage_edges(links: Sequence[StageLinks]) -> tuple[tuple[int, int], ...]:
    """Return (from, to) of the stages that take results of each other."""
    return tuple(sorted({(t, s) for s, link in enumerate(links) for t, _ in link.before}))


def _of(home: Sequence[int], stage: int) -> list[int]:
    return [i for i, s in enumerate(home) if s == stage]


def _has_trained(layer: Layer, params: Mapping[str, Any]) -> bool:
    tied = [find_leaf(params, (owner, *path)) for owner, path in layer.tied.values()]
    leaves = jax.tree.leaves([params.get(layer.name), tied])
    return any(hasattr(leaf, "dtype") and is_trained(leaf) for leaf in leaves)
