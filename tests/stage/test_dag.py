"""Models whose layers form a graph: joins, forks, skip edges, several sources and losses, frozen layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import ProgramError, StageError
from jaxpipe.runtime.batches import microbatch_keys
from jaxpipe.runtime.memory_probe import measured_peaks
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Placement, Traversal, explicit, generate, one_to_one, traverse, with_span
from jaxpipe.schedule.passes import unbraid
from jaxpipe.stage.compiled.braid import braid
from jaxpipe.stage.compiled.compile import BuildCache
from jaxpipe.stage.model.layer import Layer, LayerContext, Model
from jaxpipe.stage.model.params import compute_avals
from jaxpipe.stage.model.plan import cut, links_of, stage_edges
from jaxpipe.stage.model.reference import apply_model, init_params, model_output
from jaxpipe.train.step import TrainStep
from tests.support.metrics import metrics_of
from tests.support.pipelines import assert_same_arrays, run_sequentially
from tests.support.schedule_strategies import random_schedule

B = 2


def _init(*shape: int) -> Any:
    return lambda key: {"w": 0.5 * jax.random.normal(key, shape)}


def source(name: str, read: str, width: int, out: int, **options: Any) -> Layer:
    """Return a layer that begins a branch with a batch array ``[B, width]``."""
    return Layer(name, _init(width, out), lambda p, x, c: jnp.tanh(c.data[read] @ p["w"]), (read,), takes=(), **options)


def dense(name: str, width: int, out: int, **options: Any) -> Layer:
    """Return a dense layer of the sum of what it takes, or of the one thing."""

    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        return jnp.tanh((sum(x) if isinstance(x, tuple) else x) @ p["w"])

    return Layer(name, _init(width, out), apply, **options)


def side_by_side(x: Any) -> jax.Array:
    parts = x if isinstance(x, tuple) else (x,)
    return jnp.concatenate([part["h"] if isinstance(part, dict) else part for part in parts], -1)


def squares(name: str, weight: str, **options: Any) -> Layer:
    """Σ weight · x², and Σ weight."""

    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        each = jnp.square(side_by_side(x)).sum(-1)
        weights = c.data[weight].astype(each.dtype)
        return (each * weights).sum(), weights.sum()

    return Layer(name, lambda key: {}, apply, (weight,), **options)


def _spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {"a": (size, 3), "b": (size, 4), "u": (size,), "v": (size,)}
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def model_of(*layers: Layer) -> Model:
    return Model("graph", layers, _spec, 1, 1)


def batch_of(lead: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: unaligned(rng.uniform(0.2, 1.0, (*lead, *a.shape)).astype(np.float32)) for n, a in _spec(B).items()}


def unaligned(array: np.ndarray) -> np.ndarray:
    """Return the same numbers where JAX can't take their memory as it is: two stages of a rank that read them have a copy
    each."""
    room = np.zeros(array.nbytes + 68, np.uint8)
    start = (4 - room.ctypes.data) % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


TWO_TOWERS = (
    source("left", "a", 3, 4),
    dense("left_1", 4, 5),
    source("right", "b", 4, 5),
    dense("both", 5, 6, takes=("left_1", "right")),
    dense("skip", 6, 4),
    squares("aux", "u", takes=("left",)),
    squares("loss", "v", takes=("skip", "both")),
)


def test_the_unsplit_model_follows_takes() -> None:
    model = model_of(*TWO_TOWERS)
    params, batch = init_params(model, 0), batch_of(())
    assert model.losses == (5, 6)
    w = {name: p.get("w") for name, p in params.items()}
    stem = jnp.tanh(batch["a"] @ w["left"])
    both = jnp.tanh((jnp.tanh(stem @ w["left_1"]) + jnp.tanh(batch["b"] @ w["right"])) @ w["both"])
    skip = jnp.tanh(both @ w["skip"])
    out = model_output(model, params, {n: batch[n] for n in "ab"})
    np.testing.assert_allclose(out[0], skip, rtol=1e-6)
    u, v = batch["u"], batch["v"]
    aux, main = (stem**2).sum(-1) @ u, ((skip**2).sum(-1) + (both**2).sum(-1)) @ v
    loss_sum, weight = apply_model(model, params, batch)
    np.testing.assert_allclose(loss_sum / weight, aux / u.sum() + main / v.sum(), rtol=1e-5)
    metrics = metrics_of(model, params, batch)
    assert list(metrics) == ["loss", "aux"]
    np.testing.assert_allclose(metrics["aux"][0] / metrics["aux"][1], aux / u.sum(), rtol=1e-5)


def test_a_chain_says_nothing_of_what_it_takes() -> None:
    chain = (source("a", "a", 3, 4), dense("b", 4, 4), squares("loss", "u"))
    with_takes = (chain[0], replace(chain[1], takes=("a",)), replace(chain[2], takes=("b",)))
    params, batch = init_params(model_of(*chain), 0), batch_of(())
    assert apply_model(model_of(*chain), params, batch) == apply_model(model_of(*with_takes), params, batch)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (dense("x", 4, 4, takes=("lefft",)), "layer x takes 'lefft'; layers before it are left"),
        (dense("x", 4, 4, takes=("x",)), "layer x takes its own result"),
        (dense("x", 4, 4, takes=("loss",)), "layer x takes 'loss', which comes after it"),
        (dense("x", 4, 4, takes="left"), r"layer x takes 'left'; want a tuple of names: \('left',\)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_takes_are_one_line(layer: Layer, message: str) -> None:
    with pytest.raises(StageError, match=message) as raised:
        model_of(source("left", "a", 3, 4), layer, squares("loss", "u"))
    assert "\n" not in str(raised.value)


def test_a_layer_that_nobody_takes_must_be_a_loss() -> None:
    model = model_of(source("left", "a", 3, 4), source("idle", "b", 4, 4), squares("loss", "u", takes=("left",)))
    with pytest.raises(StageError, match="layer 'idle', which no layer takes, returns a ArrayImpl; want"):
        apply_model(model, init_params(model, 0), batch_of(()))


# -- through a pipeline ----------------------------------------------------------------------------------------------------


def random_model(rng: random.Random) -> Model:
    """Return a model of up to 9 layers: sources, joins, forks, skip edges, widths of their own, dropout, a loss or two."""
    layers: list[Layer] = []
    width: dict[str, int] = {}
    consumed: set[str] = set()
    for i in range(rng.randint(3, 7)):
        name, out = f"l{i}", rng.randint(2, 5)
        frozen = rng.random() < 0.15
        if i == 0 or rng.random() < 0.2:
            read, size = rng.choice((("a", 3), ("b", 4)))
            layers.append(source(name, read, size, out, frozen=frozen))
        else:
            earlier = list(width)
            names = tuple(
                dict.fromkeys([rng.choice((earlier[-1], rng.choice(earlier))) for _ in range(rng.randint(1, 3))])
            )
            layers.append(
                joining(name, [width[n] for n in names], out, takes=names, frozen=frozen, drops=rng.random() < 0.3)
            )
            consumed |= {*names}
        width[name] = out
        if rng.random() < 0.15 and i > 1:
            layers.append(squares(f"aux{i}", "u", takes=(name,)))
            consumed.add(name)
    rest = tuple(n for n in width if n not in consumed) or (list(width)[-1],)
    layers.append(squares("loss", "v", takes=rest))
    return model_of(*layers)


def joining(name: str, widths: Sequence[int], out: int, drops: bool, **options: Any) -> Layer:
    """Return a dense layer of what it takes, side by side; gives a dict with an integer array and a static leaf beside its
    result."""

    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        h = jnp.tanh(side_by_side(x) @ p["w"])
        if c.key is not None:
            h = jnp.where(jax.random.bernoulli(c.key, 0.8, h.shape), h, 0.0)
        return {"h": h, "sign": (h > 0).astype(jnp.int32), "scale": 2}

    return Layer(name, _init(sum(widths), out), apply, uses_key=drops, **options)


def random_cut(model: Model, rng: random.Random) -> list[tuple[int, int]]:
    n = len(model.layers)
    starts = [0, *sorted(rng.sample(range(1, n), rng.randint(min(2, n - 1), n - 1)))]
    return list(zip(starts, [*starts[1:], n], strict=True))


def random_placement(model: Model, ranges: Sequence[tuple[int, int]], rng: random.Random) -> Placement:
    links = links_of([model.layers[a:b] for a, b in ranges], compute_avals(model.layers, jnp.float64, jnp.float64))
    ranks = rng.randint(1, min(3, len(ranges)))
    homes = [*range(ranks), *(rng.randrange(ranks) for _ in range(len(ranges) - ranks))]
    rng.shuffle(homes)
    return explicit(ranks, homes, stage_edges(links))


def unsplit(model: Model, params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    """Return the loss of a step and its gradient by ``jax.grad``: each loss's own sums over all microbatches."""

    def loss(params: Any) -> Any:
        sums: dict[str, Any] = {}
        for i in range(len(batch["u"])):
            one = {name: x[i] for name, x in batch.items()}
            metrics = metrics_of(model, params, one, jax.random.fold_in(key, i), train=True)
            if len(model.losses) > 1:
                metrics = heads_of(model, params, one, jax.random.fold_in(key, i))
            for name, (total, weight) in metrics.items():
                a, b = sums.get(name, (0.0, 0.0))
                sums[name] = (a + total, b + weight)
        return sum(a / b for a, b in sums.values())

    return jax.jit(jax.value_and_grad(loss))(params)  # type: ignore[no-any-return]


