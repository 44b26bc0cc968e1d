"""Woven functions: the same bits as apart, collectives covered as planned, and an order that the dataflow enforces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpipe._jax_compat import ClosedJaxpr, Var, close_jaxpr, eval_jaxpr, variables
from jaxpipe.axes import TP, RankMesh
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.model.reference import resolve_model
from jaxpipe.stage.weave.units import Chunk, Collective, PartGraph, cut_threshold, is_heavy, units_of
from jaxpipe.stage.weave.weaver import GPU_OVERLAP_OPTIONS, Node, WovenJaxpr, best_order, covers, uncovered, weave

GPT, LLAMA = "models.gpt:GPT", "models.llama:Llama"
SMALL = {"d_model": 16, "num_heads": 4, "num_layers": 1, "seq_len": 8, "vocab_size": 16}
LARGE = {"d_model": 4096, "num_heads": 32, "num_layers": 2, "seq_len": 2048, "vocab_size": 64, "dtype": "bfloat16"}
"""The size of the acceptance check; only traced here."""


@cache
def stages(
    name: str, tp: int, *, sequence: bool = False, fused: bool = False, recompute: str = "none", large: bool = False
) -> tuple[StageFunctions, ...]:
    """Embedding; blocks; head and loss."""
    model = resolve_model(name, LARGE if large else SMALL)
    avals = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    cut = [model.layers[:1], model.layers[1:-2], model.layers[-2:]]
    meshes = [*pipeline_submeshes(1, RankMesh(tp=tp))] * 3
    sharding = RankMesh(tp=tp, sequence=sequence, fused_residual=fused)
    return build_all(cut, avals, model.batch_spec(1 if large else 2), meshes, recompute, tp=sharding)


def jaxprs(stage: StageFunctions, ops: Sequence[str]) -> list[ClosedJaxpr]:
    return [stage.functions[op].jaxpr for op in ops]


def shard_arguments(closed: ClosedJaxpr, tp: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Return random arguments, other ones on each shard: [tp, ...]."""
    rng = np.random.default_rng(seed)
    arrays = []
    for v in closed.jaxpr.invars:
        dtype = np.dtype(v.aval.dtype)
        shape = (tp, *v.aval.shape)
        if dtype.kind == "f":
            arrays.append(rng.normal(size=shape).astype(dtype))
        else:
            arrays.append(rng.integers(0, 2 if dtype.kind == "b" else 8, size=shape).astype(dtype))
    return arrays


