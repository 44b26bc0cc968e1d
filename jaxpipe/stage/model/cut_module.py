"""Cuts a Flax module into layers at its blocks, whatever its call does around them.

The call is traced with its blocks left out (``model/outline.py``). Then it is known what each block receives, and the
layers follow: ``embed`` computes what the first block receives, ``block_00`` … are the blocks in the order of their calls,
``head`` computes what the module returns, ``loss`` is a function of the caller's. Where a block receives something computed
after another one (encoder norm before the decoder), a layer ``between_06`` before it computes that.

Between layers flows a tuple of the arrays that a later layer reads: results of blocks, and what blocks receive. What depends on
the batch alone (positions, masks) does not flow: each layer that reads it computes it again. A parameter that several layers
read belongs to the first; the others are tied to it. All this is read off the jaxpr, none of it assumed; what can't be cut so
is refused.

Differs from the module: each layer draws random numbers from a key of its own, and ``jax.checkpoint`` around a block is left to
recompute policies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._jax_compat import Atom, Literal, Var, shape_of
from jaxpipe.errors import StageError
from jaxpipe.stage.jaxprs import array_leaves, fill, is_array
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params, Path
from jaxpipe.stage.model.outline import TRAIN, CuttableModule, Home, Outline, Tracing, Wire, Wiring, structure_key
from jaxpipe.stage.model.params import nested, required_leaf
from jaxpipe.text import closest


@dataclass(frozen=True, slots=True, repr=False)
class CutModel(Model):
    """A module's layers. ``homes``: the place of each leaf in the module's own parameters, by layer and path in it."""

    homes: Mapping[str, Mapping[Path, Home]]

    def by_layer(self, params: Params) -> dict[str, Params]:
        """Sort the module's own parameters (a nested dict with string keys) by layer name, as :meth:`Assembly.place` takes
        them.

        Raises:
            StageError: one is missing.
        """
        return {
            name: nested(
                {path: _part(required_leaf(params, home, self.name), index) for path, (home, index) in homes.items()}
            )
            for name, homes in self.homes.items()
        }

    def whole(self, params: Mapping[str, Params]) -> Params:
        """Join parameters by layer name, on whatever devices, into the module's own: arrays of NumPy, except while JAX traces.
        Those that its call never reads are left out.

        Raises:
            StageError: one is missing.
        """
        stacks: dict[Path, dict[int, Any]] = {}
        single: dict[Path, Any] = {}
        for name, homes in self.homes.items():
            for path, (home, index) in homes.items():
                leaf = required_leaf(params.get(name, {}), path, f"{self.name}, layer {name!r}")
                leaf = leaf if isinstance(leaf, jax.core.Tracer) else jax.device_get(leaf)
                if index is None:
                    single[home] = leaf
                else:
                    stacks.setdefault(home, {})[index] = leaf
        stacked = {home: _stacked([leaves[i] for i in sorted(leaves)]) for home, leaves in stacks.items()}
        return nested({**single, **stacked})


def batch_types(label: str, batch: Any, reads: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the types of the arrays of an example microbatch; for nested lists, those of the arrays that NumPy makes of them.

    Raises:
        StageError: the batch is no mapping, lacks what is read, or holds what is no array with a batch axis first.
    """
    if not isinstance(batch, Mapping):
        raise StageError(
            f"{label}: batch= is a {type(batch).__name__}; want a dict of arrays by name, as a step gets them"
        )
    absent = [n for n in reads if n not in batch]
    if absent:
        raise StageError(f"{label}: the module reads {absent[0]!r}, and the batch has {', '.join(batch)}")
    types: dict[str, jax.ShapeDtypeStruct] = {}
    for name, value in batch.items():
        try:
            array = value if is_array(value) else np.asarray(value)
            types[name] = jax.ShapeDtypeStruct(array.shape, jnp.result_type(array))
        except (ValueError, TypeError):
            raise StageError(
                f"{label}: {name!r} in the batch is a {type(value).__name__} that is no array of numbers; give an array, batch "
                "axis first"
            ) from None
        if not types[name].shape:
            raise StageError(f"{label}: {name!r} in the batch is one number; give an array, batch axis first")
    return types


