"""Cuts against brute force, plans against the models they come from, and messages for cuts that can't be."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import StageError
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params
from jaxpipe.stage.model.plan import LayerCosts, StagePlan, analytic_layer_costs, checked_cut, cut, cut_at, plan_stages
from models.gpt import GPT
from models.llama import Llama


def dense(name: str, size: int = 4) -> Layer:
    def init(key: jax.Array) -> Params:
        return {"kernel": jnp.zeros((size, size))}

    def apply(params: Params, x: jax.Array, context: LayerContext) -> jax.Array:
        return x @ params["kernel"]

    return Layer(name, init, apply)


LAYERS = [dense(f"layer_{i}") for i in range(9)]
GPT_SMALL = GPT(vocab_size=32, d_model=16, num_layers=6, num_heads=2, seq_len=8, tied=True)


def all_cuts(n: int, stages: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the cuts where the loss has the layer before it in its stage, unless there are as many stages as layers."""
    inner = itertools.combinations(range(1, n), stages - 1)
    cuts = [tuple(itertools.pairwise((0, *starts, n))) for starts in inner]
    return [c for c in cuts if stages in (1, n) or c[-1][1] - c[-1][0] > 1]


def loads(ranges: tuple[tuple[int, int], ...], costs: list[float]) -> list[float]:
    return [math.fsum(costs[start:stop]) for start, stop in ranges]


# --- cut --------------------------------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e6))


@given(st.lists(numbers, min_size=1, max_size=9), st.data())
def test_no_cut_has_a_smaller_largest_stage(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    ranges = cut(LAYERS[: len(costs)], stages, costs)
    assert ranges in all_cuts(len(costs), stages)  # in order, no gap, none empty, the loss in the last
    least = min(max(loads(other, costs)) for other in all_cuts(len(costs), stages))
    assert max(loads(ranges, costs)) <= least * (1 + 1e-9)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.data())
def test_among_the_best_cuts_the_most_even_is_taken(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    values = [float(c) for c in costs]
    ranked = [
        (max(loads(other, values)), sum(x * x for x in loads(other, values))) for other in all_cuts(len(values), stages)
    ]
    stage_loads = loads(cut(LAYERS[: len(values)], stages, values), values)
    assert (max(stage_loads), sum(x * x for x in stage_loads)) == min(ranked)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=9), st.data())
def test_among_equal_cuts_the_one_that_sends_least_is_taken(layers: list[tuple[int, int]], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(layers)))
    costs = LayerCosts([float(c) for c, _ in layers], [b for _, b in layers])

    def rank(ranges: tuple[tuple[int, int], ...]) -> tuple[float, float, int]:
        stage_loads = loads(ranges, list(costs))
        return (
            max(stage_loads),
            sum(x * x for x in stage_loads),
            sum(costs.boundary_bytes[stop - 1] for _, stop in ranges[:-1]),
        )

    assert rank(cut(LAYERS[: len(costs)], stages, costs)) == min(map(rank, all_cuts(len(costs), stages)))


def test_the_loss_stays_with_the_layer_that_makes_the_logits() -> None:
    """Six blocks on eight stages: a rank with the loss alone would have the logits sent to it."""
    plan = plan_stages(GPT_SMALL, 8, costs=analytic_layer_costs(GPT_SMALL, 1))
    assert plan.stages[-1].layers == ("head", "loss")
    assert plan_stages(GPT_SMALL, 9).stages[-1].layers == ("loss",)
    assert plan_stages(GPT_SMALL, boundaries=["block_03", "loss"]).stages[-1].layers == ("loss",)


def test_a_narrow_place_between_layers_is_where_stages_end() -> None:
    """Layers of equal cost, some of which send less: stages end there."""
    boundary_bytes = [8, 8, 2, 8, 8, 8, 1, 8, 8]
    assert cut(LAYERS, 3, LayerCosts([0.0, 4, 0, 0, 4, 0, 0, 4, 0], boundary_bytes)) == ((0, 3), (3, 7), (7, 9))
    costs = analytic_layer_costs(GPT_SMALL, 2)
    assert costs.boundary_bytes == (*[2 * 8 * 16 * 4] * 7, 2 * 8 * 32 * 4, 8)