def evaluate(closed: ClosedJaxpr, tp: int, arguments: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Return results of a per-shard jaxpr on ``tp`` devices, [tp, ...]."""

    def run(*arrays: Any) -> tuple[Any, ...]:
        out = eval_jaxpr(closed.jaxpr, closed.consts, *(a.reshape(a.shape[1:]) for a in arrays))
        return tuple(jax.numpy.asarray(v)[None] for v in out)

    (mesh,) = pipeline_submeshes(1, RankMesh(tp=tp))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(TP), out_specs=P(TP), check_vma=False)
    return [np.asarray(v) for v in jax.jit(mapped)(*arguments)]


def assert_same_bits(parts: Sequence[ClosedJaxpr], tp: int) -> None:
    arguments = [shard_arguments(part, tp, seed) for seed, part in enumerate(parts)]
    woven = weave(parts, {TP: tp})
    part_values = [v for part, values in zip(parts, arguments, strict=True) for v in evaluate(part, tp, values)]
    woven_values = evaluate(woven.jaxpr, tp, [a for values in arguments for a in values])
    assert len(part_values) == len(woven_values)
    for one, other in zip(part_values, woven_values, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("name", "tp", "options", "ops"),
    [
        pytest.param(GPT, 2, {}, ("F", "BW"), marks=pytest.mark.soak),
        (GPT, 4, {"sequence": True}, ("F", "B")),
        (LLAMA, 2, {"sequence": True, "recompute": "full"}, ("F", "BW")),
        (LLAMA, 4, {"fused": True}, ("F", "W", "B")),
    ],
)
def test_woven_is_bit_equal(name: str, tp: int, options: dict[str, Any], ops: tuple[str, ...]) -> None:
    assert_same_bits(jaxprs(stages(name, tp, **options)[1], ops), tp)


def test_different_stages_are_bit_equal() -> None:
    first, _, last = stages(GPT, 2)
    assert_same_bits([first.functions["F"].jaxpr, last.functions["BW"].jaxpr], 2)


@pytest.mark.soak
@pytest.mark.parametrize("ops", [("F", "BW"), ("F", "B"), ("F", "W"), ("BW",), ("F", "B", "W")], ids="+".join)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("sequence", "fused"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [GPT, LLAMA])
def test_woven_is_bit_equal_everywhere(
    name: str, tp: int, sequence: bool, fused: bool, recompute: str, ops: tuple[str, ...]
) -> None:
    options: dict[str, Any] = {"sequence": sequence, "fused": fused, "recompute": recompute}
    if set(ops) <= {"F", "BW"}:
        assert_same_bits(jaxprs(stages(name, tp, **options)[0], ops), tp)
        assert_same_bits(jaxprs(stages(name, tp, **options)[2], ops), tp)
    assert_same_bits(jaxprs(stages(name, tp, **options)[1], ops), tp)


COVERED: list[tuple[str, dict[str, Any], int, int]] = [
    (GPT, {}, 8, 8),
    (LLAMA, {"recompute": "full"}, 10, 10),
    (GPT, {"fused": True}, 8, 8),
    # F and B both begin with a gather: the first of the two has nothing but norms to run beside
    (LLAMA, {"sequence": True}, 16, 15),
]
"""Each way with one of the models; the soak has the other one, too."""


@pytest.mark.parametrize(
    ("name", "options", "collectives", "covered"),
    [
        *COVERED,
        *(pytest.param(LLAMA if name == GPT else GPT, *case, marks=pytest.mark.soak) for name, *case in COVERED),
    ],
)
def test_all_collectives_of_a_braid_are_covered(
    name: str, options: dict[str, Any], collectives: int, covered: int
) -> None:
    woven = weave(jaxprs(stages(name, 4, large=True, **options)[1], ("F", "BW")), {TP: 4})
    assert len(woven.collectives) == collectives
    assert sum(c.covered for c in woven.collectives) == covered
    assert woven.exposed_s < 0.02 * woven.makespan_s
    assert str(woven).startswith(f"{covered} of {collectives} collectives covered")


def test_all_exchanges_of_experts_are_covered() -> None:
    """They lie along an axis of their own."""
    mesh = RankMesh(dp=4, ep=4)
    model = resolve_model("models.moe:MoE", {**LARGE, "num_experts": 8, "expert_size": 4096, "capacity": 1.0})
    avals = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    cut = [model.layers[:1], model.layers[1:-2], model.layers[-2:]]
    _, blocks, _ = build_all(cut, avals, model.batch_spec(4), [*pipeline_submeshes(1, mesh)] * 3, tp=mesh)
    for ops, exchanges in ((("F", "BW"), 8), (("BW",), 4)):
        woven = weave(jaxprs(blocks, ops), mesh.sizes)
        assert [c.covered for c in woven.collectives] == [True] * exchanges


@pytest.mark.parametrize("ops", [("F", "BW"), ("BW",), ("F", "W")], ids="+".join)
@pytest.mark.parametrize("options", [{}, {"sequence": True}, {"recompute": "full"}], ids=str)
def test_dataflow_keeps_the_planned_products_under_their_collectives(
    ops: tuple[str, ...], options: dict[str, Any]
) -> None:
    """A product under a collective can't run before the collective may start, nor after its result is read."""
    woven = weave(jaxprs(stages(GPT, 4, large=True, **options)[1], ops), {TP: 4})
    assert sorted(c.products for c in woven.collectives) == sorted(products_held_under(woven))


def products_held_under(woven: WovenJaxpr) -> list[int]:
    """Return for each collective the products that the equations' dependencies keep between its start and its end."""
    eqns = woven.jaxpr.jaxpr.eqns
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    above: list[set[int]] = []
    for eqn in eqns:
        direct = {maker[v] for v in variables(eqn.invars) if v in maker}
        above.append(direct.union(*(above[i] for i in direct)))
    products = [i for i, eqn in enumerate(eqns) if is_heavy(eqn)]
    counts = []
    for unit in (u for u in units_of(PartGraph(woven.jaxpr, cut_threshold([woven.jaxpr]))) if u.collective):
        assert unit.collective is not None
        at = unit.collective.eqn
        makers = {maker[v] for v in variables(eqns[at].invars) if v in maker}
        readers = [i for i, eqn in enumerate(eqns) if set(variables(eqn.invars)) & set(eqns[at].outvars)]
        counts.append(
            sum(
                makers <= above[p] and at not in above[p] and all(p in above[r] for r in readers)
                for p in products
                if p not in above[at]
            )
        )
    return counts


def test_without_collectives_there_are_no_barriers() -> None:
    closed = stages(GPT, 2)[1].functions["W"].jaxpr
    woven = weave([closed], {TP: 2})
    assert barriers(woven.jaxpr) == barriers(closed)
    assert woven.collectives == () and woven.exposed_s == 0


def barriers(closed: ClosedJaxpr) -> int:
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in closed.jaxpr.eqns)


def test_inputs_and_outputs_stand_one_after_another() -> None:
    parts = jaxprs(stages(GPT, 2)[1], ("F", "BW"))
    woven = weave(parts, {TP: 2})
    assert len(woven.jaxpr.jaxpr.invars) == sum(len(part.jaxpr.invars) for part in parts)
    assert [v.aval for v in woven.jaxpr.jaxpr.outvars] == [v.aval for part in parts for v in part.jaxpr.outvars]
    equations = [eqn.primitive.name for eqn in woven.jaxpr.jaxpr.eqns if eqn.primitive.name != "optimization_barrier"]
    names = [eqn.primitive.name for part in parts for eqn in part.jaxpr.eqns]
    assert sorted(equations) == sorted(name for name in names if name != "optimization_barrier")


