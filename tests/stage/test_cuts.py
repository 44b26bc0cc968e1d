"""Pipelines of any cut, whatever kinds and ties the layers have, train the model that is written, or are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import ProgramError, StageError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Schedule, generate
from jaxpipe.stage.model.layer import Layer, LayerContext, Model
from jaxpipe.stage.model.plan import plan_stages
from jaxpipe.stage.model.reference import apply_model, init_params

V, D, T, B, M = 7, 4, 3, 2, 2


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return 0.5 * jax.random.normal(key, shape)


def _embed() -> Layer:
    return Layer(
        "embed", lambda k: {"table": _normal(k, V, D)}, lambda p, x, c: p["table"][c.data["tokens"]], reads=("tokens",)
    )


def _block(name: str, scale: float, kind: str, owner: str | None = None) -> Layer:
    """Return a residual block whose factor is in its closure; ``owner``: the block whose weights it uses."""

    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        return x + scale * jnp.tanh(x @ p["w"] + p["b"][None, None])

    def init(key: jax.Array) -> Any:
        params = {"b": _normal(key, D)}
        return params if owner else {**params, "w": _normal(key, D, D)}

    return Layer(name, init, apply, kind=kind, tied={("w",): (owner, ("w",))} if owner else {})


def _head(tied: bool) -> Layer:
    ties = {("table",): ("embed", ("table",))} if tied else {}
    init = (lambda k: {}) if tied else (lambda k: {"table": _normal(k, V, D)})
    return Layer("head", init, lambda p, x, c: x @ p["table"].T, tied=ties)


def _loss() -> Layer:
    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        picked = jnp.take_along_axis(jax.nn.log_softmax(x), c.data["tokens"][..., None], -1)
        return -jnp.sum(picked), jnp.float32(picked.size)

    return Layer("loss", lambda k: {}, apply, reads=("tokens",))


def model_of(blocks: Sequence[Layer], tied_head: bool) -> Model:
    layers = (_embed(), *blocks, _head(tied_head), _loss())
    return Model("toy", layers, lambda n: {"tokens": jax.ShapeDtypeStruct((n, T), jnp.int32)}, V, T)


def batch_of(seed: int = 0) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(seed).integers(0, V, (M, B, T)).astype(np.int32)}


def assert_trains(pipe: Pipeline, model: Model) -> None:
    """Loss and gradients are those of the model's layers, one after another."""
    params, batch = init_params(model, 0), batch_of()

    def reference(params: Mapping[str, Any]) -> jax.Array:
        sums = [apply_model(model, params, {"tokens": tokens}) for tokens in batch["tokens"]]
        return sum(s for s, _ in sums) / sum(w for _, w in sums)

    expected, expected_grads = jax.jit(jax.value_and_grad(reference))(params)
    loss, grads = pipe.loss_and_grads(pipe.place(params), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, expected_grads)


MODEL = model_of([_block(f"block_{i}", 1.0, "") for i in range(4)], tied_head=False)  # 7 layers


@pytest.mark.parametrize(
    ("ranges", "stage"),
    [
        ([(0, 3), (2, 7)], "stage 1 is given layers (2, 7); want (3, 7)"),
        ([(0, 3), (4, 7)], "stage 1 is given layers (4, 7); want (3, 7)"),
        ([(3, 7), (0, 3)], "stage 0 is given layers (3, 7); want (0, n) with n from 1 to 6"),
        ([(0, 3), (3, 8)], "stage 1 is given layers (3, 8); want (3, 7)"),
        ([(0, 3), (3, 6)], "stage 1 is given layers (3, 6); want (3, 7)"),
        ([(0, 0), (0, 7)], "stage 0 is given layers (0, 0); want (0, n) with n from 1 to 6"),
        ([(-7, 3), (3, 7)], "stage 0 is given layers (-7, 3); want (0, n)"),
        ([(0, 7), (7, 7)], "stage 1 is given layers (7, 7)"),
    ],
    ids=["overlap", "gap", "order", "past the end", "loss left out", "empty", "negative", "all in one"],
)
def test_what_is_no_cut_is_refused(ranges: list[tuple[int, int]], stage: str) -> None:
    with pytest.raises(StageError) as caught:
        Pipeline.build(MODEL, generate("1f1b", 2, M), microbatch_size=B, boundaries=ranges)
    assert stage in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cut_may_be_a_plan_or_left_out() -> None:
    schedule = generate("1f1b", 2, M)
    plan = plan_stages(MODEL, boundaries=["block_3"])
    assert Pipeline.build(MODEL, schedule, microbatch_size=B, boundaries=plan).boundaries == ((0, 4), (4, 7))
    balanced = Pipeline.build(MODEL, schedule, microbatch_size=B)
    assert_trains(balanced, MODEL)
    with pytest.raises(ProgramError, match=r"2 stages.*3.*2"):
        Pipeline.build(MODEL, schedule, microbatch_size=B, boundaries=plan_stages(MODEL, 3))
    other = model_of([_block("another", 1.0, "")], tied_head=False)
    with pytest.raises(
        StageError, match=r"the stage plan is of another model .* its layers are embed, another, head, loss"
    ):
        Pipeline.build(MODEL, schedule, microbatch_size=B, boundaries=plan_stages(other, 2))