def check_leaves(label: str, params: Mapping[Path, Any], shapes: Mapping[Path, tuple[int, ...]], advice: str) -> None:
    """Raise StageError unless ``params`` are among a module's parameters, in their shapes; ``advice``: what to give."""
    for path, value in params.items():
        name = "/".join(path)
        if path not in shapes:
            near = closest(name, map("/".join, shapes))
            raise StageError(f"{label} has no parameter {name!r}{near}; {advice}")
        if np.shape(value) != shapes[path]:
            raise StageError(f"{label}: parameter {name} has shape {shapes[path]}, got {np.shape(value)}; {advice}")


def cut_module(
    module: CuttableModule,
    *,
    name: str,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    reads: Sequence[str],
    loss: Callable[[Any, Mapping[str, jax.Array]], Any],
) -> CutModel:
    """Make the model of a module. ``batch``: arrays of an example microbatch, as :func:`batch_types` gives them. ``reads``:
    those that the module's call takes, in its order. ``loss(output, batch)``: as :class:`Model` wants it of the last layer.

    Raises:
        StageError: the module can't be cut; says what was found.
    """
    tracing = Tracing(module, tuple(reads))
    data = [batch[n] for n in reads]
    outlines = tracing.outlines(data)
    layers, homes = _LayerFactory(tracing, Wiring(module, outlines)).made()
    layers.append(Layer("loss", lambda key: {}, lambda params, x, context: loss(x, context.data), tuple(batch)))
    homes["loss"] = {}
    output = outlines[TRAIN].output
    shape = shape_of(output) if isinstance(output, Var | Literal) else ()
    _, seq_len, vocab_size = shape if len(shape) == 3 else (0, 0, 0)

    def batch_spec(size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {n: jax.ShapeDtypeStruct((size, *v.shape[1:]), v.dtype) for n, v in batch.items()}

    return CutModel(name, tuple(layers), batch_spec, vocab_size, seq_len, homes)


@dataclass(frozen=True, slots=True)
class _Step:
    """A layer to be. ``entry``: the entry before which it computes (blocks: in which). ``block``: None for what is around
    blocks.
    ``wires``: the wires that it computes. ``takes``: those that it reads. ``leaves``: parameters, by path in it. ``enters``,
    ``hands_on``: the wires that flow into it and out of it, in order."""

    name: str
    entry: int
    block: int | None
    wires: tuple[Wire, ...]
    takes: frozenset[Wire]
    leaves: Mapping[Path, Home]
    draws: bool
    enters: tuple[Wire, ...] = ()
    hands_on: tuple[Wire, ...] = ()


class _LayerFactory:
    """Makes the layers of a wiring."""

    def __init__(self, tracing: Tracing, wiring: Wiring) -> None:
        self.tracing = tracing
        self.module = tracing.module
        self.wiring = wiring
        blocks = range(len(self.module.names))
        self.stacked = {p for k in blocks for p, index in self.module.homes[k].values() if index is not None}
        self.steps = _flowing(list(self._steps()))
        self._applies: dict[Hashable, Callable[..., Any]] = {}

    def made(self) -> tuple[list[Layer], dict[str, dict[Path, Home]]]:
        """Return the layers, and by name the places of the leaves that each owns."""
        # In order, so that a leaf belongs to the first layer that reads it, and the later ones are tied to that.
        owner: dict[Home, tuple[str, Path]] = {}
        layers: list[Layer] = []
        homes: dict[str, dict[Path, Home]] = {}
        for step in self.steps:
            tied = {path: owner[home] for path, home in step.leaves.items() if home in owner}
            owned_leaves = {path: home for path, home in step.leaves.items() if path not in tied}
            owner.update((home, (step.name, path)) for path, home in owned_leaves.items())
            homes[step.name] = owned_leaves
            apply = self._around(step) if step.block is None else self._block(step, step.block)
            traces = step.block is None or self._free(step) or self._numbered(step)
            reads = self.tracing.reads if traces else ()
            layers.append(Layer(step.name, self._init(owned_leaves), apply, reads, step.draws, tied))
        return layers, homes

    def _steps(self) -> Iterable[_Step]:
        train = self.wiring.outlines[TRAIN]
        width = len(str(max(len(self.module.names) - 1, 10)))
        for c, entry in enumerate(train.entries):
            if self.wiring.computed[c]:
                name = "embed" if c == 0 else f"between_{entry.first:0{width}}"
                yield self._around_step(name, c, tuple(self.wiring.computed[c]))
            for k in range(entry.first, entry.first + entry.count):
                arguments = [self.wiring.sources[(k, i)] for i in range(len(entry.entering))]
                takes = frozenset(w for w in arguments if w not in self.wiring.free)
                results = tuple(("out", k, j) for j in range(len(entry.leaving)))
                _, draws = self.tracing.probe(k, entry.arguments, TRAIN)
                yield _Step(f"block_{k:0{width}}", c, k, results, takes, self.module.homes[k], draws)
        yield self._around_step("head", len(train.entries), ())

    def _around_step(self, name: str, c: int, wires: tuple[Wire, ...]) -> _Step:
        """Describe the step before entry ``c``: ``wires``, or what the module returns."""
        # The union over all modes: the layer must have what evaluation reads, and training.
        takes: set[Wire] = set()
        leaves: dict[Path, Home] = {}
        draws = False
        for mode, outline in self.wiring.outlines.items():
            targets = [outline.wires[w] for w in wires] if c < len(outline.entries) else outline.results
            wire_of = self._known(outline, c)
            eqns, starts = outline.needed(targets, wire_of)
            takes.update(wire_of[v] for v in starts if v in wire_of)
            read = [p for p, v in zip(self.module.leaves, outline.invars, strict=False) if v in starts - wire_of.keys()]
            if self.stacked.intersection(read):
                where = "/".join(min(self.stacked.intersection(read)))
                raise StageError(
                    f"{self.module.label} reads {where}, which its blocks share out, outside of them; write the layers by hand"
                )
            leaves.update((p, (p, None)) for p in read)
            draws = draws or outline.invars[-1] in starts
            # The layers before have drawn from their own keys, so drawing again here would give other numbers.
            if mode[0] and c and outline.draws_before(eqns, c - 1):
                raise StageError(
                    f"{self.module.label}: random numbers drawn before block {outline.entries[c - 1].first} are used after it "
                    "outside of blocks; pass what was computed with them through the blocks"
                )
        return _Step(name, c, None, wires, frozenset(takes), leaves, draws)

    def _known(self, outline: Outline, c: int) -> dict[Var, Wire]:
        """Return the values that exist before entry ``c`` in an outline: results of blocks, and what layers computed for
        them."""
        wires = [w for k in range(c) for w in (*self.wiring.computed[k], *outline.entries[k].results)]
        return {v: w for w in wires if isinstance(v := outline.wires[w], Var)}

    def _init(self, homes_of: Mapping[Path, Home]) -> Callable[[jax.Array], Params]:
        def init(key: jax.Array) -> Params:
            drawn = self.module.draw(key, list(dict.fromkeys(home for home, _ in homes_of.values())))
            return nested({path: _part(drawn[home], index) for path, (home, index) in homes_of.items()})

        return init

    def _around(self, step: _Step) -> Callable[[Params, Any, LayerContext], Any]:
        """Make the function of a layer around blocks."""

        def apply(params: Params, x: Any, context: LayerContext) -> Any:
            entered = dict(zip(step.enters, x or (), strict=True))
            shapes = {w: shape_of(a) for w, a in self.wiring.outlines[(context.train, None)].wires.items()}
            flowing = {w: _unboxed(v, shapes[w]) for w, v in entered.items() if w in step.takes}
            data = [context.data[n] for n in self.tracing.reads]
            key = jax.random.key(0) if context.key is None else context.key
            params_by_path = {path: required_leaf(params, path, f"layer {step.name!r}") for path in step.leaves}
            leaves = {**self.module.leaves, **params_by_path}
            # Traced again at each call: shapes of a shard, or of a microbatch of another size, may take another way through the
            # module. Only its own part of the outline is evaluated.
            outline = self.tracing.outline(leaves, data, (context.train, None), key, flowing)
            self._check_calls(outline)
            inputs = [*(params_by_path.get(path) for path in leaves), *data, key]
            values = {v: x for v, x in zip(outline.invars, inputs, strict=True) if x is not None}
            values |= {v: x for w, x in flowing.items() if isinstance(v := outline.wires[w], Var)}
            if step.entry == len(outline.entries):
                return outline.returned(outline.evaluate(outline.results, values))
            results = outline.evaluate([outline.wires[w] for w in step.wires], values)
            handed = entered | dict(zip(step.wires, map(_boxed, results), strict=True))
            return tuple(handed[w] for w in step.hands_on)

        return apply

    def _check_calls(self, outline: Outline) -> None:
        """Raise StageError if the blocks are called otherwise than for the example."""
        example = self.wiring.outlines[TRAIN]
        if [(e.first, e.count) for e in outline.entries] != [(e.first, e.count) for e in example.entries]:
            raise StageError(f"{self.module.label} calls its blocks otherwise for a batch of other shapes")

    def _free(self, step: _Step) -> list[Wire]:
        """Return what a block receives that depends on the batch alone."""
        entry = self.wiring.outlines[TRAIN].entries[step.entry]
        sources = [self.wiring.sources[(entry.first, i)] for i in range(len(entry.entering))]
        return list(dict.fromkeys(w for w in sources if w in self.wiring.free))

    def _numbered(self, step: _Step) -> bool:
        """Whether a block is given numbers, which may depend on the batch's shape."""
        leaves = jax.tree.leaves(self.wiring.outlines[TRAIN].entries[step.entry].arguments)
        return any(isinstance(v, int | float) and not isinstance(v, bool) for v in leaves)

    def _block(self, step: _Step, block: int) -> Callable[[Params, Any, LayerContext], Any]:
        """Make the function of a block's layer; the same for blocks that are alike and in like places."""
        entries = {train: self.wiring.outlines[(train, None)].entries[step.entry] for train in (True, False)}
        sources = [self.wiring.sources[(block, i)] for i in range(len(entries[True].entering))]
        places = [step.enters.index(w) if w in step.enters else w for w in sources]
        leaving = [
            ("out", w[2]) if w[:2] == ("out", block) else ("enters", step.enters.index(w)) for w in step.hands_on
        ]
        free, numbered = self._free(step), self._numbered(step)
        structures = tuple(structure_key(entry.arguments) for entry in entries.values())
        key = (self.module.alike(block), tuple(places), tuple(leaving), structures, numbered and step.entry)

        def apply(params: Params, x: Any, context: LayerContext) -> Any:
            arguments = entries[context.train].arguments
            computed: Mapping[Wire, Any] = {}
            if free or numbered:
                data = [context.data[n] for n in self.tracing.reads]
                arguments, computed = self._from_data(step.entry, free, data, context.train)
            types = array_leaves(arguments)
            arrays = [
                _unboxed(x[p], v.shape) if isinstance(p, int) else computed[p]
                for p, v in zip(places, types, strict=True)
            ]
            y = array_leaves(self.module.call(block, params, fill(arguments, arrays), context.key, context.train))
            return tuple(_boxed(y[at]) if way == "out" else x[at] for way, at in leaving)

        return self._applies.setdefault(key, apply)

    def _from_data(
        self, entry: int, free: Sequence[Wire], data: Sequence[Any], train: bool
    ) -> tuple[Any, dict[Wire, Any]]:
        """The arguments of an entry for this batch, and the values of ``free`` ones."""
        outline = self.tracing.from_data(data, train)
        self._check_calls(outline)
        targets = [outline.wires[w] for w in free]
        start = len(self.module.leaves)
        value_of = dict(zip(outline.invars[start : start + len(data)], data, strict=True))
        values = zip(free, targets, outline.evaluate(targets, value_of), strict=True)
        return outline.entries[entry].arguments, {w: _as_written(atom, value) for w, atom, value in values}


def _flowing(steps: Sequence[_Step]) -> list[_Step]:
    """The steps with what flows between them: what later ones read."""
    later: set[Wire] = set()
    wires_read: list[set[Wire]] = []
    for step in reversed(steps):
        wires_read.append(later)
        later = later.difference(step.wires) | step.takes
    result: list[_Step] = []
    order: list[Wire] = []
    for step, wires in zip(steps, reversed(wires_read), strict=True):
        order += step.wires
        enters = result[-1].hands_on if result else ()
        result.append(replace(step, enters=enters, hands_on=tuple(w for w in order if w in wires)))
    return result


def _boxed(value: jax.Array) -> jax.Array:
    """Put a value into the form in which it flows between layers: a scalar as an array of one, so that shards of a batch
    can have one each."""
    return value[None] if value.ndim == 0 else value


def _unboxed(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return value if shape else value.reshape(())


def _as_written(atom: Atom, value: jax.Array) -> Any:
    """Return a scalar that was written in Python as such: its dtype gives way to others."""
    return (
        np.asarray(atom.val).item() if isinstance(atom, Literal) and getattr(atom.aval, "weak_type", False) else value
    )


def _stacked(leaves: Sequence[Any]) -> Any:
    return (jnp if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) else np).stack(leaves)


def _part(leaf: Any, index: int | None) -> Any:
    return leaf if index is None else leaf[index]