def heads_of(model: Model, params: Any, batch: Any, key: Any) -> dict[str, Any]:
    """Return loss and weight of each loss layer, found one at a time: the model without the other losses."""
    losses = {model.layers[k].name for k in model.losses}
    index = {layer.name: i for i, layer in enumerate(model.layers)}
    results: dict[str, Any] = {}
    for layer in model.layers:
        draws = jax.random.fold_in(key, index[layer.name]) if layer.uses_key else None
        context = LayerContext({n: batch[n] for n in layer.reads}, draws)
        results[layer.name] = layer.apply(
            params[layer.name], tuple(results[n] for n in layer.takes or ()) or None, context
        )
    return {name: results[name] for name in losses}


def _check(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    ranges = random_cut(model, rng)
    placement = random_placement(model, ranges, rng)
    m = rng.randint(1, 3)
    first = random_schedule(placement, m, rng)
    pipe = Pipeline.build(model, first, microbatch_size=B, boundaries=ranges, compute_dtype=jnp.float64)
    host_params = jax.tree.map(lambda x: np.asarray(x, np.float64), init_params(model, seed))
    params, batch, key = pipe.place(host_params), batch_of((m,), seed), jax.random.key(seed)
    expected_loss, expected = unsplit(model, host_params, batch, key)
    for schedule in (first, random_schedule(placement, m, rng, offload=0.3, braid=0.2)):
        pipe = pipe.with_schedule(schedule)
        loss, grads = pipe.loss_and_grads(params, batch, key)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-10)
        for layer in model.layers:
            for got, true in zip(
                jax.tree.leaves(grads[layer.name]), jax.tree.leaves(expected[layer.name]), strict=True
            ):
                true = 0 * true if layer.frozen else true
                np.testing.assert_allclose(got, true, rtol=1e-10, atol=1e-12, err_msg=layer.name)
        out = pipe.run(params, {at: pipe.zeros(at) for at in pipe.own_instances}, batch, key)
        acc, losses = run_sequentially(
            pipe, unbraid(schedule), params, pipe._with_factors(batch), microbatch_keys(key, m)
        )
        if unbraid(schedule) == schedule:
            assert_same_arrays((dict(out.acc), list(out.losses)), (acc, losses))
        measured = measured_peaks(pipe, params, batch, key)
        for predicted, got in zip(pipe.memory_report(workspace=False, curves=True).ranks, measured.ranks, strict=True):
            assert (predicted.live_bytes, predicted.host_bytes) == (got.live_bytes, got.host_bytes)
    loss_sum, weight = pipe.evaluate(params, batch)
    whole_batch = {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}
    (a, b), expected = jax.jit(lambda p, b: (apply_model(model, p, b, train=False), model_output(model, p, b)))(
        host_params, whole_batch
    )
    np.testing.assert_allclose(loss_sum / weight, a / b, rtol=1e-10)
    got = pipe.predict(params, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10), got, expected)


