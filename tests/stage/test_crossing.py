"""Moving cheap equations from W to B: the minimum cut against trying every choice."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe._jax_compat import Var, aval_bytes
from jaxpipe.stage.functions import Port
from jaxpipe.stage.jaxprs import is_cheap
from jaxpipe.stage.split.graph import VALUE_BYTES, Graph, cheapest_moves
from jaxpipe.stage.split.trace import StageTrace


@settings(max_examples=40)
@given(st.data())
def test_no_other_choice_crosses_with_fewer_bytes(data: st.DataObject) -> None:
    graph, w, inputs = _random_w(data.draw)
    moves = cheapest_moves(graph, w, lambda v: False)
    results = {graph.maker[a] for _, a in graph.trace.outputs}
    movable = [i for i in sorted(w - results) if is_cheap(graph.eqns[i]) and not graph.eqns[i].effects]
    assert moves <= set(movable)
    assert _is_closed(graph, moves, w)
    costs = [
        _cost(graph, set(choice), w, inputs)
        for n in range(len(movable) + 1)
        for choice in itertools.combinations(movable, n)
        if _is_closed(graph, set(choice), w)
    ]
    assert _cost(graph, moves, w, inputs) == min(costs)


def test_a_bias_gradient_moves_only_where_that_frees_its_operand() -> None:
    graph, w, _ = _graph(lambda h, dy: (jnp.tanh(dy).sum(0), h.T @ dy), (640, 8), (640, 4))
    assert not cheapest_moves(graph, w, lambda v: False), "dy waits for the product anyway"
    graph, w, _ = _graph(lambda h, dy: (jnp.tanh(dy).sum(0), h.T @ h), (640, 8), (640, 4))
    moves = cheapest_moves(graph, w, lambda v: False)
    assert {graph.eqns[i].primitive.name for i in moves} == {"tanh", "reduce_sum"}


def _graph(fn: Any, *shapes: tuple[int, ...]) -> tuple[Graph, set[int], set[Var]]:
    """Return W of a stage whose parameter gradients are the results of ``fn`` of these cotangents."""
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    results = jax.eval_shape(fn, *avals)
    closed = jax.make_jaxpr(lambda ins, acc: [a + r for a, r in zip(acc, fn(*ins), strict=True)])(avals, list(results))
    jaxpr, n = closed.jaxpr, len(shapes)
    inputs = {v: Port("dy", i) if i < n else Port("acc", i - n) for i, v in enumerate(jaxpr.invars)}
    outputs = tuple((Port("acc", i), v) for i, v in enumerate(jaxpr.outvars))
    trace = StageTrace(tuple(jaxpr.eqns), {}, inputs, outputs, None, (), (), (), ())
    return Graph(trace), set(range(len(jaxpr.eqns))), set(jaxpr.invars[:n])


def _random_w(draw: Any) -> tuple[Graph, set[int], set[Var]]:
    """Two cotangents and up to seven equations: sums (cheap, small), products (cheap, large), matrix products."""
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(["sum", "mul", "dot"]), st.integers(0, 9), st.integers(0, 9)),
            min_size=1,
            max_size=7,
        )
    )

    def fn(a: Any, b: Any) -> Any:
        large, results = [a, b], []
        for op, i, j in steps:
            x, y = large[i % len(large)], large[j % len(large)]
            if op == "mul":
                large.append(x * y)
            elif op == "sum":
                results.append(jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None))
            else:
                results.append(x.T @ y)
        return results or [a.T @ b]

    return _graph(fn, (16, 3), (16, 3))


def _is_closed(graph: Graph, chosen: set[int], w: set[int]) -> bool:
    makers = (graph.maker.get(v) for i in chosen for v in graph.eqns[i].invars if isinstance(v, Var))
    return all(m is None or m not in w or m in chosen for m in makers)


def _cost(graph: Graph, moves: set[int], w: set[int], inputs: set[Var]) -> int:
    read = {v for i in w - moves for v in graph.eqns[i].invars if isinstance(v, Var)}
    results = {v for i in moves for v in graph.eqns[i].outvars}
    return sum(aval_bytes(v.aval) + VALUE_BYTES for v in read & (inputs | results))
