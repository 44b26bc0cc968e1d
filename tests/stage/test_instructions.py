"""Instructions of one's own: ops that run functions of their own beside F, B and W."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe import Trainer
from jaxpipe.errors import JaxpipeError, ProgramError, ScheduleError, StageError
from jaxpipe.plot.figure import colour_of
from jaxpipe.program.ir import Send
from jaxpipe.program.lower import lower
from jaxpipe.program.order import Crossing
from jaxpipe.runtime.memory_probe import probe_step
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import (
    Action,
    OpSpec,
    Schedule,
    Slot,
    Wait,
    check_schedule,
    generate,
    ir,
    one_f_one_b,
    parse_schedule,
    register_op,
)
from jaxpipe.schedule.passes import insert
from jaxpipe.stage import instructions
from jaxpipe.stage.functions import StageFunction, StageFunctions
from jaxpipe.stage.instructions import From, register_instruction, stage_function
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.train.step import TrainStep
from tests.support.pipelines import assert_same_arrays

EXAMPLE = (Path(instructions.__file__).parent / "GUIDE.md").read_text(encoding="utf-8").split("```python\n")[1]
M, B = 4, 2


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch, x64: None) -> Iterator[None]:
    """Remove what the test registers after it."""
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


def after(schedule: Schedule, ops_behind: Callable[[Action], Sequence[str]]) -> Schedule:
    """Return ``schedule`` with ops behind each action: those that ``ops_behind`` names."""

    def with_instruction(slot: Slot) -> Iterator[Slot]:
        yield slot
        for action in slot.actions:
            yield from (replace(action, op=op) for op in ops_behind(action))

    return replace(
        schedule, rows=tuple(tuple(x for slot in row for x in with_instruction(slot)) for row in schedule.rows)
    )


def run(pipe: Pipeline, record: bool = False) -> Any:
    params = pipe.place(init_params(model(), 0))
    return pipe.run(params, {at: pipe.zeros(at) for at in pipe.own_instances}, batch(), record=record)


def gradients() -> list[Mapping[str, Any]]:
    """Return the gradients of each microbatch's loss sum, by layer, without a pipeline."""
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
            schedule = insert(generate(family, 2, M), "Norm", after=last, stages=(0, 1))
            assert parse_schedule(str(schedule)) == schedule
            pipe = compiled().with_schedule(schedule)
            out = run(pipe, record=True)
            for i, grads in enumerate(each):
                assert sum(float(out.user["mine"][s, i]) for s in (0, 1)) == pytest.approx(squared(grads), rel=1e-12)
            assert sum(float(out.user["sum"][s, M - 1]) for s in (0, 1)) == pytest.approx(squared(total), rel=1e-12)
            small, big = np.mean([squared(g) for g in each]), squared(total) / M**2
            expected = (small - big) / (1 / B - 1 / (B * M)) / ((B * M * big - B * small) / (B * M - B))
            assert outside_noise.noise_scale(out.user, M, B) == pytest.approx(expected, rel=1e-9)
            assert "seen" not in out.user
            norms = [e for e in pipe.measured_timeline(out).events if e.action.actions[0].op == "Norm"]
            assert len(norms) == 2 * M
            assert len([e for e in pipe.predicted_timeline().events if "Norm" in str(e.action)]) == 2 * M
            value_bytes = pipe.memory_report(workspace=False).ranks[0].peaks["user values"]
            assert value_bytes == 3 * 4 * 8 + 2 * M * 8  # a copy of the accumulators, two numbers a microbatch
            assert pipe.measure_costs(repeats=1).values("norm_s")[0] > 0
        assert colour_of("Norm", "compute", 0, 1) == "#7b5ea7"
    finally:
        del sys.modules["outside_noise"]


def test_the_example_of_the_readme() -> None:
    """Run the README's block with a trainer, its state and a batch: each number is that of the microbatch on one device."""
    readme = (Path(instructions.__file__).parent / "README.md").read_text(encoding="utf-8")
    trainer = Trainer(
        model(), optimizer=optax.sgd(0.1), ranks=2, microbatches=M, microbatch_size=B, cut=["b"], dtype="float64"
    )
    full_batch = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch().items()}
    scope: dict[str, Any] = {"trainer": trainer, "state": trainer.init(init_params(model(), 0)), "batch": full_batch}
    exec(compile(readme.split("```python\n")[1].split("```")[0], "README.md", "exec"), scope)
    w = np.asarray(init_params(model(), 0)["a"]["w"])
    assert {*scope["sizes"]} == {(0, i) for i in range(M)}
    for i in range(M):
        expected = np.sqrt((np.tanh(batch()["x"][i] @ w) ** 2).mean())
        assert float(scope["sizes"][0, i]) == pytest.approx(expected, rel=1e-12)


def op(name: str, *waits: str, cost: str = "w_s", where: str = "self") -> None:
    register_op(OpSpec(name, "compute", (Wait(waits, where),), cost))  # type: ignore[arg-type]


H = jax.ShapeDtypeStruct((B, 4), jnp.float64)