def test_weaving_is_deterministic() -> None:
    parts = jaxprs(stages(LLAMA, 2, sequence=True)[1], ("F", "BW"))
    assert str(weave(parts, {TP: 2}).jaxpr) == str(weave(parts, {TP: 2}).jaxpr)


def test_options_switch_combining_off() -> None:
    assert all(value == 0 for name, value in GPU_OVERLAP_OPTIONS.items() if "combine" in name)
    assert GPU_OVERLAP_OPTIONS["xla_gpu_enable_latency_hiding_scheduler"] is True


CHUNK = Chunk((0,), 0, 1, 0, 0)
LIGHT = Chunk((0,), None, 0, 0, 0)
COLLECTIVE = Collective(0, "psum", 1, (TP,))


@st.composite
def programs(draw: Callable[..., Any]) -> list[Node]:
    """Draw parts that are chains of chunks and collectives, with filler hanging on them."""
    nodes: list[Node] = []
    seconds = st.integers(1, 50).map(lambda x: x / 10)
    for part in range(draw(st.integers(1, 3))):
        chain: list[int] = []
        filler: list[Node] = []
        for k in range(draw(st.integers(0, 4))):
            for _ in range(draw(st.integers(1, 3))):
                work = draw(st.sampled_from([CHUNK, LIGHT]))
                nodes.append(Node(part, "MLP", work, draw(seconds), tuple(chain[-1:])))
                chain.append(len(nodes) - 1)
                if draw(st.booleans()):
                    filler.append(Node(part, "filler", CHUNK, draw(seconds), (chain[-1],), filler=True))
            nodes.append(Node(part, "MLP", COLLECTIVE, draw(seconds), (chain[-1],)))
            chain.append(len(nodes) - 1)
            assert k >= 0
        filler.append(Node(part, "filler", CHUNK, draw(seconds), tuple(chain[-1:]), filler=True))
        nodes += filler
    return nodes


@given(programs())
def test_orders_are_valid_and_their_times_add_up(nodes: list[Node]) -> None:
    order = best_order(nodes)
    at = {n: k for k, n in enumerate(order.nodes)}
    assert sorted(order.nodes) == list(range(len(nodes)))
    ends = {n: s + nodes[n].seconds for n, s in zip(order.nodes, order.starts, strict=True)}
    starts = dict(zip(order.nodes, order.starts, strict=True))
    for n, node in enumerate(nodes):
        assert all(at[d] < at[n] and ends[d] <= starts[n] + 1e-9 for d in node.deps)
    for lane in (True, False):
        lane_nodes = [n for n in order.nodes if nodes[n].is_collective is lane]
        assert all(ends[a] <= starts[b] + 1e-9 for a, b in itertools.pairwise(lane_nodes))
    compute = sum(n.seconds for n in nodes if not n.is_collective)
    assert order.makespan_s == pytest.approx(max(ends.values()))
    assert order.exposed_s == pytest.approx(order.makespan_s - compute, abs=1e-9)
    assert set(covers(nodes, order)) == {n for n in at if nodes[n].is_collective}
    assert len(uncovered(nodes, order)) <= len(covers(nodes, order))


def test_filler_left_over_runs_early_but_never_uncovers() -> None:
    """Chunk, collective, chunk, with two fillers ready at once: one is needed under the collective, the other need not wait."""
    nodes = [
        Node(0, "MLP", CHUNK, 1.0, ()),
        Node(0, "MLP", COLLECTIVE, 1.0, (0,)),
        Node(0, "MLP", CHUNK, 1.0, (1,)),
        Node(0, "MLP", COLLECTIVE, 1.0, (2,)),
        *(Node(0, "filler", CHUNK, 1.0, (0,), filler=True) for _ in range(4)),
    ]
    order = best_order(nodes)
    assert order.exposed_s == 0
    assert order.makespan_s == 6
    assert not uncovered(nodes, order)


def test_barriers_do_not_hold_back_what_the_graph_reads() -> None:
    """A part graph of the woven jaxpr has the collectives of the parts."""
    parts = jaxprs(stages(GPT, 2)[1], ("F", "BW"))
    woven = weave(parts, {TP: 2})
    assert len(PartGraph(woven.jaxpr).collectives) == sum(len(PartGraph(p).collectives) for p in parts)
    reads = {v for eqn in woven.jaxpr.jaxpr.eqns for v in variables(eqn.invars)}
    values: set[Var] = {*woven.jaxpr.jaxpr.invars, *woven.jaxpr.jaxpr.constvars}
    values.update(v for eqn in woven.jaxpr.jaxpr.eqns for v in eqn.outvars)
    assert reads <= values
    assert close_jaxpr([], [], [], []).jaxpr.eqns == []