def test_thousands_of_layers_are_cut_in_a_moment() -> None:
    """Also where the largest layer leaves the others much room."""
    layers = LAYERS[:1] * 20_000
    assert cut(layers, 8) == tuple((2500 * s, 2500 * (s + 1)) for s in range(8))
    ranges = cut(layers, 8, [1.0] * 19_999 + [10_000.0])
    assert [stop - start for start, stop in ranges[:-1]] == [2857, 2857, 2857, 2857, 2857, 2857, 2856]


def test_a_layer_that_fails_is_named() -> None:
    def fails(params: Params, x: jax.Array, context: LayerContext) -> jax.Array:
        return x @ jnp.zeros((3, 5))

    class Pair:
        h = 1

    def model(apply: Any) -> Model:
        layers = (GPT_SMALL.layers[0], Layer("mine", lambda key: {}, apply), *GPT_SMALL.layers[-2:])
        return Model("odd", layers, GPT_SMALL.batch_spec, 32, 8)

    with pytest.raises(StageError, match=r"'mine'.*dot_general"):
        analytic_layer_costs(model(fails), 1)
    with pytest.raises(
        StageError, match=r"layer 'mine' returns a Pair, which is neither an array nor a pytree of them"
    ):
        analytic_layer_costs(model(lambda params, x, context: Pair()), 1)
    listed = Layer("mine", lambda key: [jnp.zeros(3)], fails)  # type: ignore[arg-type, return-value]
    with pytest.raises(StageError, match=r"layer 'mine': init returns a list; want a dict of arrays"):
        plan_stages(Model("odd", (listed, *GPT_SMALL.layers), GPT_SMALL.batch_spec, 32, 8), 2)


def test_without_costs_every_layer_counts_the_same() -> None:
    assert sorted(stop - start for start, stop in cut(LAYERS, 4)) == [2, 2, 2, 3]
    assert cut(LAYERS, 3) == ((0, 3), (3, 6), (6, 9))
    assert cut(LAYERS, 9) == tuple((i, i + 1) for i in range(9))
    assert cut(LAYERS, 1) == ((0, 9),)


@given(st.integers(-60, 60))
def test_the_unit_of_costs_does_not_matter(exponent: int) -> None:
    costs = [0.0, 3.0, 3.0, 2.0, 5.0, 1.0, 1.0, 4.0, 0.0]
    assert cut(LAYERS, 4, [2.0**exponent * c for c in costs]) == cut(LAYERS, 4, costs)


def test_a_hundred_layers_are_cut_at_once() -> None:
    layers = [dense(f"layer_{i:03d}") for i in range(130)]
    ranges = cut(layers, 64, [1.0 + (i % 7) for i in range(130)])
    assert len(ranges) == 64 and ranges[-1][1] == 130


def test_boundaries_by_index_and_by_name() -> None:
    assert cut_at(LAYERS, [2, 5]) == ((0, 2), (2, 5), (5, 9))
    assert cut_at(LAYERS, ["layer_2", 5]) == ((0, 2), (2, 5), (5, 9))
    assert cut_at(LAYERS, []) == ((0, 9),)