SEEDS = (4, 7)
"""One to three ranks, one and three microbatches, one loss or two, frozen layers, dropout, braids, with and without offload;
the soak takes the others."""


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(k, marks=pytest.mark.soak) for k in range(150) if k not in SEEDS)]
)
def test_random_graphs(seed: int) -> None:
    with jax.enable_x64(True):
        _check(seed)


# -- cuts ------------------------------------------------------------------------------------------------------------------

TOWERS = model_of(
    source("a0", "a", 3, 4),
    *(dense(f"a{i}", 4, 4) for i in range(1, 6)),
    source("b0", "b", 4, 4),
    *(dense(f"b{i}", 4, 4) for i in range(1, 4)),
    dense("join", 4, 4, takes=("a5", "b3")),
    squares("loss", "u"),
)


def test_each_branch_is_cut_by_itself() -> None:
    assert cut(TOWERS.layers, 5) == ((0, 3), (3, 6), (6, 8), (8, 10), (10, 12))
    assert cut(TOWERS.layers, 2) == ((0, 6), (6, 12))
    assert cut(TOWERS.layers, 4, edges=((0, 3), (1, 2), (2, 3))) == ((0, 6), (6, 8), (8, 10), (10, 12))
    with pytest.raises(StageError, match=r"4 stages.*0->3 1->3 2->3") as raised:
        cut(TOWERS.layers, 4, edges=((0, 3), (1, 3), (2, 3)))
    assert "\n" not in str(raised.value)