def exchange(reads: Any = ("x",)) -> Schedule:
    """Tell of stage 0 writes h = 2 y, Encounter of stage 1, on another rank, reads it and writes Σ (h − 2 x)² and Σ h²."""
    op("Tell", "F")
    op("Encounter", "Tell", where="pred")
    register_instruction(
        "Tell", lambda s, mesh: stage_function("Tell", s, mesh, lambda y: 2 * y[0], reads=("y",), writes=("h",))
    )

    def meet(h: Any, x: Any) -> Any:
        return jnp.square(h - 2 * x[0]).sum(), jnp.square(h).sum()

    register_instruction(
        "Encounter",
        lambda s, mesh: stage_function(
            "Encounter", s, mesh, meet, reads=(From("h", 0, H), *reads), writes=("gap", "size")
        ),
    )
    return after(one_f_one_b(2, M), lambda a: {("F", 0): ["Tell"], ("F", 1): ["Encounter"]}.get((a.op, a.stage), []))


def test_values_travel_between_ranks_and_are_dropped_when_read() -> None:
    schedule = exchange()
    check_schedule(schedule)
    pipe = compiled().with_schedule(schedule)
    out = run(pipe)
    assert {name: set(values) for name, values in out.user.items()} == {
        name: {(1, i) for i in range(M)} for name in ("gap", "size")
    }
    w = np.asarray(init_params(model(), 0)["a"]["w"])
    for i in range(M):
        assert float(out.user["gap"][1, i]) == 0
        expected = (4 * np.tanh(batch()["x"][i] @ w) ** 2).sum()
        assert float(out.user["size"][1, i]) == pytest.approx(expected, rel=1e-12)
    assert out.losses[0][0] == run(compiled()).losses[0][0]


def test_values_travel_between_processes() -> None:
    pipe = compiled().with_schedule(exchange())
    crossing = Crossing((0, 1), pipe.predicted_timeline())
    programs = lower(pipe.schedule, pipe.stages, crossing=crossing)
    assert sum(isinstance(i, Send) and i.action.op == "Tell" and i.place >= 0 for i in programs[0].instructions) == M
    assert_same_arrays(dict(run(replace(pipe, programs=programs, local_programs=programs)).user), dict(run(pipe).user))


def test_predicted_bytes_are_those_of_the_run() -> None:
    """Bytes of state and of values that are read, sent and returned agree at every instruction."""
    schedule = exchange()
    op("Keep", "BW")
    register_instruction(
        "Keep",
        lambda s, mesh: stage_function(
            "Keep", s, mesh, lambda acc, old: (acc, acc[0].sum()), reads=("acc", "old"), writes=("old", "first"),
            state={"old": s.acc_avals},
        ),
    )  # fmt: skip
    pipe = compiled().with_schedule(after(schedule, lambda a: ["Keep"] if a.op == "BW" else []))
    params = pipe.place(init_params(model(), 0))
    inputs = pipe.step_inputs(params, {at: pipe.zeros(at) for at in pipe.own_instances}, batch())
    devices = [list(mesh.devices.flat) for mesh in pipe.submeshes]
    measured = probe_step(pipe.executor, inputs, devices).ranks
    for rank, predicted in zip(measured, pipe.memory_report(workspace=False, curves=True).ranks, strict=True):
        assert rank.live_bytes == predicted.live_bytes


def test_an_instruction_may_add_to_the_gradients() -> None:
    """Weight decay, a half of it with each microbatch: Σ over them of 0.25 θ; in training, behind the reduction of nothing."""
    op("Decay", "BW")

    def decay(acc: Any, param: Any) -> Any:
        return [a + 0.25 * p.reshape(a.shape) for a, p in zip(acc, param, strict=True)]

    register_instruction(
        "Decay", lambda s, m: stage_function("Decay", s, m, decay, reads=("acc", "param"), writes=("acc",))
    )
    pipe = compiled().with_schedule(after(one_f_one_b(2, M), lambda a: ["Decay"] if a.op == "BW" else []))
    params = init_params(model(), 0)
    _, grads = pipe.loss_and_grads(pipe.place(params), batch())
    _, plain = compiled().loss_and_grads(compiled().place(params), batch())
    for name in "abc":
        expected = plain[name]["w"] + M * 0.25 * np.asarray(params[name]["w"]) / (M * B)
        np.testing.assert_allclose(grads[name]["w"], expected, rtol=1e-12)


@pytest.mark.parametrize("dp", [1, 2])
def test_values_come_back_from_training(dp: int) -> None:
    """Instructions that read accumulators after the last backward run before these are reduced and donated."""
    op("Norm", "BW", cost="norm_s")
    register_instruction(
        "Norm",
        lambda s, m: stage_function(
            "Norm", s, m, lambda acc: sum(a.sum() for a in acc), reads=("acc",), writes=("sum",)
        ),
    )
    pipe = compiled(dp).with_schedule(after(one_f_one_b(2, M), lambda a: ["Norm"] if a.op == "BW" else []))
    step = TrainStep(pipe, optax.sgd(0.1))
    state = step.init(init_params(model(), 0))
    total = jax.tree.map(lambda *g: sum(g), *gradients())
    for _ in range(2):
        state, metrics = step(state, batch())
        sums = metrics.outputs.user["sum"]
        if state.step == 1:
            assert float(sums[0, M - 1]) == pytest.approx(float(total["a"]["w"].sum()), rel=1e-12)
    assert set(sums) == {(s, i) for s in (0, 1) for i in range(M)}