def test_layers_of_one_kind_that_compute_different_things() -> None:
    """Alternating factors, one block a stage on the way down and up."""
    blocks = [_block(f"block_{i}", 1.0 if i % 2 == 0 else -0.5, "block") for i in range(8)]
    model = model_of(blocks, tied_head=False)
    ranges = [(0, 2), *((i, i + 1) for i in range(2, 8)), (8, 11)]
    assert_trains(Pipeline.build(model, generate("v-zb", 4, M), microbatch_size=B, boundaries=ranges), model)


# -- random cuts ----------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw blocks with factors that their labels know nothing of, some with the weights of an earlier one."""
    count = draw(st.integers(1, 5))
    blocks: list[Layer] = []
    for i in range(count):
        owners = [b.name for b in blocks if not b.tied]
        owner = draw(st.sampled_from([None, None, *owners]))
        scale, kind = draw(st.sampled_from([1.0, -0.5])), draw(st.sampled_from(["", "block", "other"]))
        blocks.append(_block(f"block_{i}", scale, kind, owner))
    return model_of(blocks, draw(st.booleans()))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Model, Schedule, list[tuple[int, int]]]:
    """Draw a model, a schedule, and layers for each stage: a cut, or one with an edge moved somewhere else."""
    model = draw(models())
    n = len(model.layers)
    name, ranks = draw(st.sampled_from([("1f1b", 1), ("1f1b", 2), ("zb-1p", 3), ("v-zb", 2), ("interleaved-1f1b", 2)]))
    schedule = generate(name, ranks, M)
    stages = schedule.num_stages
    hypothesis.assume(stages <= n)
    inner = sorted(draw(st.lists(st.integers(1, n - 1), min_size=stages - 1, max_size=stages - 1, unique=True)))
    ranges = list(zip([0, *inner], [*inner, n], strict=True))
    if draw(st.booleans()):
        where, side = draw(st.integers(0, stages - 1)), draw(st.integers(0, 1))
        edge = list(ranges[where])
        edge[side] = draw(st.integers(-1, n + 1))
        ranges[where] = (edge[0], edge[1])
    return model, schedule, ranges


def _check(case: tuple[Model, Schedule, list[tuple[int, int]]]) -> None:
    model, schedule, ranges = case
    covered = [i for a, b in ranges for i in range(a, b)]
    if covered != list(range(len(model.layers))) or any(a >= b for a, b in ranges):
        with pytest.raises(StageError):
            Pipeline.build(model, schedule, microbatch_size=B, boundaries=ranges)
        return
    assert_trains(Pipeline.build(model, schedule, microbatch_size=B, boundaries=ranges), model)


@hypothesis.given(cuts())
@hypothesis.settings(max_examples=5)
def test_random_cuts_train_the_model_or_are_refused(case: tuple[Model, Schedule, list[tuple[int, int]]]) -> None:
    _check(case)


@pytest.mark.soak
@hypothesis.given(cuts())
@hypothesis.settings(max_examples=200)
def test_many_random_cuts(case: tuple[Model, Schedule, list[tuple[int, int]]]) -> None:
    _check(case)
