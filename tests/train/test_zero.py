"""ZeRO-1 and the reduction of gradients: which collectives there are, where state lies, and that dividing changes no bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe._jax_compat import ClosedJaxpr
from jaxpipe.axes import DP, RankMesh
from jaxpipe.errors import ConfigError
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.runtime.grid import RankView
from jaxpipe.runtime.memory_probe import measured_peaks
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.stage.functions import device_bytes
from jaxpipe.stage.model.layer import Layer, Path, Shard
from jaxpipe.stage.model.params import ParamLayout
from jaxpipe.stage.model.reference import init_params
from jaxpipe.train.checkpoints.leaves import Fragment, Leaf, Piece
from jaxpipe.train.state import TrainState
from jaxpipe.train.step import TrainStep
from jaxpipe.train.update.stage_update import GradientReduction, StageShards, compile_update, stage_optimizers
from tests.support.checkpoint_cases import seen_in_column
from tests.support.parallel_cases import Case, batches, model_for, optimizer, params_for, pipeline

# -- collectives, read from jaxprs ----------------------------------------------------------------------------------------

_COLLECTIVES = ("psum", "psum_invariant", "reduce_scatter", "all_gather", "pmax", "pmin", "ppermute", "all_to_all")


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        inner = [v for v in eqn.params.values() if isinstance(v, ClosedJaxpr) or hasattr(v, "eqns")]
        yield eqn
        for body in inner:
            yield from _equations(getattr(body, "jaxpr", body))


def _over_dp(function: Any, *args: Any) -> list[tuple[str, int]]:
    """Return name and elements of each array that a collective over dp takes, on one device; scalars left out."""
    jaxpr = function.jaxpr.jaxpr if hasattr(function, "jaxpr") else jax.make_jaxpr(function)(*args).jaxpr
    collectives = []
    for eqn in _equations(jaxpr):
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if eqn.primitive.name in _COLLECTIVES and DP in (axes if isinstance(axes, tuple) else (axes,)):
            collectives += [(eqn.primitive.name, v.aval.size) for v in eqn.invars if v.aval.shape]
    return collectives


@pytest.fixture(scope="module")
def sharded() -> Pipeline:
    """Provide two stages on 2 × 2 devices, with a tied leaf, and parameters of every kind: same, split, partial."""
    return pipeline(Case("gpt-tied", 2, 2, 2, sequence=True, dtype="float32"))


def _view(pipe: Pipeline, rank: int) -> RankView:
    return pipe.rank_views[rank]


def test_no_function_of_a_stage_has_a_collective_over_dp(sharded: Pipeline) -> None:
    for stage in sharded.stages:
        assert set(stage.layout.kinds) >= {"split", "partial"}
        for function in stage.functions.values():
            assert _over_dp(function) == [], f"{function.op} of stage {stage.stage}"


@pytest.mark.parametrize(("zero1", "ordered"), [(False, False), (True, False), (True, True)])
def test_each_parameter_is_reduced_once(sharded: Pipeline, zero1: bool, ordered: bool) -> None:
    reduced = []
    for s, stage in enumerate(sharded.stages):
        shards = StageShards(stage.layout, sharded.submeshes[s], zero1, ordered=ordered)
        slots = [slot for slot in stage.layout.slots if shards.updates(slot)]
        reduced += [(slot.layer, *slot.path) for slot in slots]
        size = {slot: 2 * shards.chunk_shape(slot)[0] if zero1 else slot.size for slot in slots}
        function = GradientReduction(shards, stage.acc_avals, _view(sharded, s)).function
        collectives = [(name, n) for name, n in _over_dp(function, list(stage.acc_avals)) if name != "all_gather"]
        expected = ("all_to_all" if ordered else "reduce_scatter") if zero1 else "psum"
        assert {name for name, _ in collectives} == {expected}  # what is gathered are sums of squares
        assert sum(n for _, n in collectives) == sum(size.values()), "every element once"
        assert len(collectives) == len({slot.buffer for slot in slots}), "a bucket each"
    params = init_params(model_for(Case("gpt-tied", 2, 2, 2, dtype="float32")), 0)
    paths = [
        (name, *(k.key for k in keys))
        for name in params
        for keys, _ in jax.tree_util.tree_leaves_with_path(params[name])
    ]
    assert sorted(reduced) == sorted(paths), "all of them, and no tied copy"


@pytest.mark.parametrize("zero1", [False, True])
def test_an_update_has_no_collective_but_the_gathering_of_buckets(sharded: Pipeline, zero1: bool) -> None:
    step = TrainStep(sharded, optimizer(), zero1=zero1)
    shards = {s: StageShards(stage.layout, sharded.submeshes[s], zero1) for s, stage in enumerate(sharded.stages)}
    optimizers = stage_optimizers(optimizer(), shards, {})
    for s, state in step.states.items():
        update = compile_update(shards[s], optimizers[s].part, state.acc, optimizers[s].specs, _view(sharded, s))
        grads = list(state.grads) if zero1 else list(state.acc)
        scalars = [jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)]
        inputs = list(state.params), list(state.master), grads, state.optimizer, *scalars, {}
        for gathers in (update.full, update.ahead):
            collectives = _over_dp(gathers, *inputs)
            assert [name for name, _ in collectives] == ["all_gather"] * (len(shards[s].updated) if zero1 else 0)
        if zero1 and s == 0:
            assert "all-gather" not in update.commit.lower(*inputs).compile().as_text()


# -- how state lies on devices --------------------------------------------------------------------------------------------


@st.composite
def _leaves(draw: st.DrawFn) -> tuple[int, int, Mapping[str, tuple[tuple[int, ...], Shard | None]]]:
    """Draw tp, dp, and leaves by name: whole shape, and how each lies on the shards."""
    tp, dp = draw(st.sampled_from([(1, 2), (2, 2), (2, 3), (4, 2), (1, 5)]))
    leaves: dict[str, tuple[tuple[int, ...], Shard | None]] = {}
    for n in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(1, 5), max_size=3))
        lies: Shard | None = draw(st.sampled_from([None, "partial", *range(len(shape))]))
        if isinstance(lies, int):
            shape[lies] *= tp
        leaves[f"leaf{n}"] = (tuple(shape), lies)
    return tp, dp, leaves


@settings(max_examples=12)
@given(_leaves(), st.sampled_from([0, 1 << 16]))
def test_chunks_are_the_leaves_in_pieces(
    sizes: tuple[int, int, Mapping[str, tuple[tuple[int, ...], Shard | None]]], small_bytes: int
) -> None:
    """Host and devices agree where each element goes, and whole leaves come back; a tied copy is in no bucket."""
    tp, dp, leaves = sizes
    where: dict[Path, Shard] = {(name,): lies for name, (_, lies) in leaves.items() if lies is not None}
    layer = Layer(
        "a", lambda key: {}, lambda p, x, c: x, tied={("leaf0",): ("elsewhere", ("w",))}, shards=lambda tp: where
    )
    count = iter(range(10**6))
    params = {
        "a": {
            name: np.array([next(count) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)
            for name, (shape, _) in leaves.items()
        }
    }
    layout = ParamLayout.build([layer], params, small_bytes, RankMesh(tp=tp))
    shards = StageShards(layout, pipeline_submeshes(1, RankMesh(dp=dp, tp=tp))[0] if dp * tp <= 8 else None, zero=True)  # type: ignore[arg-type]
    packed = [np.asarray(b) for b in layout.pack(params)]
    buckets = [shards.host_bucket(params, i) for i in shards.updated]
    for bucket, index in zip(buckets, shards.updated, strict=True):
        split = tp > 1 and layout.kinds[index] == "split"
        local = np.split(packed[index], tp) if split else [packed[index]]
        per_device = bucket.reshape(len(local), dp, -1)
        for buffer, rows in zip(local, per_device, strict=True):
            np.testing.assert_array_equal(shards.cut(buffer, index), rows)
            np.testing.assert_array_equal(shards.join(jnp.asarray(rows), index), buffer)
    placed = {
        i: jax.device_put(b, shards.bucket_aval(i).sharding) for i, b in zip(shards.updated, buckets, strict=True)
    }
    host_leaves = shards.host_leaves(placed)
    expected = {name: leaf for name, leaf in params["a"].items() if name != "leaf0"}
    jax.tree.map(np.testing.assert_array_equal, {slot.path[0]: leaf for slot, leaf in host_leaves.items()}, expected)
    columns = [shards.host_leaves(seen_in_column(placed, column, dp)) for column in range(dp)]
    for slot in host_leaves:
        fragments = [
            fragment for column in columns if isinstance(fragment := column[slot], Fragment) and fragment.ranges
        ]
        if not fragments:  # without elements
            continue
        pieces = tuple(Piece(part, fragment.ranges) for part, fragment in enumerate(fragments))
        leaf = Leaf("a", (), fragments[0].shape, "float32", None, fragments[0].split, pieces)
        assert leaf.problem == ""
        np.testing.assert_array_equal(leaf.assembled([x.values for x in fragments]), expected[slot.path[0]])


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_state_lies_as_predicted(dtype: str, zero1: bool) -> None:
    case = Case("gpt-tied", 2, 2, 2, sequence=True, dtype=dtype)
    step = TrainStep(pipeline(case), optimizer(), zero1=zero1)
    state = step.init(params_for(case), *_fresh(case))
    total_bytes = 0
    for s, predicted in step.states.items():
        at = step.pipeline.primary(s)
        for got, expected in ((state.master[at], predicted.master), (state.optimizer[s], predicted.optimizer)):
            assert jax.tree.map(_aval, got) == jax.tree.map(_aval, expected)
        moments = [leaf for leaf in jax.tree.leaves(state.optimizer[s]) if leaf.ndim]
        total_bytes += sum(leaf.nbytes for leaf in moments)
        if zero1:
            assert sum(device_bytes(leaf) for leaf in moments) <= sum(leaf.nbytes for leaf in moments) / 2
    assert total_bytes > 0
    params, optimizer_state = step.by_layer(state)
    jax.tree.map(np.testing.assert_array_equal, params, dict(params_for(case)))
    jax.tree.map(np.testing.assert_array_equal, optimizer_state, _fresh(case)[0])


def _fresh(case: Case) -> tuple[Mapping[str, Any]]:
    """Return optimizer state with distinct values, by layer, whole."""
    rng = np.random.default_rng(0)

    def filled(leaf: Any) -> np.ndarray:
        array: np.ndarray = rng.random(leaf.shape).astype(leaf.dtype)
        return array

    return ({name: jax.tree.map(filled, optimizer().init({name: tree})) for name, tree in params_for(case).items()},)


def _aval(a: Any) -> tuple[Any, ...]:
    return tuple(a.shape), np.dtype(a.dtype), a.sharding


# -- dividing the update changes no bit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_two_devices_with_and_without_zero_agree_in_every_bit(dtype: str, request: pytest.FixtureRequest) -> None:
    """Sums of two are the same in any order, and without clipping nothing else differs. A step that is not finite changes
    nothing either way."""
    case = Case("gpt-tied", 2, 1, 2, dtype=dtype, one_block=True)
    pipeline(case).warm_up()  # the stages are one program for both; the updates are two
    request.getfixturevalue("users_compiler")
    data = batches(3)
    data[1]["weights"][0, 0, 0] = np.nan
    ends = []
    for zero1 in (False, True):
        step = TrainStep(pipeline(case), optimizer(), zero1=zero1)
        state = step.init(params_for(case))
        applied = []
        for batch in data:
            state, metrics = step(state, batch)
            applied.append(bool(metrics.applied))
            assert all(not np.asarray(a).any() for buffers in state.acc.values() for a in buffers)
        assert applied == [True, False, True]
        ends.append(jax.device_get((step.by_layer(state), _computed(step, state))))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def _computed(step: TrainStep, state: TrainState) -> Any:
    return {str(at): [np.asarray(b, np.float32) for b in buffers] for at, buffers in state.compute.items()}


# -- in the pipeline or after it ------------------------------------------------------------------------------------------

FAMILIES = ["1f1b", "zb-1p", "interleaved-1f1b"]


@pytest.mark.parametrize("family", ["v-zb", *(pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES)])
def test_reducing_in_the_pipeline_changes_no_bit(family: str) -> None:
    """Reducing there takes the bytes that are predicted."""
    case = Case("gpt", 2, 1, 2, family, dtype="float32", zero1=family in ("v-zb", "1f1b"))
    within = TrainStep(pipeline(case), optimizer(), zero1=case.zero1, clip_norm=0.5)
    after = copy.copy(within)
    after.pipeline = within.pipeline.with_reductions({})
    ends = []
    for step in (within, after):
        state = step.init(params_for(case))
        for batch in batches(2):
            state, metrics = step(state, batch)
        ends.append(jax.device_get((step.by_layer(state), metrics.loss, metrics.grad_norm)))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert len(within.pipeline.reductions) == len(within.pipeline.stages)
    assert all("  Reduce R" in str(program) for program in within.pipeline.programs)
    measured = measured_peaks(within.pipeline, state.compute, batches(1)[0])
    made = {(r, s): (within.states[s].reduced_bytes, 0) for r, s in within.pipeline.reductions}
    predicted = within.pipeline.memory_report(workspace=False, curves=True, reductions=made)
    assert [x.live_bytes for x in predicted.ranks] == [x.live_bytes for x in measured.ranks]
    assert case.zero1 == any(n > 8 for n, _ in made.values())


# -- which optimizers may be divided --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.lamb(1e-3),
        optax.adafactor(1e-3, min_dim_size_to_factor=8),
        optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
        optax.noisy_sgd(0.1, key=0),
        optax.contrib.muon(1e-3),
    ],
    ids=["lamb", "adafactor", "clipped by block", "noise", "muon"],
)
def test_optimizers_that_look_across_elements_are_refused_in_one_line(
    sharded: Pipeline, tx: optax.GradientTransformation
) -> None:
    with pytest.raises(
        ConfigError, match=r"across a parameter's elements.*use one that treats elements alone"
    ) as caught:
        TrainStep(sharded, tx)
    assert "\n" not in str(caught.value)
