"""Custom instructions: functions that a schedule runs on a stage's arrays, beside F, B and W.

An op is data for the schedule (``register_op``): its lane, what it waits for, its cost, its colour. Registered here under the
same name, it runs: ``build(stage, mesh)`` makes its function of a stage, on the devices of the rank. Such a function reads
ports that its stage has, values that ops before it wrote, and values sent from other stages; it writes named values,
accumulators, and a token. FlexPipe binds functions to user-defined instructions likewise (``flexpipe.txt`` section 4.2).

A value that nothing reads comes back from the step (``StepOutputs.user``); one that is read is dropped after its last reader.
Worked example: ``GUIDE.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jaxpipe._jax_compat import eval_jaxpr
from jaxpipe.errors import JaxpipeError, StageError, short_message
from jaxpipe.mesh import AnyMesh, replicated
from jaxpipe.stage.compiled.compile import compiled
from jaxpipe.stage.functions import IN_PLACE, Port, PortKind, StageFunction, StageFunctions
from jaxpipe.stage.jaxprs import jaxpr_flops
from jaxpipe.text import closest

Build = Callable[[StageFunctions, AnyMesh], StageFunction]
"""A function that makes the function of an op for one stage on the devices of one rank."""
Avals = jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct]

_NAMED = ("user", "state")
_BUILDS: dict[str, Build] = {}


@dataclass(frozen=True, slots=True)
class From:
    """A value called ``name`` that an op of another ``stage`` writes, of ``aval``'s shape and dtype, to be read: it lies as it
    did there, which ``aval``'s sharding says if it is not the same on every device."""

    name: str
    stage: int
    aval: jax.ShapeDtypeStruct


def register_instruction(op: str, build: Build) -> Build:
    """Let the op called ``op`` run what ``build`` makes; idempotent for the same function.

    Raises:
        StageError: it runs something else already.
    """
    if _BUILDS.setdefault(op, build) is not build:
        raise StageError(f"instruction {op!r} is already registered with another function; choose another name")
    return build


def with_instructions(stage: StageFunctions, ops: Iterable[str], mesh: AnyMesh) -> StageFunctions:
    """Add to ``stage`` the functions of those of ``ops`` that are registered and that it lacks, built in this order.

    Raises:
        StageError: one can't be built, or is not what was asked for.
    """
    for op in ops:
        if op in stage.functions or op not in _BUILDS:
            continue
        where = f"instruction {op!r} of stage {stage.stage}"
        try:
            function = _BUILDS[op](stage, mesh)
        except JaxpipeError:
            raise
        except Exception as error:
            raise StageError(f"{where}: building it failed: {short_message(error)}") from error
        if not isinstance(function, StageFunction) or function.op != op:
            got = (
                f"the function of op {function.op!r}"
                if isinstance(function, StageFunction)
                else f"a {type(function).__name__}"
            )
            raise StageError(f"{where}: build returned {got}; want what stage_function({op!r}, …) makes")
        functions = {**stage.functions, op: function}
        stage = replace(stage, functions=functions, flops={**stage.flops, op: jaxpr_flops(function.jaxpr)})
    return stage


def stage_function(
    op: str,
    stage: StageFunctions,
    mesh: AnyMesh,
    call: Callable[..., Any],
    *,
    reads: Sequence[str | From],
    writes: Sequence[str] = (),
    state: Mapping[str, Avals] = MappingProxyType({}),
) -> StageFunction:
    """Make the function of ``op`` out of a plain function of arrays, jitted.

    Args:
        call: takes an argument for each entry of ``reads`` and returns a result for each of ``writes`` (one: itself; several: a
            tuple). It is traced once. Arrays are whole: split over the devices of the rank as the stage has them.
        reads: a kind of port (``"param"``, ``"x"``, ``"y"``, ``"res"``, ``"dy"``, ``"dx"``, ``"acc"``, …): a list of all such
            arrays of the stage, by index; a name in ``state``; the name of a value that an op of this stage wrote for the same
            microbatch; or :class:`From` another stage.
        writes: names of values, each one array, the same on all devices of the rank unless it is one that was read; ``"acc"``
            or a name in ``state``, which ``reads`` must have too: it is updated in place.
        state: by name, shapes and dtypes of one array or a list, zeros before each step, which all microbatches of the stage
            share in the order of the row.

    Raises:
        StageError: it reads what the stage has not, or writes what it may not or in another shape.
    """
    return _Instruction(op, stage, mesh, dict(state)).function(call, reads, writes)


