"""Transfers between processes by ``jax.device_put``: which calls each process makes, in which order, of what. The calls are
recorded; in ``test_divided.py`` two processes make them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from jaxpipe.errors import AgreedError
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.program.ir import Recv, Run, Send, reads
from jaxpipe.program.lower import lower
from jaxpipe.program.order import NATIVE, Crossing, issue_order
from jaxpipe.runtime import transfer
from jaxpipe.runtime.transfer import DevicePutTransport, Ownership, message_numbers
from jaxpipe.schedule import generate, simulate
from jaxpipe.train.update.scalars import StepReduction, TiedLeaves
from tests.runtime.test_processes import run_in_threads
from tests.support.pipelines import pipeline_for

Calls = list[tuple[Any, ...]]
"""The arrays that one process sends: shape, dtype, source and destination of each array."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record the calls of ``device_put`` from now on."""
    puts: Calls = []

    def absent(shape: Any, sharding: Any, arrays: Any, *, dtype: Any) -> jax.ShapeDtypeStruct:
        assert arrays == [], "the receiver has nothing of it"
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def device_put(arrays: Any, homes: Any) -> list[jax.ShapeDtypeStruct]:
        puts.append(tuple((a.shape, a.dtype, a.sharding, to) for a, to in zip(arrays, homes, strict=True)))
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to) for a, to in zip(arrays, homes, strict=True)]

    stand_in = {"device_put": device_put, "make_array_from_single_device_arrays": absent, "block_until_ready": list}
    monkeypatch.setattr(transfer, "jax", SimpleNamespace(**{**vars(jax), **stand_in}))
    return puts


def _between(puts: Calls, one: Any, other: Any) -> Calls:
    """Return the calls of which one end is ``one`` and the other ``other``."""
    return [call for call in puts if {call[0][2].mesh, call[0][3].mesh} == {one, other}]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("family", ["1f1b", pytest.param("v-zb", marks=pytest.mark.soak)])
def test_both_sides_make_the_same_calls_in_one_order(family: str, calls: Calls) -> None:
    """Programs for NCCL make some receives one run before their turn."""
    schedule = generate(family, 4, 6)
    pipe = pipeline_for("gpt@5" if schedule.num_stages > 5 else "gpt", schedule)
    crossing = Crossing((0, 1, 2, 3), pipe.predicted_timeline(), NATIVE, 1)
    assert crossing.timeline.events == simulate(schedule, pipe.costs).events, "bytes that stay change no time"
    programs, meshes = lower(schedule, pipe.stages, pipe.braids, crossing), pipe.submeshes
    numbers, calls_by_rank, early = message_numbers(programs), [], 0
    for program in programs:
        owned: Any = SimpleNamespace(
            ranks=[program.rank],
            divided=True,
            remote_transport=partial(DevicePutTransport, meshes, [program.rank]),
            _meshes=meshes,
        )
        transport, instructions = Ownership.transport(owned, programs), program.instructions
        for _, at in issue_order([program], crossing.timeline):
            i = instructions[at]
            if isinstance(i, Send):
                arrays = [
                    SimpleNamespace(shape=a.shape, dtype=a.dtype, sharding=a.sharding, committed=True) for a in i.avals
                ]
                transport.send(numbers[program.rank, i.dst, i.action], i.dst, cast("list[Any]", arrays))
            elif isinstance(i, Recv):
                got = transport.recv(numbers[i.src, program.rank, i.action])
                expected = [(a.shape, a.dtype, meshes[program.rank]) for a in i.avals]
                assert [(x.shape, x.dtype, x.sharding.mesh) for x in got] == expected
                reader = next(k for k, r in enumerate(instructions) if k > at and set(i.outputs) & set(reads(r)))
                early += any(isinstance(r, Run) for r in instructions[at:reader])
        calls_by_rank.append(list(calls))
        calls.clear()
    for a in range(4):
        for b in range(a):
            assert _between(calls_by_rank[a], meshes[a], meshes[b]) == _between(calls_by_rank[b], meshes[a], meshes[b])
    assert sum(map(len, calls_by_rank)) == 2 * len(numbers)
    assert early > len(numbers) / 2


