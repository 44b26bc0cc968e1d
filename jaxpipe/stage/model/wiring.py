"""Which arrays go where in a module's call: what each of its blocks receives, and where that comes from.

Read off outlines of the call (``model/outline.py``) in training and evaluation, and with parameters in bfloat16 if it
works so: in float32 a cast to float32 leaves no trace, and a block would seem to receive what the one before it returned.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxpipe._jax_compat import Atom, Var, only_results
from jaxpipe.errors import StageError
from jaxpipe.stage.identity import value_key
from jaxpipe.stage.leaves import array_leaves, fill, is_array
from jaxpipe.stage.model.layer import Params, Path, key_aval
from jaxpipe.stage.model.outline import Outline, Stubs, Wire, trace_outline, type_of
from jaxpipe.stage.model.params import nested

Home = tuple[Path, int | None]
"""Where a leaf lies in the module's own parameters: its path, and its place on axis 0 if blocks are stacked there."""


class CuttableModule(Protocol):
    """A module whose blocks can be left out of its call. ``leaves``: types of all its parameters by path. ``names``: what its
    blocks are called. ``homes``: by block, where its parameters, by their paths in it, lie in the module."""

    label: str
    leaves: Mapping[Path, jax.ShapeDtypeStruct]

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def homes(self) -> Sequence[Mapping[Path, Home]]: ...

    def run(self, leaves: Mapping[Path, Any], data: Sequence[Any], key: jax.Array, train: bool, stubs: Stubs) -> Any:
        """The module's call on batch arrays, with stubs for its blocks."""

    def call(self, block: int, params: Params, arguments: Any, key: jax.Array | None, train: bool) -> Any:
        """A block's call on ``(args, kwargs)``."""

    def alike(self, block: int) -> Hashable:
        """Equal for blocks of which :meth:`call` computes the same."""

    def draw(self, key: jax.Array, paths: Sequence[Path]) -> Mapping[Path, jax.Array]:
        """Initial values of these parameters."""


Mode = tuple[bool, Any]
"""Whether a call trains, and the dtype of its parameters (None: as declared)."""

TRAIN: Mode = (True, None)


class Tracing:
    """Outlines of a module's call at whatever shapes, and what its blocks return."""

    def __init__(self, module: CuttableModule, reads: tuple[str, ...]) -> None:
        self.module = module
        self.reads = reads
        self._probed: dict[Hashable, tuple[Any, bool]] = {}
        self._outlines: dict[Hashable, Outline] = {}

    def outlines(self, data: Sequence[jax.ShapeDtypeStruct]) -> dict[Mode, Outline]:
        """The outlines for a batch of these types, by mode.

        Raises:
            StageError: the call can't be traced, or does not treat blocks as blocks.
        """
        by_mode: dict[Mode, Outline] = {}
        for mode in (TRAIN, (False, None), (True, jnp.bfloat16)):
            try:
                by_mode[mode] = self.outline(self.leaves(mode[1]), data, mode)
            except StageError:
                raise
            except Exception as error:
                if mode[1] is None:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise StageError(
                        f"{self.module.label} can't be traced: {type(error).__name__}: {reason}"
                    ) from error
        return by_mode

    def leaves(self, dtype: Any) -> Mapping[Path, jax.ShapeDtypeStruct]:
        """Types of the parameters, floating-point ones in ``dtype``."""
        if dtype is None:
            return self.module.leaves
        cast = {path: jnp.issubdtype(v.dtype, jnp.floating) for path, v in self.module.leaves.items()}
        return {p: jax.ShapeDtypeStruct(v.shape, dtype if cast[p] else v.dtype) for p, v in self.module.leaves.items()}

    def outline(
        self,
        leaves: Mapping[Path, Any],
        data: Sequence[Any],
        mode: Mode,
        key: Any = None,
        block_results: Mapping[Wire, Any] | None = None,
    ) -> Outline:
        """Trace the outline with inputs ``leaves`` (in order), ``data``, the key. ``block_results``: those that are known."""
        stubs = Stubs(self.module.label, lambda block, args: self.probe(block, args, mode)[0], block_results or {})

        def call(arrays: list[Any]) -> Any:
            leaf_arrays = dict(zip(leaves, arrays, strict=False))
            return self.module.run(leaf_arrays, arrays[len(leaf_arrays) : -1], arrays[-1], mode[0], stubs)

        return trace_outline(stubs, call, [*leaves.values(), *data, key_aval() if key is None else key])

    def from_data(self, data: Sequence[Any], train: bool) -> Outline:
        """The outline for values that depend on the batch alone; traced once for arrays of these types."""
        key = (train, tuple(map(jax.typeof, data)))
        if key not in self._outlines:
            self._outlines[key] = self.outline(self.module.leaves, data, (train, None))
        return self._outlines[key]

    def probe(self, block: int, arguments: Any, mode: Mode) -> tuple[Any, bool]:
        """What a block returns for arguments of these types, and whether it draws random numbers."""
        shapes = [type_of(leaf) for leaf in array_leaves(arguments)]
        types = tuple((v.shape, str(v.dtype), v.weak_type) for v in shapes)
        signature = (self.module.alike(block), structure_key(arguments), types, mode)
        if signature not in self._probed:
            leaves = self.leaves(mode[1])
            params = {path: _part_type(leaves[home], at) for path, (home, at) in self.module.homes[block].items()}
            results: list[Any] = []

            def traced(params: Params, arrays: list[Any], key: jax.Array) -> list[Any]:
                results.append(self.module.call(block, params, fill(arguments, arrays), key, mode[0]))
                return array_leaves(results[-1])

            closed, out = jax.make_jaxpr(traced, return_shape=True)(nested(params), shapes, key_aval())
            used = only_results(closed, range(len(out)))[1]
            self._probed[signature] = (fill(results[-1], out), used[-1])
        return self._probed[signature]