def test_a_cut_with_other_edges_than_the_placement_is_one_line() -> None:
    schedule = generate("1f1b", 3, 2)
    with pytest.raises(ProgramError, match=r"edges 0->1 1->2 between stages; the model's, .* are 0->2 1->2") as raised:
        Pipeline.build(TOWERS, schedule, microbatch_size=B, boundaries=[(0, 6), (6, 10), (10, 12)])
    assert "\n" not in str(raised.value)


def test_shapes_that_do_not_join_are_one_line() -> None:
    layers = (
        source("l", "a", 3, 4),
        source("r", "b", 4, 5),
        dense("both", 4, 4, takes=("l", "r")),
        squares("loss", "u"),
    )
    with pytest.raises(
        StageError, match=r"layer 'both' can't be traced: TypeError: add got incompatible shapes"
    ) as raised:
        Pipeline.build(model_of(*layers), generate("1f1b", 1, 2), microbatch_size=B)
    assert "\n" not in str(raised.value)


def test_training_a_graph_with_a_frozen_branch_and_tied_leaves() -> None:
    """ZeRO-1, a tie across branches, evaluation, checkpointed names; the frozen branch has no W and no optimizer state."""
    frozen = tuple(replace(layer, frozen=layer.name.startswith("a")) for layer in TOWERS.layers)
    tied = replace(frozen[9], init=lambda key: {}, tied={("w",): ("b1", ("w",))})
    model = model_of(*frozen[:9], tied, *frozen[10:])
    placement = explicit(2, [0, 1, 1, 0], [(0, 3), (1, 2), (2, 3)])
    schedule = traverse(placement, 2, Traversal("backward"))
    pipe = Pipeline.build(model, schedule, microbatch_size=B, dp=2)
    assert [layer.name for layer in pipe.layers(0)] == [f"a{i}" for i in range(6)]
    functions = pipe.stages[0].functions
    assert pipe.stages[0].acc_avals == () and pipe.stages[0].residual_bytes == 0
    assert all([p.kind for p in functions[op].outputs] == ["token"] for op in ("B", "W", "BW"))
    assert not any(p.kind == "dy" for f in functions.values() for p in f.inputs)
    assert len(braid([(0, functions["W"]), (0, functions["B"])], BuildCache()).call()) == 1
    step = TrainStep(pipe, optax.adam(1e-2), clip_norm=1.0, zero1=True)
    params = init_params(model, 0)
    state = step.init(params)
    batch = batch_of((2,))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert losses[2] < losses[1] < losses[0]
    after, optimizer = step.by_layer(state)
    np.testing.assert_array_equal(after["a3"]["w"], params["a3"]["w"])
    assert not np.array_equal(after["b1"]["w"], params["b1"]["w"])
    assert not any(x.ndim for x in jax.tree.leaves([optimizer[f"a{i}"] for i in range(6)])), "a count of steps at most"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_stage_of_span_two_may_hold_more_than_the_loss(start: int) -> None:
    """The function is that over one microbatch if rows do not count for each other; batch arrays and inputs are
    put together."""
    layers = (source("a", "a", 3, 4), dense("b", 4, 5), squares("loss", "v"))
    model = model_of(*layers[:-1], replace(layers[-1], span=2))
    params, batch = init_params(model, 0), batch_of((4,))
    cuts = [(0, start), (start, 3)] if start else [(0, 3)]
    placement = with_span(one_to_one(len(cuts)), {len(cuts) - 1: 2})
    pipe = Pipeline.build(
        model,
        traverse(placement, 4, Traversal("backward")),
        microbatch_size=B,
        boundaries=cuts,
        compute_dtype=jnp.float64,
    )
    got, grads = pipe.loss_and_grads(placed := pipe.place(params), batch)

    def mean(p: Any) -> Any:
        loss_sum, weight = apply_model(model, p, {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()})
        return loss_sum / weight

    loss, expected = jax.jit(jax.value_and_grad(mean))(jax.tree.map(lambda x: x.astype(jnp.float64), params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10), (got, grads), (loss, expected))
    measured = measured_peaks(pipe, placed, batch, None)
    for predicted, actual in zip(pipe.memory_report(workspace=False, curves=True).ranks, measured.ranks, strict=True):
        assert predicted.live_bytes == actual.live_bytes
    with pytest.raises(ProgramError, match=r"2 microbatches.*3"):
        pipe.evaluate(placed, batch_of((3,)))