def test_links_are_made_both_ways_in_one_order(calls: Calls) -> None:
    meshes = pipeline_submeshes(4)
    pairs, links_by_rank = [(2, 1), (1, 2), (3, 0), (1, 0)], []
    for rank in range(4):
        transport = DevicePutTransport(meshes, [rank])
        for _ in range(2):  # those that are there are not made again
            transport.link(pairs if rank % 2 else reversed(pairs))
        links_by_rank.append([(meshes.index(x[2].mesh), meshes.index(x[3].mesh)) for (x,) in calls])
        calls.clear()
    links = [(0, 1), (1, 0), (0, 3), (3, 0), (1, 2), (2, 1)]
    assert links_by_rank == [[link for link in links if rank in link] for rank in range(4)]


class _Recording(Ownership):
    """The ranks of one of several processes, a rank each: tells which pairs are linked, and between which arrays move."""

    def __init__(self, meshes: Sequence[Any], rank: int) -> None:
        self.processes: Any = SimpleNamespace(number=len(meshes), columns=1, column=0)
        self.process_of, self.ranks = tuple(range(len(meshes))), range(rank, rank + 1)
        self._meshes = meshes
        self.linked: set[frozenset[int]] = set()
        self.moved: set[frozenset[int]] = set()

    def link(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.linked |= {frozenset(pair) for pair in pairs if pair[0] != pair[1]}

    def move(self, arrays: Any, src: int, dst: int, avals: Any) -> Any:
        if src == dst:
            return list(arrays)
        self.moved.add(frozenset((src, dst)))
        return [jax.numpy.zeros(a.shape, a.dtype, device=a.sharding) for a in avals if dst in self.ranks]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("hub", [0, 3])
def test_ranks_are_linked_that_move_arrays_outside_of_programs(hub: int) -> None:
    """Loss sums, norms, flags and tied leaves, in each process; with early updates they go by the last rank."""
    pipe = pipeline_for("gpt", generate("1f1b", 4, 4))
    losses = [tuple(jax.numpy.ones(a.shape, a.dtype) for a in _loss_avals(pipe))] * 4
    scalar = jax.numpy.ones(())
    for rank in range(4):
        ranks = _Recording(pipe.submeshes, rank)
        own = replace(pipe, ownership=ranks)
        reduction = StepReduction(own, {s: jax.ShapeDtypeStruct((), scalar.dtype) for s in range(4)}, 1.0, hub)
        sums = reduction.sum_losses(losses if rank == 3 else [])
        reduction.guess(sums)
        reduction.combine({rank: scalar}, sums)
        ties = TiedLeaves(own)
        ties.gather({})
        ties.spread({})
        assert ranks.moved <= ranks.linked and {frozenset((hub, k)) for k in range(4) if k != hub} <= ranks.moved
        assert ranks.linked == ranks.moved | {frozenset((0, 3))}, "no link that nothing uses"


def _loss_avals(pipe: Any) -> list[jax.ShapeDtypeStruct]:
    function = pipe.stages[-1].functions["F"]
    return [a for port, a in zip(function.outputs, function.avals_out, strict=True) if port.kind == "loss"]


def test_cpus_are_refused_in_one_line() -> None:
    meshes = pipeline_submeshes(2)
    errors = run_in_threads(2, lambda processes: Ownership(meshes, processes, "nccl"))
    assert [type(error) for error in errors] == [AgreedError] * 2
    assert len({str(error) for error in errors}) == 1
    assert "run.transport=nccl sends from GPU to GPU" in str(errors[0])
    assert Ownership(meshes, None, "nccl").divided is False, "in one process it changes nothing"
