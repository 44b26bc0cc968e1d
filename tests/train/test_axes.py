"""A new axis of a rank's devices is a row of a table: packing, reductions, norm, ZeRO-1 and checkpoints follow from it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.axes import AXES, BUFFER_AXES, CP, DATA, ONE_SHARD, TP, BufferAxes, RankMesh
from jaxpipe.errors import ConfigError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params, Path, Shard
from jaxpipe.stage.model.reference import init_params
from jaxpipe.tensor_parallel import own_time
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.step import TrainStep
from tests.support.paths import ROOT
from tests.test_size import parsed

D, F, T, M, SIZE = 6, 8, 4, 4, 4

XP = "xp"


@dataclass(frozen=True, kw_only=True)
class MeshWithXp(RankMesh):
    """The field that an axis needs."""

    xp: int = 1


@pytest.fixture
def xp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the rows that an axis needs: one of its own, one of each kind of buffer that lies along it."""
    monkeypatch.setitem(AXES, XP, "width")
    monkeypatch.setitem(BUFFER_AXES, "crossed", BufferAxes((XP,), DATA))
    monkeypatch.setitem(BUFFER_AXES, "both", BufferAxes((TP, XP), DATA))
    monkeypatch.setitem(BUFFER_AXES, "half", BufferAxes((), (*DATA, XP)))


def _mlp(name: str, kind: str, axes: tuple[str, ...]) -> Layer:
    """Divide hidden units over ``axes``, a vector of them too; of the gradient of ``gain`` each shard makes a part."""

    def init(key: jax.Array) -> Params:
        up, down = (
            0.5 * jax.random.normal(k, shape) for k, shape in zip(jax.random.split(key), ((D, F), (F, D)), strict=True)
        )
        return {"up": up, "down": down, "middle": jnp.ones(F), "gain": jnp.ones(D), "bias": jnp.zeros(D)}

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        def summed(part: Any, axes: tuple[str, ...]) -> Any:
            several = tuple(axis for axis in axes if c.tp.sizes.get(axis, 1) > 1)
            return jax.lax.psum(part, several) if several else part

        gained = summed(x * p["gain"][None, None] / c.tp.sizes.get(XP, 1), (XP,))
        return (
            gained + p["bias"][None, None] + summed((jnp.tanh(x @ p["up"]) * p["middle"][None, None]) @ p["down"], axes)
        )

    def shards(tp: RankMesh) -> Mapping[Path, Shard]:
        return {("up",): (kind, 1), ("down",): (kind, 0), ("middle",): (kind, 0), ("gain",): ("half", None)}

    return Layer(name, init, apply, shards=shards)


def _loss() -> Layer:
    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        return jnp.sum(jnp.square(x - c.data["y"])), jnp.float32(x.size).astype(x.dtype)

    return Layer("loss", lambda key: {}, apply, reads=("y",), shards=lambda tp: {})


def _enter() -> Layer:
    return Layer("enter", lambda key: {}, lambda p, x, c: c.data["x"], reads=("x",), shards=lambda tp: {})


def _model() -> Model:
    layers = (_enter(), _mlp("a", "crossed", (XP,)), _mlp("b", "both", (TP, XP)), _loss())
    return Model(
        "toy",
        layers,
        lambda size: {name: jax.ShapeDtypeStruct((size, T, D), jnp.float64) for name in "xy"},
        1,
        T,
        over_time=("x", "y"),
    )


def _step(
    mesh: RankMesh, *, zero1: bool = False, model: Model | None = None, clip: float = 0.5, optimizer: Any = None
) -> TrainStep:
    pipe = Pipeline.build(
        model or _model(),
        generate("zb-h1", ranks=2, microbatches=M),
        microbatch_size=SIZE,
        boundaries=[(0, 2), (2, 4)],
        tp=mesh,
        compute_dtype=jnp.float64,
    )
    return TrainStep(pipe, optimizer or optax.adamw(0.1), clip_norm=clip, zero1=zero1)