class _Instruction:
    """Makes the function of one op for one stage. ``avals``: the arrays of the stage that it may read, by port."""

    def __init__(self, op: str, stage: StageFunctions, mesh: AnyMesh, state: Mapping[str, Avals]) -> None:
        self.op, self.stage, self.mesh, self.state = op, stage, mesh, state
        self.avals: dict[Port, jax.ShapeDtypeStruct] = {}
        for kind, avals in (
            ("param", stage.param_avals),
            ("acc", stage.acc_avals),
            ("x", stage.x_avals),
            ("y", stage.y_avals),
        ):
            self.avals.update({Port(kind, k): aval for k, aval in enumerate(avals)})  # type: ignore[arg-type]
        for f in stage.functions.values():
            self.avals.update(zip(f.inputs, f.avals_in, strict=True))
            self.avals.update(zip(f.outputs, f.avals_out, strict=True))

    def function(self, call: Callable[..., Any], reads: Sequence[str | From], writes: Sequence[str]) -> StageFunction:
        sources = [self._read(entry) for entry in reads]
        inputs, avals_in = [p for _, ports, _ in sources for p in ports], [a for _, _, avals in sources for a in avals]
        if len(set(inputs)) < len(inputs):
            raise self._error("reads the same thing twice")
        ports_of = {name: self._written(name, reads) for name in writes}
        if len(ports_of) < len(writes):
            raise self._error("writes the same thing twice")
        returned: list[list[Any]] = []

        def run(*arrays: Any) -> tuple[Any, ...]:
            left = iter(arrays)
            arguments = [[next(left) for _ in ports] if many else next(left) for many, ports, _ in sources]
            results = call(*arguments)
            results = (results,) if len(writes) == 1 else tuple(results or ())
            returned[:] = [list(x) if isinstance(x, list | tuple) else [x] for x in results]
            return (*(jnp.asarray(x) for leaves in returned for x in leaves), jnp.zeros((), jnp.float32))

        # Traced once, here, so that mistakes are found when the pipeline is built; what is jitted replays the jaxpr.
        closed = jax.make_jaxpr(run)(*avals_in)
        self._check(ports_of, [len(leaves) for leaves in returned], closed.out_avals)
        outputs = [p for name in writes for p in ports_of[name]] + [Port("token")]
        homes = [self._home(port, aval) for port, aval in zip(outputs, closed.out_avals, strict=True)]

        def jit(donated: tuple[int, ...], results: Sequence[int]) -> Any:
            def replay(*arrays: Any) -> tuple[Any, ...]:
                out = eval_jaxpr(closed.jaxpr, closed.consts, *arrays)
                chosen = [(out[k], closed.jaxpr.outvars[k]) for k in results]
                entered = closed.jaxpr.invars
                # A result that is an argument is copied: the argument may be donated later, or offloaded.
                return tuple(jnp.copy(x) if any(v is a for a in entered) else jnp.asarray(x) for x, v in chosen)

            replay.__name__ = replay.__qualname__ = f"{self.op}_stage{self.stage.stage}"
            return jax.jit(replay, donate_argnums=donated, out_shardings=tuple(homes[k].sharding for k in results))

        calls = compiled(closed, inputs, outputs, jit)
        avals_out = [avals_in[calls.forwarded[k]] if k in calls.forwarded else home for k, home in enumerate(homes)]
        return StageFunction(
            tuple(inputs), tuple(outputs), tuple(avals_in), tuple(avals_out), *calls, op=self.op, per_shard=False
        )

    def _read(self, entry: str | From) -> tuple[bool, Sequence[Port], Sequence[jax.ShapeDtypeStruct]]:
        """Return whether the argument is a list, its ports, and the shapes that they hold."""
        if isinstance(entry, From):
            return False, [Port("user", 0, entry.name, entry.stage)], [self._placed(entry.aval)]
        if entry in self.state:
            avals = self.state[entry]
            if isinstance(avals, jax.ShapeDtypeStruct):
                return False, [Port("state", 0, entry)], [self._placed(avals)]
            return True, [Port("state", k, entry) for k in range(len(avals))], [self._placed(a) for a in avals]
        # Names before kinds of ports: a value that an op wrote may be called as it likes, kinds can't be written.
        user_port = Port("user", 0, entry)
        if user_port in self.avals:
            return False, [user_port], [self.avals[user_port]]
        ports = sorted(p for p in self.avals if p.kind == entry and not p.name)
        if not ports:
            names = dict.fromkeys(p.name or p.kind for p in self.avals if p.kind not in ("token", "state"))
            near = closest(entry, names, f"; it has {', '.join(names)}")
            raise self._error(f"reads {entry!r}, which the stage has not{near}")
        return True, ports, [self.avals[p] for p in ports]

    def _written(self, name: str, reads: Sequence[str | From]) -> Sequence[Port]:
        if name == "acc" or name in self.state:
            if name not in reads:
                raise self._error(f"writes {name!r} without reading it; an accumulator is updated")
            return self._read(name)[1]
        if name in get_args(PortKind):
            raise self._error(f"writes {name!r}; an instruction writes values that it names, state and 'acc'")
        return [Port("user", 0, name)]

    def _check(self, ports_of: Mapping[str, Sequence[Port]], counts: Sequence[int], avals: Sequence[Any]) -> None:
        """Compare what the function returns with what it writes, and with what that replaces."""
        if len(counts) != len(ports_of):
            raise self._error(f"returns {len(counts)} results for {len(ports_of)}: {', '.join(ports_of)}")
        left = iter(avals)
        for (name, ports), count in zip(ports_of.items(), counts, strict=True):
            if count != len(ports):
                raise self._error(f"returns {count} arrays for {name!r}; want {len(ports)}")
            for port in ports:
                got, expected = next(left), self._home(port, None) if port.kind in IN_PLACE else None
                if expected is not None and (got.shape, got.dtype) != (expected.shape, expected.dtype):
                    shapes = (f"{x.dtype}{list(x.shape)}" for x in (got, expected))
                    raise self._error(f"writes {port} as {' where it is '.join(shapes)}")

    def _home(self, port: Port, aval: Any) -> jax.ShapeDtypeStruct:
        if port.kind == "acc":
            return self.avals[port]
        if port.kind == "state":
            return self._read(port.name)[2][port.index]
        return self._placed(jax.ShapeDtypeStruct(aval.shape, aval.dtype))

    def _placed(self, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        home = aval.sharding if aval.sharding is not None else replicated(self.mesh)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=home)

    def _error(self, what: str) -> StageError:
        return StageError(f"instruction {self.op!r} of stage {self.stage.stage} {what}")
