"""Units of stage functions: cut at the collectives, named as the paper names them, nothing lost; the cost model's numbers."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe._jax_compat import ClosedJaxpr
from jaxpipe.axes import TP, RankMesh
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.jaxprs import flatten, jaxpr_flops
from jaxpipe.stage.model.reference import resolve_model
from jaxpipe.stage.weave.units import PartGraph, Unit, UnitCosts, collectives, cut_threshold, is_heavy, units_of

MODELS = ("models.gpt:GPT", "models.llama:Llama")


def cut_units(closed: ClosedJaxpr, least_bytes: float | None = None) -> tuple[Unit, ...]:
    """Return the units of one function alone."""
    return units_of(PartGraph(closed, cut_threshold([closed]) if least_bytes is None else least_bytes))


@cache
def stages(name: str, tp: int, *, sequence: bool = False, recompute: str = "none") -> tuple[StageFunctions, ...]:
    """Embedding; two blocks; head and loss."""
    sizes = {"d_model": 32, "num_heads": 4, "num_layers": 2, "seq_len": 16, "vocab_size": 32}
    model = resolve_model(name, sizes)
    avals = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    cut = [model.layers[:1], model.layers[1:-2], model.layers[-2:]]
    meshes = [*pipeline_submeshes(1, RankMesh(tp=tp))] * 3
    sharding = RankMesh(tp=tp, sequence=sequence)
    return build_all(cut, avals, model.batch_spec(2), meshes, recompute, tp=sharding)


def traced(fn: object, *shapes: tuple[int, ...], tp: int = 4) -> ClosedJaxpr:
    """Return the flat jaxpr of a per-shard function."""
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    closed = jax.make_jaxpr(fn, axis_env=[(TP, tp)])(*avals)  # type: ignore[arg-type]
    return flatten(closed.jaxpr, closed.consts).close()


def names(closed: ClosedJaxpr) -> list[str]:
    return [f"{u.name}{'|' if u.collective else ''}" for u in cut_units(closed) if not u.filler]


@pytest.mark.parametrize("name", MODELS)
def test_units_of_two_blocks_are_those_of_the_paper(name: str) -> None:
    stage = stages(name, 2)[1]
    block = ["Pre-Attn", "Attn|", "Pre-MLP", "MLP|"]
    assert names(stage.functions["F"].jaxpr) == block * 2
    assert names(stage.functions["B"].jaxpr) == ["Pre-MLP", "MLP|", "Pre-Attn", "Attn|"] * 2 or names(
        stage.functions["B"].jaxpr
    ) == ["MLP|", "Pre-Attn", "Attn|", "Pre-MLP", "MLP|", "Pre-Attn", "Attn|"]
    assert names(stage.functions["BW"].jaxpr) == names(stage.functions["B"].jaxpr)
    assert names(stage.functions["W"].jaxpr) == []  # weight gradients: all filler


@pytest.mark.parametrize("name", MODELS)
def test_with_sequence_parallelism_gathers_end_what_stands_before_the_products(name: str) -> None:
    stage = stages(name, 2, sequence=True)[1]
    units = [u for u in cut_units(stage.functions["F"].jaxpr) if u.collective]
    ends = {"Pre-Attn": "all_gather", "Attn": "reduce_scatter", "Pre-MLP": "all_gather", "MLP": "reduce_scatter"}
    assert [(u.name, u.collective.primitive) for u in units if u.collective] == [*ends.items()] * 2
    assert all(c.flops == 0 for u in units if u.name.startswith("Pre-") for c in u.chunks)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("op", ["F", "B", "W", "BW"])
def test_every_equation_is_in_one_chunk_or_a_collective(op: str, recompute: str) -> None:
    for stage in stages(MODELS[0], 2, recompute=recompute):
        closed = stage.functions[op].jaxpr
        units = cut_units(closed)
        indices = [i for u in units for i in u.eqns] + [u.collective.eqn for u in units if u.collective]
        assert sorted(indices) == list(range(len(closed.jaxpr.eqns)))
        assert sum(c.flops for u in units for c in u.chunks) == jaxpr_flops(closed)
        for chunk in (c for u in units for c in u.chunks):
            assert sum(is_heavy(closed.jaxpr.eqns[i]) for i in chunk.eqns) == (chunk.heavy is not None)


def test_chunks_follow_dataflow() -> None:
    """Running units, their collectives and filler in order never reads what is not yet made."""
    for op in ("F", "B", "BW"):
        closed = stages(MODELS[1], 2, recompute="full")[1].functions[op].jaxpr
        eqns = closed.jaxpr.eqns
        computed = {*closed.jaxpr.invars, *closed.jaxpr.constvars}
        for unit in cut_units(closed):
            for i in (*unit.eqns, *([unit.collective.eqn] if unit.collective else [])):
                assert all(a in computed for a in eqns[i].invars if not hasattr(a, "val"))
                computed.update(eqns[i].outvars)
        assert computed.issuperset(a for a in closed.jaxpr.outvars if not hasattr(a, "val"))


def test_sums_of_a_cross_entropy_are_no_cuts() -> None:
    """Beside a collective that moves activations."""
    parts = [stages(MODELS[0], 2)[2].functions[op].jaxpr for op in ("F", "BW")]
    least = cut_threshold(parts)
    cuts = [[u.collective for u in cut_units(part, least) if u.collective] for part in parts]
    assert [len(collectives(part)) for part in parts] == [2, 1]
    assert [len(c) for c in cuts] == [0, 1]


def test_bytes_of_a_collective_are_those_of_the_whole_array() -> None:
    def shard(x: jax.Array) -> jax.Array:
        y = jax.lax.all_gather(x, TP, axis=0, tiled=True)
        y = jax.lax.psum_scatter(jax.lax.psum(y, TP), TP, scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, "other")

    closed = jax.make_jaxpr(shard, axis_env=[(TP, 4), ("other", 2)])(jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert [c.primitive for c in collectives(closed)] == ["all_gather", "psum", "reduce_scatter"]
    assert {c.whole_bytes for c in collectives(closed)} == {4 * 8 * 4 * 4}


def test_a_loop_is_one_chunk_and_tells_attention_by_its_body() -> None:
    def shard(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.einsum("bij,bjk->bik", carry, carry), None

        y, _ = jax.lax.scan(body, x, None, length=3)
        return jax.lax.psum(y @ w, TP)

    closed = traced(shard, (2, 4, 4), (4, 4))
    (unit,) = (u for u in cut_units(closed) if u.collective)
    assert unit.name == "Attn"
    assert [c.flops for c in unit.chunks] == [3 * 2 * 2 * 4 * 4 * 4, 2 * 2 * 4 * 4 * 4]


def test_equations_around_no_product_are_chunks_of_their_own() -> None:
    def shard(x: jax.Array, w: jax.Array, a: jax.Array) -> tuple[jax.Array, ...]:
        return jax.lax.psum(x @ w, TP), jnp.sum(x, 0), a + jnp.exp(a), w * 2

    filler = [u for u in cut_units(traced(shard, (8, 8), (8, 8), (3,))) if u.filler]
    assert [len(u.eqns) for u in filler] == [1, 2, 1]


@given(st.sampled_from([2, 4, 8]), st.integers(1, 10**9))
def test_a_reduction_takes_a_scatter_and_a_gather(shards: int, size: int) -> None:
    costs = UnitCosts()
    one = costs.collective_s("all_gather", size, shards) - costs.link_latency_s
    assert costs.collective_s("psum", size, shards) - costs.link_latency_s == pytest.approx(2 * one)
    assert one == pytest.approx(size * (shards - 1) / shards / costs.link_bytes_per_s)


def test_work_takes_the_longer_of_arithmetic_and_traffic() -> None:
    costs = UnitCosts(flops_per_s=100, bytes_per_s=10)
    assert costs.work_s(200, 10) == 2
    assert costs.work_s(200, 100) == 10