def _trained(step: TrainStep, leaves: tuple[Any, ...] | None = None) -> tuple[Any, list[tuple[float, float]]]:
    """Return whole leaves as checkpoints hold them, and loss and norm, after two steps from ``leaves``."""
    rng, reports = np.random.default_rng(0), []
    state = step.init(*(leaves or [init_params(step.pipeline.model, 0)]))
    for _ in range(2):
        state, metrics = step(
            state,
            {name: rng.normal(size=(M, *aval.shape)) for name, aval in step.pipeline.model.batch_spec(SIZE).items()},
        )
        reports.append((float(metrics.loss), float(metrics.grad_norm)))
    return jax.device_get(step.by_layer(state)), reports


@pytest.mark.parametrize(
    ("sizes", "zero1"),
    [
        ({"dp": 2, "xp": 2}, True),
        ({"tp": 2, "xp": 2}, False),
        pytest.param({"cp": 2, "xp": 2}, True, marks=pytest.mark.soak),
    ],
)
def test_an_axis_of_the_table_divides_a_model(sizes: dict[str, int], zero1: bool, xp: None, x64: None) -> None:
    step, undivided = _step(MeshWithXp(**sizes), zero1=zero1), _step(ONE_SHARD)
    assert {"crossed", "both", "half"} <= {kind for stage in step.pipeline.stages for kind in stage.layout.kinds}
    shapes = {str(slot): slot.shape for stage in step.pipeline.stages for slot in stage.layout.slots}
    assert (shapes["a/up"], shapes["b/down"]) == ((D, F // 2), (F // 2 // sizes.get(TP, 1), D))
    leaves, reports = _trained(step)
    expected_leaves, expected_reports = _trained(undivided)
    np.testing.assert_allclose(reports, expected_reports, rtol=1e-10)  # the norm is of the whole gradient, and clips
    _assert_close(leaves, expected_leaves)
    _assert_close(_trained(undivided, leaves), _trained(step, leaves))


E = 4


def _experts(name: str) -> Layer:
    """Send position t to expert t mod E, wherever that lies, and back; ``scale`` acts on each position once."""

    def init(key: jax.Array) -> Params:
        return {"weight": 0.5 * jax.random.normal(key, (E, D, D)), "scale": jnp.ones(D)}

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        axes = c.tp.divided_axes("experts")
        rows, times, _ = x.shape
        tokens = x.reshape(rows * times // E, E, D).swapaxes(0, 1)
        if axes:
            tokens = jax.lax.all_to_all(tokens, axes, 0, 1, tiled=True)
        done = jnp.tanh(jnp.einsum("end,edf->enf", tokens, p["weight"]))
        if axes:
            done = jax.lax.all_to_all(done, axes, 1, 0, tiled=True)
        return x * p["scale"][None, None] + done.swapaxes(0, 1).reshape(x.shape)

    def shards(mesh: RankMesh) -> Mapping[Path, Shard]:
        return {("weight",): ("experts", 0)} | ({("scale",): "partial"} if mesh.splits_time else {})

    return Layer(name, init, apply, shards=shards)


def _mixture() -> Model:
    """Divide positions along tp too, as sequence parallelism does between layers."""

    def enter(p: Params, x: Any, c: LayerContext) -> Any:
        return own_time(c.data["x"], c.tp, axis=1) if c.tp.splits_time else c.data["x"]

    def loss(p: Params, x: Any, c: LayerContext) -> Any:
        y = own_time(c.data["y"], c.tp, axis=1) if c.tp.splits_time else c.data["y"]
        part = jnp.sum(jnp.square(x - y))
        return jax.lax.psum(part, TP) if c.tp.splits_time else part, jnp.asarray(c.data["y"].size, x.dtype)

    layers = (
        Layer("enter", lambda key: {}, enter, reads=("x",), shards=lambda mesh: {}),
        _experts("a"),
        _experts("b"),
        Layer("loss", lambda key: {}, loss, reads=("y",), shards=lambda mesh: {}),
    )

    def batch(size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct((size, 4 * E, D), jnp.float64) for name in "xy"}

    return Model("mixture", layers, batch, 1, 4 * E, over_time=("x", "y"))


@pytest.mark.parametrize(
    ("sizes", "zero1"),
    [
        ({"dp": 4, "ep": 2}, True),
        ({"dp": 2, "ep": 2, "tp": 2, "sequence": True}, False),
        pytest.param({"dp": 4, "ep": 4}, False, marks=pytest.mark.soak),
        pytest.param({"dp": 4, "ep": 4}, True, marks=pytest.mark.soak),
        pytest.param({"dp": 2, "ep": 2, "tp": 2, "sequence": True}, True, marks=pytest.mark.soak),
        pytest.param({"dp": 2, "ep": 2, "cp": 2}, True, marks=pytest.mark.soak),
    ],
)
def test_experts_lie_on_devices_that_share_rows(sizes: dict[str, Any], zero1: bool, x64: None) -> None:
    """Experts are divided over ep (and tp), all else is as without: what is trained, its norm, and what checkpoints hold.

    Where only ep differs, all but the experts' own gradients are the same numbers: rows and their sums do not move.
    """
    step, plain = _step(RankMesh(**sizes), zero1=zero1, model=_mixture()), _step(ONE_SHARD, model=_mixture())
    shapes = {str(slot): slot.shape for stage in step.pipeline.stages for slot in stage.layout.slots}
    assert shapes["a/weight"] == (E // sizes["ep"] // sizes.get("tp", 1), D, D)
    leaves, reports = _trained(step)
    expected_leaves, expected_reports = _trained(plain)
    np.testing.assert_allclose(reports, expected_reports, rtol=1e-12)
    _assert_close(leaves, expected_leaves)
    _assert_close(_trained(plain, leaves), _trained(step, leaves))


def test_rows_and_their_sums_do_not_move_with_experts(x64: None) -> None:
    gradients = {}
    for ep in (1, 4):
        step = _step(RankMesh(dp=4, ep=ep), model=_mixture(), clip=0.0, optimizer=optax.sgd(1.0))
        (params, *_), reports = _trained(step)
        gradients[ep] = params, [loss for loss, _ in reports]
    (one, one_losses), (four, four_losses) = gradients.values()
    assert one_losses[0] == four_losses[0]
    np.testing.assert_array_equal(one["a"]["scale"], four["a"]["scale"])


def test_devices_for_experts_need_experts(xp: None, x64: None) -> None:
    with pytest.raises(ConfigError, match=r"dp 2 \(ep 2\): no layer of toy is divided along ep; use ep 1"):
        _step(RankMesh(dp=2, ep=2))


@pytest.mark.parametrize(("dp", "ep", "use"), [(4, 3, "2 or 4"), (6, 4, "2 or 3"), (1, 2, "1")])
def test_ep_divides_dp(dp: int, ep: int, use: str) -> None:
    with pytest.raises(ConfigError, match=rf"ep={ep} does not divide dp={dp}: use {use}"):
        RankMesh(dp=dp, ep=ep)
    with pytest.raises(ConfigError, match=rf"pipeline.ep={ep} does not divide pipeline.dp={dp}: use {use}"):
        TrainConfig().override([f"pipeline.dp={dp}", f"pipeline.ep={ep}", f"run.batch={8 * dp}"])


def test_few_files_name_an_axis() -> None:
    """Sizes, specs, sums and texts follow from the table: where there was none, 27 files of ours named ``cp``."""
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jaxpipe").rglob("*.py")
        if _names_cp(path.read_text(encoding="utf-8"))
    }
    ours = {
        path for path in files if not path.startswith(("jaxpipe/search/", "jaxpipe/models/"))
    }  # there cp is a solver
    assert {"jaxpipe/axes.py", "jaxpipe/context_parallel.py", "jaxpipe/train/trainer.py"} <= ours
    assert len(ours) <= 10, sorted(ours)


def _names_cp(source: str) -> bool:
    """Return whether code reads, takes or passes ``cp``, its name or its setting."""
    if CP not in source.lower():
        return False
    fields = ("id", "attr", "arg", "name", "value")
    named = {getattr(node, field, None) for node in ast.walk(parsed(source)) for field in fields}
    return not named.isdisjoint({CP, "CP", f"pipeline.{CP}"})


def _assert_close(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), one, other)
