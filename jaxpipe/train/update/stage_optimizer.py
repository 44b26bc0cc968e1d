"""The optimizer of one stage's layers, and how its state lies on the devices of the stage's rank.

A leaf of the state that is like a divided parameter is divided as that is (:mod:`jaxpipe.train.update.shards`,
:mod:`jaxpipe.train.update.pieces`); every other leaf is whole on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe.stage.model.params import LeafSlot, Place
from jaxpipe.train.update.layerwise import LayerwiseOptimizer, OptimizerPart
from jaxpipe.train.update.optimizer_state import StateLeaf, fitted, of_layers
from jaxpipe.train.update.pieces import Division, check_pieces, divided_like
from jaxpipe.train.update.reduction import own_piece, whole_leaf
from jaxpipe.train.update.shards import StageShards


@dataclass(frozen=True, slots=True)
class StageOptimizer:
    """``part``: the programs for what a device holds. ``leaves``: of the state, whole; ``slots``: the parameter that each is
    divided like, or None."""

    shards: StageShards
    part: OptimizerPart
    leaves: tuple[StateLeaf, ...]
    slots: tuple[LeafSlot | None, ...]

    @property
    def avals(self) -> Any:
        """What the rank holds."""
        return self._tree(
            self.shards.same_aval(leaf.aval) if slot is None else self.shards.leaf_aval(leaf.aval, slot)
            for leaf, slot in zip(self.leaves, self.slots, strict=True)
        )

    @property
    def specs(self) -> Any:
        """How it lies."""
        return self._tree(P() if slot is None else self.shards.leaf_spec(slot) for slot in self.slots)

    def place(self, states: Mapping[str, Any]) -> Any:
        """States by layer, whole, on the devices.

        Raises:
            CheckpointError: they are of another optimizer or model.
        """
        values = fitted(self.leaves, self.shards.layout.layers, states)
        divided = [
            self.shards.host_chunk(value, slot) if slot is not None and self.shards.chunked else value
            for value, slot in zip(values, self.slots, strict=True)
        ]
        return jax.device_put(self._tree(divided), jax.tree.map(lambda a: a.sharding, self.avals))

    def by_layer(self, state: Any) -> dict[str, Any]:
        """The state of each layer alone, whole: as ``optimizer.init({layer: leaves})`` makes it."""
        leaves = [
            self.shards.host_whole(value, slot) if slot is not None and self.shards.chunked else value
            for value, slot in zip(jax.tree.leaves(state), self.slots, strict=True)
        ]
        layers = self.shards.layout.layers
        numbers, owners = self._tree(range(len(leaves))), [leaf.layer for leaf in self.leaves]
        return {name: jax.tree.map(leaves.__getitem__, of_layers(numbers, [name], layers, owners)) for name in layers}

    def _tree(self, leaves: Iterable[Any]) -> Any:
        return jax.tree.unflatten(self.part.structure, leaves)


def stage_optimizers(
    optimizer: Any, shards: Mapping[int, StageShards], extra: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[int, StageOptimizer]:
    """The optimizer of each stage; ``extra``: shapes of the arguments that its update gets.

    Raises:
        ConfigError: it can't be applied layer by layer, or devices would see pieces of parameters and it neither treats
            elements alone nor knows what to do on pieces (``on_pieces``).
    """
    undivided = LayerwiseOptimizer.trace(optimizer, _joined(s.whole_avals() for s in shards.values()), extra)
    division: Division = {
        (slot.layer, slot.path): (s.chunked, slot.axis)
        for s in shards.values()
        for slot in s.layout.slots
        if s.divides(slot)
    }
    local = undivided
    divided: tuple[Place | None, ...] = (None,) * len(undivided.leaves)
    if division:
        on_pieces = getattr(optimizer, "on_pieces", None)
        pieces = optimizer if on_pieces is None else on_pieces(partial(_gathered, shards))
        axes = next(iter(shards.values())).mesh.shape  # the same on each rank
        avals = _joined(s.local_avals() for s in shards.values())
        local = LayerwiseOptimizer.trace(pieces, avals, extra, tuple(axes.items()))
        if on_pieces is None:
            check_pieces(undivided, local, division)
        divided = divided_like(undivided, local, division)
    by_stage = {}
    for s, x in shards.items():
        part, slots = local.part(x.layout.layers), {(slot.layer, slot.path): slot for slot in x.layout.slots}
        like = tuple(None if (at := divided[k]) is None else slots[at] for k in part.numbers)
        by_stage[s] = StageOptimizer(x, part, tuple(undivided.leaves[k] for k in part.numbers), like)
    return by_stage


def _gathered(
    shards: Mapping[int, StageShards], place: Place, function: Callable[[jax.Array], jax.Array], piece: jax.Array
) -> jax.Array:
    """A device's piece of ``function`` of a whole leaf, of which every device of the rank has a piece."""
    layer, path = place
    candidates = (
        (x, slot) for x in shards.values() for slot in x.updated_slots if (slot.layer, slot.path) == (layer, path)
    )
    mine, slot = next(candidates)
    return own_piece(mine, slot, function(whole_leaf(mine, slot, piece)))


def _joined(trees: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: leaves for tree in trees for name, leaves in tree.items()}