@pytest.mark.parametrize(
    ("stages", "costs", "message"),
    [
        (10, None, "10 stages of 9 layers; every stage needs a layer, so use 1 to 9 stages"),
        (0, None, "0 stages of 9 layers"),
        (2, [1.0] * 8, "8 costs for 9 layers; give one a layer"),
        (2, [1.0] * 8 + [-1.0], "the cost of layer layer_8 is -1.0; want a finite number >= 0"),
        (2, [math.nan] + [1.0] * 8, "the cost of layer layer_0 is nan"),
        (2, [1.0, math.inf] + [1.0] * 7, "the cost of layer layer_1 is inf"),
    ],
)
def test_bad_cuts_get_one_clear_line(stages: int, costs: list[float] | None, message: str) -> None:
    with pytest.raises(StageError) as error:
        cut(LAYERS, stages, costs)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (["layer_x"], "no layer 'layer_x' to start a stage at; layers are layer_0, layer_1"),
        ([3, 3], "a stage can't start at layer 3 after one that starts at 3; possible: 4 to 8"),
        ([5, 2], "a stage can't start at layer 2 after one that starts at 5; possible: 6 to 8"),
        ([0], "a stage can't start at layer 0 after one that starts at 0; possible: 1 to 8"),
        ([8, 9], "possible: none, no layer is left"),
        ([-1], "possible: 1 to 8"),
        ([True, 3, 5], "a stage can't start at layer True; want the index of a layer, or its name"),
        ([3, 5.0], "a stage can't start at layer 5.0; want the index of a layer, or its name"),
        ([None], "a stage can't start at layer None"),
        ([(0, 3), (3, 9)], r"a stage can't start at layer (0, 3); want the index of a layer, or its name"),
    ],
)
def test_bad_boundaries_get_one_clear_line(boundaries: list[Any], message: str) -> None:
    with pytest.raises(StageError) as error:
        cut_at(LAYERS, boundaries)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([0, 3, 5, 7], "stage 0 is given layers 0; want a range (start, stop) of layer indices for each stage"),
        ([(0, 3), 3], "stage 1 is given layers 3; want a range (start, stop)"),
        ([(0, 3), (3, 5, 9)], "stage 1 is given layers (3, 5, 9); want a range"),
        ([(0, 3), ("layer_3", "layer_8")], "stage 1 is given layers ('layer_3', 'layer_8'); want a range"),
        ([(False, 3), (3, 9)], "stage 0 is given layers (False, 3); want a range"),
        ([(0, 3.0), (3.0, 9)], "stage 0 is given layers (0, 3.0); want a range"),
        (["ab", (3, 9)], "stage 0 is given layers 'ab'; want a range"),
        ([(0, 3), (4, 9)], "stage 1 is given layers (4, 9); want (3, 9)"),
    ],
)
def test_what_is_no_list_of_ranges_gets_one_clear_line(ranges: list[Any], message: str) -> None:
    with pytest.raises(StageError) as error:
        checked_cut(LAYERS, ranges)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_ranges_and_starts_of_numpy_are_taken() -> None:
    assert checked_cut(LAYERS, np.asarray([[0, 3], [3, 9]])) == ((0, 3), (3, 9))  # type: ignore[arg-type]
    assert cut_at(LAYERS, np.asarray([3])) == ((0, 3), (3, 9))  # type: ignore[arg-type]


def test_a_models_repr_is_one_short_line() -> None:
    assert repr(GPT_SMALL) == "Model('gpt', 9 layers: embed, block_00, …, head, loss)"


# --- costs ------------------------------------------------------------------------------------------------------------