def plain(call: Callable[..., Any], name: str = "Mine", **options: Any) -> None:
    op(name, "F")
    register_instruction(name, lambda s, m: stage_function(name, s, m, call, **options))


def no_function() -> None:
    op("Mine", "F")


def not_a_function() -> None:
    op("Mine", "F")
    register_instruction("Mine", lambda s, m: 3)  # type: ignore[arg-type,return-value]


def fails() -> None:
    op("Mine", "F")
    register_instruction("Mine", lambda s, m: 1 / 0)  # type: ignore[arg-type,return-value]


def two_writers() -> None:
    plain(lambda x: x[0], reads=("param",), writes=("h",))
    plain(lambda x: x[0], "Yours", reads=("param",), writes=("h",))


def early() -> None:
    plain(lambda dy: dy[0].sum(), reads=("dx",), writes=("h",))


def other_shape() -> None:
    op("Mine", "F")

    def build(s: StageFunctions, m: Any) -> StageFunction:
        if s.stage == 0:
            return stage_function("Mine", s, m, lambda y: y[0].sum(), reads=("y",), writes=("h",))
        return stage_function("Mine", s, m, lambda h: h, reads=(From("h", 0, H),), writes=("g",))

    register_instruction("Mine", build)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (no_function, "stage 0 has no function for op 'Mine' (it has B BW F W); register_instruction('Mine', build) gives it"),
        (not_a_function, "instruction 'Mine' of stage 0: build returned a int; want what stage_function('Mine', …) makes"),
        (fails, "instruction 'Mine' of stage 0: building it failed: division by zero"),
        (two_writers, "h0.0[0] has two writers: Mine0.0 and Yours0.0; give them names of their own"),
        (early, "instruction 'Mine' of stage 0 reads 'dx', which the stage has not"),
        (other_shape, "Mine1.0 reads h0.0[0] as float64[2, 4]; Mine0.0 writes float64[]"),
        (lambda: plain(lambda x: x, reads=("nrm",), writes=("h",)), "'Mine' of stage 0 reads 'nrm', which the stage has not"),
        (lambda: plain(lambda x: x, reads=("param",), writes=("y",)), "writes 'y'; an instruction writes values that it names"),
        (lambda: plain(lambda x: x, reads=("param",), writes=("acc",)), "writes 'acc' without reading it"),
        (lambda: plain(lambda x: x[:0], reads=("acc",), writes=("acc",)), "returns 0 arrays for 'acc'; want 1"),
        (lambda: plain(lambda a: [x[0] for x in a], reads=("acc",), writes=("acc",)), "writes acc0 as float64[] where"),
        (lambda: plain(lambda a: (a, a), reads=("acc",), writes=("u", "v", "w")), "returns 2 results for 3: u, v, w"),
        (lambda: plain(lambda a, b: a, reads=("acc", "acc"), writes=("u",)), "reads the same thing twice"),
        (lambda: plain(lambda h: h, reads=(From("h", 1, H),), writes=("u",)), "Mine0.0: reads h1.0[0], which is not there"),
    ],
)  # fmt: skip
def test_what_can_not_run_is_one_line(make: Callable[[], None], words: str) -> None:
    make()
    names = [name for name in ("Mine", "Yours") if ir.is_op(name)]
    schedule = after(one_f_one_b(2, M), lambda a: names if a.op == "F" else [])
    with pytest.raises(JaxpipeError, match=re.escape(words)) as caught:
        compiled().with_schedule(schedule)
    assert "\n" not in str(caught.value)


def test_a_second_meaning_of_an_instruction_is_refused() -> None:
    build = register_instruction("Mine", lambda s, m: 3)  # type: ignore[arg-type,return-value]
    assert register_instruction("Mine", build) is build
    with pytest.raises(StageError, match="'Mine' is already registered"):
        register_instruction("Mine", lambda s, m: 4)  # type: ignore[arg-type,return-value]
    with pytest.raises(ScheduleError, match=r"'Mine'.*'Mine0\.0'"):
        parse_schedule(str(one_f_one_b(2, 1)).replace("F0.0", "F0.0 Mine0.0"))


def test_ranks_that_wait_for_each_other_by_values_alone_are_refused() -> None:
    """The ops do not say that they wait: each reads what the other rank writes after it has read."""
    op("Mine", "F")

    def build(s: StageFunctions, m: Any) -> StageFunction:
        read = From("h", 1 - s.stage, jax.ShapeDtypeStruct((), jnp.float64))
        return stage_function("Mine", s, m, lambda h: h, reads=(read,), writes=("h",))

    register_instruction("Mine", build)
    schedule = after(one_f_one_b(2, 1), lambda a: ["Mine"] if a.op == "F" else [])
    with pytest.raises(ProgramError, match=r"Mine\d\.0"):
        _ = compiled().with_schedule(schedule).order
