"""Instructions of one's own: ops that run functions of their own beside F, B and W."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.plot.cells import colour_of
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import (
    Action,
    Schedule,
    Slot,
    generate,
    ir,
    one_f_one_b,
    parse_schedule,
)
from jaxpipe.stage import instructions
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.reference import apply_model, init_params

README = Path(instructions.__file__).parent / "README.md"
EXAMPLE = README.read_text(encoding="utf-8").split("## An instruction of one's own")[1].split("```python\n")[1]
M, B = 4, 2


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch, x64: None) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(ir, "_REGISTRY", ir._REGISTRY.copy())
    monkeypatch.setattr(instructions, "_BUILDS", instructions._BUILDS.copy())
    return


@cache
def model() -> Model:
    """tanh(x w) three times, Σ y² at the end."""

    def dense(name: str, wide: int, out: int, reads: tuple[str, ...] = ()) -> Layer:
        def apply(p: Any, x: Any, c: Any) -> Any:
            return jnp.tanh((c.data["x"] if reads else x) @ p["w"])

        return Layer(name, lambda key: {"w": jax.random.normal(key, (wide, out))}, apply, reads)

    loss = Layer("loss", lambda key: {}, lambda p, x, c: (jnp.square(x).sum(), c.data["w"].sum()), ("w",))
    layers = (dense("a", 3, 4, ("x",)), dense("b", 4, 5), dense("c", 5, 3), loss)

    def spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"x": jax.ShapeDtypeStruct((size, 3), jnp.float64), "w": jax.ShapeDtypeStruct((size,), jnp.float32)}

    return Model("tiny", layers, spec, 1, 1)


@cache
def batch() -> Mapping[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(M, B, 3))
    return {"x": x, "w": np.ones((M, B), np.float32)}


@cache
def compiled(dp: int = 1) -> Pipeline:
    cut = [(0, 1), (1, 4)]
    return Pipeline.build(
        model(), one_f_one_b(2, M), microbatch_size=B, boundaries=cut, compute_dtype=jnp.float64, dp=dp
    )


def after(schedule: Schedule, put: Callable[[Action], Sequence[str]]) -> Schedule:
    """``schedule`` with ops behind each action: those that ``put`` names."""

    def more(slot: Slot) -> Iterator[Slot]:
        yield slot
        for action in slot.actions:
            yield from (replace(action, op=op) for op in put(action))

    return replace(schedule, rows=tuple(tuple(x for slot in row for x in more(slot)) for row in schedule.rows))


def run(pipe: Pipeline, record: bool = False) -> Any:
    params = pipe.place(init_params(model(), 0))
    return pipe.run(params, {at: pipe.zeros(at) for at in pipe.all_instances}, batch(), record=record)


def gradients() -> list[Mapping[str, Any]]:
    """Of the loss sum of each microbatch, by layer; no pipeline."""
    params = init_params(model(), 0)
    return [
        jax.grad(lambda p, i=i: apply_model(model(), p, {n: v[i] for n, v in batch().items()})[0])(params)
        for i in range(M)
    ]


def squared(tree: Any) -> float:
    return float(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(tree)))


def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op of the page is its own file; it simulates, runs, is timed, drawn and counted."""
    (tmp_path / "outside_noise.py").write_text(EXAMPLE.split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    import outside_noise  # type: ignore[import-not-found]

    try:
        each = gradients()
        total = jax.tree.map(lambda *g: sum(g), *each)
        for family, last in (("1f1b", "BW"), ("zb-h1", "W")):
            schedule = after(generate(family, 2, M), lambda a, last=last: ["Norm"] if a.op == last else [])
            assert parse_schedule(str(schedule)) == schedule
            pipe = compiled().with_schedule(schedule)
            out = run(pipe, record=True)
            for i, grads in enumerate(each):
                assert sum(float(out.user["mine"][s, i]) for s in (0, 1)) == pytest.approx(squared(grads), rel=1e-12)
            assert sum(float(out.user["sum"][s, M - 1]) for s in (0, 1)) == pytest.approx(squared(total), rel=1e-12)
            small, big = np.mean([squared(g) for g in each]), squared(total) / M**2
            want = (small - big) / (1 / B - 1 / (B * M)) / ((B * M * big - B * small) / (B * M - B))
            assert outside_noise.noise_scale(out.user, M, B) == pytest.approx(want, rel=1e-9)
            assert "seen" not in out.user
            norms = [e for e in pipe.measured_timeline(out).events if e.action.actions[0].op == "Norm"]
            assert len(norms) == 2 * M
            assert len([e for e in pipe.predicted_timeline().events if "Norm" in str(e.action)]) == 2 * M
            held = pipe.memory_report(workspace=False).ranks[0].peaks["user values"]
            assert held == 3 * 4 * 8 + 2 * M * 8  # a copy of the accumulators, two numbers a microbatch
            assert pipe.measure_costs(repeats=1).values("norm_s")[0] > 0
        assert colour_of("Norm", "compute", 0, 1) == "#7b5ea7"
    finally:
        del sys.modules["outside_noise"]