class Wiring:
    """Where each argument of each block comes from, read off the outlines in both modes.

    ``sources``: by block and position, the wire. ``computed``: by entry, the wires that a layer before it must compute.
    ``free``: wires that depend on the batch alone.
    """

    def __init__(self, module: CuttableModule, outlines: Mapping[Mode, Outline]) -> None:
        self.module = module
        self.outlines = outlines
        self.sources: dict[tuple[int, int], Wire] = {}
        self.computed: dict[int, list[Wire]] = {}
        self.free: set[Wire] = set()
        self._check_entries()
        wire_of: dict[Mode, dict[Var, Wire]] = {mode: {} for mode in outlines}
        for c, entry in enumerate(outlines[TRAIN].entries):
            self.computed[c] = []
            for i in range(len(entry.entering)):
                self._connect(c, i, wire_of)
            for mode, outline in outlines.items():
                wire_of[mode] |= {var: wire for wire, var in outline.entries[c].results.items()}

    def _connect(self, c: int, i: int, wire_of: Mapping[Mode, dict[Var, Wire]]) -> None:
        """Find where argument ``i`` of entry ``c`` comes from."""
        entry = self.outlines[TRAIN].entries[c]
        atoms = {mode: outline.entries[c].entering[i] for mode, outline in self.outlines.items()}
        aliases = {wire_of[mode].get(a) if isinstance(a, Var) else None for mode, a in atoms.items()}
        wire: Wire = ("in", entry.first, i)
        (source,) = aliases if len(aliases) == 1 else (None,)
        if source is None:
            source = wire
            for mode, atom in atoms.items():
                if isinstance(atom, Var):
                    wire_of[mode].setdefault(atom, wire)
            if all(self._is_free(mode, atom) for mode, atom in atoms.items()):
                self.free.add(wire)
            else:
                self.computed[c].append(wire)
        self.sources[(entry.first, i)] = source
        for k in range(entry.first + 1, entry.first + entry.count):
            self.sources[(k, i)] = ("out", k - 1, entry.flow[i]) if i in entry.flow else source

    def _is_free(self, mode: Mode, atom: Atom) -> bool:
        """Whether a value depends on batch arrays alone."""
        outline = self.outlines[mode]
        params = len(self.module.leaves)
        _, starts = outline.needed([atom])
        return starts <= set(outline.invars[params:-1])

    def _check_entries(self) -> None:
        train, *other_modes = (
            [(e.first, e.count, len(e.entering), len(e.leaving), dict(e.flow)) for e in outline.entries]
            for outline in self.outlines.values()
        )
        called = [k for first, count, *_ in train for k in range(first, first + count)]
        if any(entries != train for entries in other_modes):
            what = "calls its blocks otherwise in evaluation, or in bfloat16, than in training"
        elif missing := [k for k in range(len(self.module.names)) if k not in called]:
            what = f"does not call block {missing[0]} ({self.module.names[missing[0]]})"
        elif len(called) > len(self.module.names):
            what = f"calls {len(called)} blocks and has {len(self.module.names)}"
        else:
            return
        raise StageError(f"{self.module.label} {what}; write the layers by hand")


def structure_key(arguments: Any) -> Hashable:
    """The structure of a call's arguments and what among them is no array."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(None if is_array(leaf) else value_key(leaf) for leaf in leaves)


def _part_type(leaf: jax.ShapeDtypeStruct, index: int | None) -> jax.ShapeDtypeStruct:
    return leaf if index is None else jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