def test_analytic_costs_are_the_flops_of_the_matrix_products() -> None:
    B, T, D, V, H = 3, 8, 16, 32, 2
    block = 2 * B * T * (3 * D * D + D * D + 8 * D * D) + 2 * (2 * B * H * T * T * (D // H))
    head = 2 * B * T * D * V
    assert analytic_layer_costs(GPT_SMALL, B) == (0.0, *(float(block),) * 6, float(head), 0.0)
    G, F = 1, 24
    llama = Llama(
        vocab_size=V, d_model=D, num_layers=1, num_heads=H, num_kv_heads=G, seq_len=T, mlp_size=F, dropout=0.1
    )
    block = 2 * B * T * (D * (H + 2 * G) * (D // H) + D * D + 3 * D * F) + 2 * (2 * B * H * T * T * (D // H))
    assert analytic_layer_costs(llama, B) == (0.0, float(block), float(head), 0.0)


def test_what_is_no_array_travels_between_layers() -> None:
    """A layer may pass a Python int and a string along; costs are found all the same."""

    def start(params: Params, x: None, context: LayerContext) -> object:
        return {"h": context.data["tokens"].astype(jnp.float32), "repeat": 3, "mode": "double"}

    def middle(params: Params, x: dict[str, object], context: LayerContext) -> jax.Array:
        h = x["h"]
        assert x["mode"] == "double" and isinstance(h, jax.Array) and isinstance(x["repeat"], int)
        for _ in range(x["repeat"]):
            h = h @ params["kernel"]
        return h

    def finish(params: Params, x: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        return x.sum(), jnp.float32(x.size)

    def spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((size, 4), jnp.int32)}

    layers = (
        Layer("start", lambda key: {}, start, reads=("tokens",)),
        dataclasses.replace(dense("middle"), apply=middle),
        Layer("finish", lambda key: {}, finish),
    )
    assert analytic_layer_costs(Model("odd", layers, spec, 2, 4), 5) == (0.0, 3 * 2 * 5 * 4 * 4, 0.0)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_each_stage_owns() -> None:
    costs = analytic_layer_costs(GPT_SMALL, 1)
    plan = plan_stages(GPT_SMALL, 3, costs=costs, costs_from="flops")
    assert plan.cut == cut(GPT_SMALL.layers, 3, costs)
    assert [layer for stage in plan.stages for layer in stage.layers] == [layer.name for layer in GPT_SMALL.layers]
    assert "embed" in plan.stages[0].layers and "loss" in plan.stages[-1].layers
    D, V, T = 16, 32, 8
    assert sum(stage.num_params for stage in plan.stages) == V * D + T * D + 6 * (12 * D * D + 13 * D) + 2 * D
    assert all(stage.param_bytes == 4 * stage.num_params for stage in plan.stages)
    assert "embed/tokens/embedding" in plan.stages[0].param_paths
    assert "head/norm/scale" in plan.stages[-1].param_paths and "head/kernel" not in plan.stages[-1].param_paths
    assert math.isclose(sum(stage.cost_share for stage in plan.stages), 1.0)
    (tie,) = plan.stages[-1].tied
    assert (tie.layer, tie.path, tie.owner_layer, tie.owner_path) == (
        "head",
        ("kernel",),
        "embed",
        ("tokens", "embedding"),
    )
    assert tie.owner_stage == 0
    assert "embed" in plan.stages[0].layers and "loss" in plan.stages[2].layers
    assert 1.0 <= plan.imbalance < 1.3


def test_a_plan_prints_and_survives_json() -> None:
    plan = plan_stages(GPT_SMALL, boundaries=["block_02", "block_05"])
    assert [stage.layers[0] for stage in plan.stages] == ["embed", "block_02", "block_05"]
    assert StagePlan.from_json(plan.to_json()) == plan
    lines = str(plan).splitlines()
    assert lines[0] == "gpt: 3 stages, largest is 1.000 of the mean"
    assert lines[2].split() == [
        "0",
        *["embed", "…", "block_01", "(3)"],
        *[f"{plan.stages[0].num_params:,}", "0.03", "3", "33.3%"],
    ]
    assert lines[4].endswith("embed/tokens/embedding @ 0")


def test_bad_plans_get_one_clear_line() -> None:
    with pytest.raises(StageError, match="num_stages"):
        plan_stages(GPT_SMALL)
    with pytest.raises(StageError, match="num_stages"):
        plan_stages(GPT_SMALL, 2, boundaries=[3])
    with pytest.raises(StageError, match=r"12 stages of 9 layers.*use 1 to 9"):
        plan_stages(GPT_SMALL, 12)
    for text in (
        "",
        "[]",
        "{}",
        '{"stages": [{}]}',
        plan_stages(GPT_SMALL, 2).to_json().replace("param_bytes", "bytes"),
    ):
        with pytest.raises(StageError, match="not a stage plan in JSON"):
            StagePlan.from_json(text)


def test_bad_models_get_one_clear_line() -> None:
    def broken(*layers: Layer) -> Model:
        return Model("bad", layers, GPT_SMALL.batch_spec, 32, 8)

    a, b, c = dense("a"), dense("b"), dense("c")
    with pytest.raises(StageError, match=r"1 layers.*2"):
        broken(a)
    with pytest.raises(StageError, match="layer names must be unique, and a appears more than once"):
        broken(a, b, a)
    with pytest.raises(StageError, match="'label'"):
        broken(a, dataclasses.replace(b, reads=("label",)))
    tied_b = dataclasses.replace(b, tied={("kernel",): ("z", ("kernel",))})
    with pytest.raises(StageError, match="z/kernel"):
        broken(a, tied_b, c)
    b_to_a = dataclasses.replace(b, tied={("kernel",): ("a", ("kernel",))})
    c_to_b = dataclasses.replace(c, tied={("kernel",): ("b", ("kernel",))})
    with pytest.raises(StageError, match="a/kernel"):
        broken(a, b_to_a, c_to_b)
    no_leaf = dataclasses.replace(b, tied={("kernel",): ("a", ("weight",))})
    with pytest.raises(StageError, match=r"'b'.*a/weight"):
        plan_stages(broken(a, no_leaf), 2)
