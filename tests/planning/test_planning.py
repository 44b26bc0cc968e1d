"""`jaxpipe plan`: targets, roofline, bytes of stages, predictions against the runtime's accounting and the papers, the verb.

Truth: closed forms for kernels and layers, the program-level account of memory (which other tests compare with live
buffers), the papers' tables. Compiling for a GPU without one is tested where the CUDA wheels are installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe._jax_compat import compile_only_devices
from jaxpipe.cli import main
from jaxpipe.cost.memory import Kind, RankMemory
from jaxpipe.cost.profile import Exchange, StageSizes
from jaxpipe.errors import ConfigError
from jaxpipe.planning.predict import Prediction, exchange_s, link_of, predict
from jaxpipe.planning.report import assumptions, prediction_text
from jaxpipe.planning.roofline import Efficiency, Work, work_of
from jaxpipe.planning.space import suggest
from jaxpipe.planning.stages import Compiler, PlannedStage, StageCosts, planner, stage_costs_of
from jaxpipe.planning.targets import TARGETS, Target, device_text, find_target, target_json
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Braid, CostProfile, generate, read_costs, read_schedule, simulate, write_schedule
from jaxpipe.schedule.passes import unbraid, with_reductions
from jaxpipe.stage.functions import total_device_bytes
from jaxpipe.stage.weave.units import collectives
from jaxpipe.text import mfu_text
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.settings.sections import PipelineConfig, ShardingConfig
from jaxpipe.train.setup import step_flops
from scripts import plan_experts
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_build")

PLANS = ROOT / "scripts" / "plans"
H100 = TARGETS["h100"]
FULL = Efficiency(matmul=1.0, bandwidth=1.0, link=1.0, host=1.0, memory=1.0, kernel_s=0.0)

ACTIVATION_GB = {
    "gpt-9.6b": {"1f1b": 46, "v-half": 28, "v-min": 19, "v-zb": 48},
    "gpt-21b": {"1f1b": 42, "v-half": 24, "v-min": 17, "v-zb": 43},
    "gpt-38.5b": {"1f1b": 35, "v-half": 19, "v-min": 14, "v-zb": 36},
}
"""`controllable-memory.txt` table 4."""


def silent(text: str) -> None:
    """Progress that nobody reads."""


def small(**pipeline: Any) -> TrainConfig:
    """Return a GPT of four blocks on two ranks."""
    options = {"vocab_size": 64, "d_model": 32, "num_layers": 4, "num_heads": 4, "tied": False}
    return TrainConfig.from_dict(
        {
            "model": {"target": "models.gpt:GPT", "options": options},
            "data": {"path": "none.npy", "tokenizer": "ids:64", "seq_len": 16},
            "pipeline": {"ranks": 2, "microbatches": 4, **pipeline},
            "run": {"batch": 8},
        }
    )


def stage_costs_for(config: TrainConfig, target: Target = H100, **options: Any) -> StageCosts:
    """Return the same stage costs for all configs that differ in nothing they use; with ``options`` new ones."""
    if options:
        return stage_costs_of(config, target, Efficiency(), silent, **options)
    sequence = config.pipeline.sharding.sequence_parallel
    tp, ep = config.pipeline.tp, config.pipeline.ep
    pipe = PipelineConfig(tp=tp, dp=ep, ep=ep, sharding=ShardingConfig(sequence_parallel=sequence))
    return _shared_stage_costs(replace(config, pipeline=pipe).to_json(), target.name)


@cache
def _shared_stage_costs(config: str, target: str) -> StageCosts:
    return stage_costs_of(TrainConfig.from_dict(json.loads(config)), TARGETS[target], Efficiency(), silent)


def prediction_of(
    config: TrainConfig, stage_costs: StageCosts | None = None, limit: float = 80e9, **options: Any
) -> Prediction:
    stage_costs = stage_costs if stage_costs is not None else stage_costs_for(config)
    return predict(config, stage_costs, limit, **options)


STATIC: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")


def static_bytes(memory: RankMemory) -> int:
    return sum(memory.by_kind[kind] for kind in STATIC)


def persistent_bytes(stage: PlannedStage) -> int:
    return stage.functions.param_bytes + total_device_bytes(stage.functions.acc_avals) + sum(stage.state_bytes.values())


# -- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_survives_its_json_form(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(target_json(TARGETS[name])))
    assert find_target(str(file)) == TARGETS[name]


def test_a_file_may_change_a_known_target(tmp_path: Path) -> None:
    file = tmp_path / "fat.json"
    file.write_text(json.dumps({"base": "h100", "memory_bytes": 2e11}))
    assert find_target(str(file)) == replace(H100, name="fat", description="fat", memory_bytes=2e11)


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown target 'h10'; did you mean 'h100'\?; known: a100, .*b200, cpu, or"):
        find_target("h10")


def test_every_mistake_of_a_target_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    bad = {
        "memory_bytes": -1,
        "node_size": 2.5,
        "host_duplex": 1,
        "speed": 3,
        "flops_per_s": {"bfloat16": 1},
        "chip": {},
    }
    file.write_text(json.dumps(bad))
    with pytest.raises(ConfigError) as caught:
        find_target(str(file))
    for key in (*bad, "memory_bytes_per_s", "d2h_bytes_per_s"):
        assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[" * 100_000, "nested more than 32 levels deep"),
        ('{"base": "h100", "memory_bytes": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"base": "h100", "memory_bytes": 1' + "0" * 400 + "}", "memory_bytes is Infinity, which is not finite"),
        ('{"base": "h100", "base": "h200"}', "key 'base' is given twice"),
        (json.dumps({"base": "h100", "chip": {**target_json(H100)["chip"], "capability": 9}}), "chip.capability is 9"),
        (json.dumps({"base": "h100", "chip": {**target_json(H100)["chip"], "cores": 1.5}}), "chip.cores is 1.5"),
    ],
)
def test_odd_target_files_are_one_line(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        find_target(str(file))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("pipeline.ranks=4096", "4096 stages of 7 layers; every stage needs a layer, so use 1 to 7 stages"),
        ("model.options.num_layers=10000", "GPT: num_layers is 10000; want at most 4096"),
    ],
)
def test_absurd_sizes_are_refused_before_any_work(
    settings: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--compile-seconds", "0", settings]) == 2
    assert capsys.readouterr().err.endswith(f"jaxpipe: {expected}\n")


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not valid JSON"), ("[]", "expected an object with keys"), (None, "no such target file")]
)
def test_a_target_file_that_can_not_be_read(text: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        find_target(str(file))


def test_the_description_of_an_h100_is_the_measured_one() -> None:
    text = device_text(H100)
    for line in (
        "core_count: 132", "memory_bandwidth: 3352320000000", "device_memory_size: 84942979072", "clock_rate_ghz: 1.98",
        "shared_memory_per_block_optin: 232448", "l2_cache_size: 52428800", 'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):  # fmt: skip
        assert line in text


# -- roofline ---------------------------------------------------------------------------------------------------------


def work(f: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Work:
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return work_of(jax.make_jaxpr(f)(*arrays), H100, FULL)


def test_plans_for_gpus_have_the_attention_that_runs_there() -> None:
    """Without cuDNN here. What it multiplies is 16 bits wide, whatever its statistics are."""
    config = small(recompute="flash").override(["run.dtype=bfloat16"])
    p = prediction_of(config)
    assert p.fused_attention and not p.remarks and "cuDNN" in assumptions(p, Efficiency(), "")[1]
    masked = 16 * 16 - 16 * 17 // 2
    assert p.peers_flops - p.model_flops == 3 * 8 * 4 * (2 * 2 * 32 * masked), "8 sequences, 4 blocks, 2 products"
    text = "MFU 40.0% (48.0% with attention counted whole, as Megatron-LM and torchtitan do)"
    assert mfu_text(0.4, 0.4 * 1.2) == text and mfu_text(0.4, 0.4) == "MFU 40.0%"
    assert not stage_costs_for(config, TARGETS["cpu"]).stages(((0, 2), (2, 7)), "none", 1)[0].fuses_attention
    back = stage_costs_for(config.override(["data.seq_len=16384"])).stages(((0, 2), (2, 7)), "none", 1)[0].work["B"]
    assert back.seconds - 3e-6 * back.kernels < 2.5 * back.flops / 989.4e12


@pytest.mark.parametrize("hidden", [4096, 8192])
def test_a_block_takes_what_an_h200_took_in_a_step(hidden: int) -> None:
    """F + B + W of rank 1, which waits for nothing: 16 of each in the measured step without offload. W then added the gradients
    of two of the four matrices, 4 · hidden² elements, by kernels that read and wrote 10 bytes an element."""
    options = {"vocab_size": 512, "d_model": hidden, "num_layers": 2, "num_heads": hidden // 128, "tied": False}
    config = TrainConfig.from_dict(
        {
            "model": {"target": "models.gpt:GPT", "options": options},
            "data": {"path": "none.npy", "tokenizer": "ids:512", "seq_len": 4096},
            "pipeline": {"ranks": 1, "microbatches": 8, "recompute": "flash"},
            "run": {"batch": 8, "dtype": "bfloat16"},
        }
    )
    measured = json.loads((ROOT / "scripts" / "results" / "gpu-h200.json").read_text(encoding="utf-8"))
    (size,) = (size for size in measured["sizes"] if size["hidden"] == hidden)
    (step_s,) = (step["step"]["median_s"] for step in size["steps"] if step["schedule"] == "po")
    adds_s = 10 * 4 * hidden**2 / (TARGETS["h200"].memory_bytes_per_s * Efficiency().bandwidth)
    block = stage_costs_for(config, TARGETS["h200"]).stages(((0, 1), (1, 2), (2, 5)), "flash", 1)[1]
    assert sum(block.work[op].seconds for op in "FBW") == pytest.approx(step_s / 16 - adds_s, rel=0.02)


def test_a_large_product_takes_its_operations_over_the_peak() -> None:
    n = 4096
    w = work(lambda a, b: a @ b, (n, n), (n, n))
    assert w.flops == 2 * n**3
    assert w.moved_bytes == 3 * n * n * 2
    assert w.seconds == pytest.approx(2 * n**3 / 989.4e12)


def test_a_thin_product_takes_its_bytes_over_the_bandwidth() -> None:
    w = work(lambda a, b: a @ b, (4096, 4096), (4096, 1))
    assert w.seconds == pytest.approx((4096 * 4096 + 2 * 4096) * 2 / 3352.32e9)


@pytest.mark.parametrize(("dtype", "rate"), [(jnp.bfloat16, 989.4e12), (jnp.float32, 494.7e12)])
def test_the_dtype_of_the_operands_chooses_the_peak(dtype: Any, rate: float) -> None:
    n = 8192
    assert work(lambda a, b: a @ b, (n, n), (n, n), dtype=dtype).seconds == pytest.approx(2 * n**3 / rate)


def test_a_chain_of_elementwise_work_is_one_kernel() -> None:
    n = 1 << 20
    w = work(lambda a, b: jnp.tanh(jnp.exp(a) * b + a).reshape(1024, -1) * 2, (n,), (n,))
    assert (w.kernels, w.moved_bytes, w.flops) == (1, 3 * 2 * n, 0)


def test_barriers_and_shapes_cost_nothing() -> None:
    def barred(a: Any, b: Any) -> Any:
        a, b = jax.lax.optimization_barrier((a.reshape(-1), b))
        return jnp.exp(a) * b

    n = 1 << 20
    assert work(barred, (1024, 1024), (n,)) == work(lambda a, b: jnp.exp(a.reshape(-1)) * b, (1024, 1024), (n,))


def test_a_reduction_reads_through_what_feeds_it() -> None:
    w = work(lambda a: jnp.sum(jnp.exp(a), axis=1, dtype=jnp.bfloat16), (1024, 1024))
    assert w.moved_bytes == pytest.approx(2 * 1024 * 1024 + 2 * 1024, rel=0.01)


def test_a_loop_counts_its_body_each_time() -> None:
    def body(x: Any, _: Any) -> tuple[Any, None]:
        return x @ x, None

    once = work(lambda a: a @ a, (512, 512))
    loop = work(lambda a: jax.lax.scan(body, a, None, length=7)[0], (512, 512))
    assert loop.flops == 7 * once.flops
    assert loop.seconds == pytest.approx(7 * once.seconds)


def test_workspace_is_what_is_made_and_read_inside() -> None:
    n = 256
    chain = work(lambda a, b: ((a @ b) @ b) @ b, (n, n), (n, n))  # two results of products live at once
    assert chain.workspace_bytes == 2 * n * n * 2
    assert work(lambda a, b: a @ b, (n, n), (n, n)).workspace_bytes == 0


def test_a_product_adds_to_its_accumulator_in_place() -> None:
    """One kernel, no workspace: it reads the operands and the sum, and writes the sum."""
    n = 256

    def w(acc: Any, x: Any, dy: Any) -> Any:
        grad = jax.lax.dot_general(x, dy, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return acc + grad.reshape(n, 2, n // 2)

    avals = [jax.ShapeDtypeStruct((n, 2, n // 2), jnp.float32), *[jax.ShapeDtypeStruct((n, n), jnp.bfloat16)] * 2]
    in_place = work_of(jax.make_jaxpr(w)(*avals), H100, Efficiency())
    assert (in_place.kernels, in_place.workspace_bytes) == (1, 0)
    assert in_place.moved_bytes == n * n * (2 + 2 + 4 + 4)


# -- stages -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table_2() -> tuple[TrainConfig, StageCosts]:
    """Provide the 9.6B model of `controllable-memory.txt`."""
    config = load_config(PLANS / "gpt-9.6b.toml")
    return config, stage_costs_for(config, TARGETS["a100"])


def layer_of(config: TrainConfig, stage_costs: StageCosts, recompute: str) -> PlannedStage:
    """Return a stage of one block."""
    config = config.override(["pipeline.schedule=v-zb", "pipeline.chunks=2", f"pipeline.cut={list(range(1, 32))}"])
    cut = planner(config, stage_costs.model)(32).cut
    return stage_costs.stages(cut, recompute, 4)[5]


@pytest.mark.parametrize(("recompute", "scores"), [("fused", 5), ("flash", 0)])
def test_a_gpt_layer_keeps_what_megatron_does(
    recompute: str, scores: int, table_2: tuple[TrainConfig, StageCosts]
) -> None:
    """34 bsh + 5 abs² bytes with 16-bit values and dropout (Korthikanti et al. 2023); flash attention keeps no score."""
    b, s, h, a = 4, 1024, 5120, 40
    assert layer_of(*table_2, recompute).functions.residual_bytes == 34 * b * s * h + scores * a * b * s * s


def test_parameters_take_18_bytes_in_bfloat16_and_16_in_float32(table_2: tuple[TrainConfig, StageCosts]) -> None:
    layer = layer_of(*table_2, "fused")
    assert persistent_bytes(layer) == 18 * sum(a.size for a in layer.functions.param_avals)
    p = prediction_of(small())
    assert sum(map(static_bytes, p.memory)) == 16 * p.num_params


def test_equal_stages_are_traced_once() -> None:
    config = small(ranks=4, microbatches=4, cut=[2, 3, 4])
    notes: list[str] = []
    stage_costs = stage_costs_of(config, H100, Efficiency(), notes.append)
    stages = stage_costs.stages(planner(config, stage_costs.model)(4).cut, "none", 2)
    assert stages[1] is stages[2]
    assert len([line for line in notes if line.startswith("tracing")]) == 3


def test_a_long_run_of_equal_layers_costs_what_it_does_traced_whole() -> None:
    """But for what kernels of the residual stream read of layers further back, which the roofline has them read again."""
    config = small(tp=2).override(["model.options.num_layers=6"])
    stage_costs = stage_costs_for(config)
    stage = stage_costs.stages([(0, 7), (7, 9)], "cheap", 2)[0]
    full_trace = stage_costs.functions_of(stage.key)
    assert stage.functions.residual_bytes < full_trace.residual_bytes
    assert stage.sizes == StageSizes.of(full_trace)
    for op, function in full_trace.functions.items():
        real = work_of(function.jaxpr, H100, Efficiency())
        assert (stage.work[op].flops, stage.work[op].kernels) == (real.flops, real.kernels)
        assert stage.work[op].seconds == pytest.approx(real.seconds, rel=1e-3)
        assert stage.work[op].workspace_bytes == pytest.approx(real.workspace_bytes, rel=0.01)


def test_tensor_parallel_stages_are_those_of_one_device() -> None:
    """Two blocks, h = 32, T = 16, 2 sequences, float32: what is divided, what is whole, and what is sent."""
    stream = 2 * 16 * 32 * 4

    def stage(tp: int, sequence: bool = False, policy: str = "fused") -> PlannedStage:
        stage_costs = stage_costs_for(small(recompute=policy, tp=tp, sequence_parallel=sequence))
        return stage_costs.stages([(0, 1), (1, 3), (3, 7)], policy, 2)[1]

    def exchanged(stage: PlannedStage, op: str) -> list[str]:
        return [c.primitive for c in collectives(stage.functions.functions[op].jaxpr)]

    planned = stage(1), stage(4), stage(4, True), stage(4, True, "fused+gather")
    unsharded, part, split, sharded_sequence = (s.functions for s in planned)
    norms_and_biases = 2 * 4 * (4 * 32 + 2 * 32)  # of a block, whole on each device: two norms, two row biases
    assert part.param_bytes - norms_and_biases == (unsharded.param_bytes - norms_and_biases) / 4
    assert part.boundary_bytes == unsharded.boundary_bytes == 4 * split.boundary_bytes == stream
    assert sharded_sequence.residual_bytes < split.residual_bytes < part.residual_bytes < unsharded.residual_bytes
    assert sharded_sequence.residual_bytes <= unsharded.residual_bytes / 4  # nothing of the stream's size is left whole
    assert exchanged(planned[1], "F") == ["psum"] * 4
    assert {c.whole_bytes for op in ("F", "B") for c in collectives(part.functions[op].jaxpr)} == {stream}
    assert exchanged(planned[2], "B") == ["all_gather", "reduce_scatter"] * 4
    assert exchanged(planned[1], "W") == exchanged(planned[2], "W") == exchanged(planned[0], "F") == []
    assert exchanged(planned[3], "W") == ["all_gather"] * 4
    assert planned[1].work["F"].flops == planned[0].work["F"].flops / 4


def test_collectives_take_what_a_ring_takes() -> None:
    config = small(tp=4, recompute="fused")
    p = prediction_of(config, stage_costs_for(config))
    stream, e = 2 * 16 * 32 * 4, Efficiency()
    one = 2 * 3 / 4 * stream / (H100.link_bytes_per_s * e.link) + H100.link_latency_s
    assert (p.costs.f_comm_s[0], p.costs.b_comm_s[0]) == pytest.approx((5 * one, 4 * one))  # F: the embedding's, too
    assert p.comm_s == {"tp": pytest.approx((max(p.costs.f_comm_s), max(p.costs.b_comm_s)))}
    assert p.costs.collectives[0] == 5
    assert max(p.timeline.tp_exposed_s) > 0


@pytest.mark.parametrize("ep", [8, 16, 64])
def test_an_all_to_all_leaves_the_node_beside_what_stays(ep: int) -> None:
    """A device sends 268 MB, as many rows to each of ``ep`` devices: by arithmetic of the script's own."""
    rows, width = 4096 * 8, 4096
    seconds = exchange_s(H100, Efficiency(), Exchange("all_to_all", rows * width * 2, ep, ep))
    assert seconds == pytest.approx(plan_experts.exchange_s(width, 8, ep, 4096), rel=0.01)
    # a ring passes all of it over its slowest link
    ring = exchange_s(H100, Efficiency(), Exchange("all_gather", rows * width * 2, ep, ep))
    assert (ring > 1.1 * seconds) == (ep > 8)


def test_devices_of_an_outer_axis_are_further_apart() -> None:
    near, far = (Exchange("all_gather", 1e9, 2, span) for span in (2, 16))
    near_s, far_s = (exchange_s(H100, Efficiency(link=1.0), exchange) for exchange in (near, far))
    assert (near_s, far_s) == pytest.approx((0.5e9 / 450e9 + 4e-6, 0.5e9 / 50e9 + 10e-6))


# -- experts ----------------------------------------------------------------------------------------------------------


def mixture(**pipeline: Any) -> TrainConfig:
    """Return four blocks of 8 experts, 2 a position, with room for 1.25 of the mean, on two ranks."""
    options = {"vocab_size": 64, "d_model": 32, "num_layers": 4, "num_heads": 4, "expert_size": 16}
    experts = {"num_experts": 8, "top_k": 2, "capacity": 1.25}
    return TrainConfig.from_dict(
        {
            "model": {"target": "models.moe:MoE", "options": options | experts},
            "data": {"path": "none.npy", "tokenizer": "ids:64", "seq_len": 16},
            "pipeline": {"ranks": 2, "microbatches": 4, **pipeline},
            "run": {"batch": 64},
        }
    )


def mixture_on(imbalance: float = 1.0, **pipeline: Any) -> Prediction:
    config = mixture(**pipeline)
    return predict(config, stage_costs_of(config, H100, Efficiency(imbalance=imbalance), silent), 80e9)


EXPERTS = 4 * 8 * 3 * 32 * 16
"""Parameters of the mixture that are experts'."""


@pytest.mark.parametrize(
    "mesh", [{}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}]
)
def test_the_work_of_experts_is_that_of_routed_rows(mesh: dict[str, Any]) -> None:
    p = mixture_on(**mesh)
    assert p.num_params - p.active_params == EXPERTS * 6 / 8
    # F of a position: two operations a parameter that it meets, of norms and words none; scores and values of 16 positions
    met = p.active_params - (2 * 4 + 1) * 32 - 64 * 32
    assert p.model_flops == 3 * 4 * (16 * 16) * (2 * met + 4 * 4 * 16 * 32)
    devices, parts = p.devices // 2, mesh.get("ep", 1) * mesh.get("tp", 1)
    assert p.experts is not None
    assert p.experts.mean == 2 * 16 * 16 / devices
    assert (p.experts.room, p.experts.row_bytes) == (1.25, 32 * 4)
    assert p.experts.worst == parts * 16 * 16 / devices * min(2, 8 / parts)
    assert "experts: 2 of 8 a position" in "\n".join(assumptions(p, Efficiency(), ""))
    assert p.costs.has_collectives == (devices > 1)


def test_a_run_counts_the_work_of_experts_as_its_plan_does() -> None:
    config = mixture(dp=4, ep=2).override(["model.options.num_layers=2"])
    stage_costs = stage_costs_of(config, H100, Efficiency(), silent)
    p = prediction_of(config, stage_costs)
    stages = stage_costs.stages(planner(config, stage_costs.model)(2).cut, "none", 4)
    prepared: Any = SimpleNamespace(config=config, schedule=p.schedule, model=stage_costs.model)
    assert step_flops(prepared, [stage.functions for stage in stages]) == (p.model_flops, p.peers_flops)


def test_experts_are_divided_and_reduced_as_their_buffers_lie() -> None:
    alone, divided = (mixture_on(dp=4, ep=ep, sharding={"zero1": True}) for ep in (1, 2))
    assert alone.costs.param_bytes[0] - divided.costs.param_bytes[0] == EXPERTS / 2 * 4 / 2  # half of a rank's experts
    # state is divided over all that share rows: by ep already, or by ZeRO-1
    assert alone.memory[0].by_kind["optimizer"] == divided.memory[0].by_kind["optimizer"]
    rate = H100.link_bytes_per_s * Efficiency().link
    experts = EXPERTS / 2 * 4
    # a reduce-scatter over four devices; or over two, of half as many experts
    assert alone.costs.reduce_s[0] - divided.costs.reduce_s[0] == pytest.approx(
        (3 / 4 - 1 / 2 * 1 / 2) * experts / rate
    )
    assert divided.costs.gather_s == pytest.approx(divided.costs.reduce_s)


def test_an_imbalance_costs_what_buffers_for_it_would() -> None:
    even, within, beyond = (mixture_on(x, dp=4, ep=4) for x in (1.0, 1.25, 2.5))
    assert even.costs == within.costs
    # all exchanges of a stage are its experts': twice the bytes, and twice the latency
    assert beyond.costs.f_comm_s == pytest.approx([2 * x for x in even.costs.f_comm_s])
    assert beyond.costs.b_comm_s == pytest.approx([2 * x for x in even.costs.b_comm_s])
    assert beyond.step_s > even.step_s
    assert beyond.model_flops == even.model_flops
    assert [m.by_kind for m in beyond.memory] == [m.by_kind for m in even.memory]
    says = "\n".join(assumptions(beyond, Efficiency(imbalance=2.5), ""))
    assert "imbalance 2.5, which seconds are of; beyond 1.25 a run drops rows" in says


def test_ragged_products_take_as_long_as_the_rows_that_come() -> None:
    def on(buffer: float, imbalance: float) -> Prediction:
        options = ["products=ragged", f"buffer={buffer}", "expert_size=128", "d_model=128", "num_layers=2"]
        config = mixture(dp=4, ep=4).override(["run.dtype=bfloat16", *(f"model.options.{x}" for x in options)])
        return predict(config, stage_costs_of(config, H100, Efficiency(imbalance=imbalance), silent), 80e9)

    tight, even, uneven = on(1.0, 1.0), on(2.0, 1.0), on(2.0, 2.0)
    assert tight.model_flops == even.model_flops == uneven.model_flops
    assert even.costs.f_s[0] < uneven.costs.f_s[0]
    # exchanges are of whole buffers
    assert tight.costs.f_comm_s[0] < even.costs.f_comm_s[0] == uneven.costs.f_comm_s[0]


def test_gradients_are_separated_where_it_pays() -> None:
    plain, separated, braided = (
        prediction_of(config, stage_costs_for(config))
        for config in (
            small(tp=4),
            small(tp=4, separate_gradients=True),
            small(tp=4, separate_gradients=True, braid_adjacent=True),
        )
    )
    assert any(a.op == "W" for rank in range(2) for a in separated.schedule.actions(rank))
    assert separated.timeline.makespan < plain.timeline.makespan
    assert max(separated.timeline.peak_activations) <= max(plain.timeline.peak_activations) * (1 + 1e-9)
    assert braided.timeline.makespan <= separated.timeline.makespan


def test_adjacent_actions_are_braided_where_it_pays() -> None:
    plain, braided = (
        prediction_of(config, stage_costs_for(config))
        for config in (small(tp=4, schedule="zb-h1"), small(tp=4, schedule="zb-h1", braid_adjacent=True))
    )
    slots = [slot for row in braided.schedule.rows for slot in row]
    assert any(isinstance(slot, Braid) for slot in slots)
    assert not any(isinstance(slot, Braid) for row in plain.schedule.rows for slot in row)
    assert unbraid(braided.schedule) == plain.schedule
    assert braided.timeline.makespan < plain.timeline.makespan
    assert sum(braided.timeline.tp_exposed_s) < sum(plain.timeline.tp_exposed_s)


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        *(small(schedule=name, chunks=n) for name, n in (("1f1b", 1), ("zb-h1", 1), ("v-half", 2), ("po-f", 2))),
        mixture(dp=4, ep=2),
    ],
)
def test_memory_is_what_the_programs_hold(config: TrainConfig) -> None:
    """The account of the lowered programs walks what the runtime executes; a plan knows the schedule and shapes only."""
    p = prediction_of(config)
    stage_costs = stage_costs_for(config)
    pipeline = Pipeline.build(
        stage_costs.model,
        p.schedule,
        microbatch_size=config.microbatch_size,
        boundaries=planner(config, stage_costs.model)(p.schedule.num_stages).cut,
        costs=p.costs,
        tp=config.pipeline.mesh,
    )
    report = pipeline.memory_report(workspace=False, timeline=pipeline.predicted_timeline())
    for planned, exact in zip(p.memory, report.ranks, strict=True):
        beside = exact.by_kind.get("data", 0) + exact.by_kind.get("losses", 0)
        plan_bytes = planned.by_kind["parameters"] + planned.by_kind["gradients"] + p.activation_bytes[planned.rank]
        assert exact.peak_bytes - beside <= plan_bytes <= 1.05 * exact.peak_bytes


def test_times_and_ratios_follow_their_definitions() -> None:
    config = small()
    p = prediction_of(config)
    assert p.step_s == p.timeline.makespan + p.update_s
    assert p.timeline.makespan == simulate(p.schedule, p.costs).makespan
    assert p.tokens_per_s == pytest.approx(8 * 16 / p.step_s)
    assert p.mfu == pytest.approx(p.model_flops / (p.step_s * 2 * 494.7e12))
    layers = 4 * (24 * 16 * 32**2 + 4 * 16**2 * 32) + 2 * 16 * 32 * 64  # Narayanan et al. 2021, and the head
    assert p.model_flops == p.peers_flops == 3 * 8 * layers


@pytest.mark.parametrize("zero1", [False, True])
def test_a_stage_is_reduced_behind_its_last_w(zero1: bool) -> None:
    alone, divided = (prediction_of(small(dp=dp, sharding={"zero1": zero1})) for dp in (1, 2))
    assert not any(e.lane == "net" for e in alone.timeline.events)
    reductions = {str(e.action): e for e in divided.timeline.events if e.lane == "net"}
    reduced_s = [reductions[f"R{s}.0"].end_s - reductions[f"R{s}.0"].start_s for s in range(2)]
    gradients, parameters = ([m.by_kind[kind] for m in divided.memory] for kind in ("gradients", "parameters"))
    rate = link_of(divided.target, Efficiency(), 2).bytes_per_s
    assert reduced_s == pytest.approx([n / rate * (0.5 if zero1 else 1.0) for n in gradients])
    assert divided.costs.gather_s == pytest.approx([n / rate / 2 if zero1 else 0.0 for n in parameters])
    # rank 1 reduces while rank 0 still computes, or before it does
    plain_s = simulate(divided.schedule, divided.costs).makespan
    assert divided.timeline.makespan == pytest.approx(max(plain_s + reduced_s[0], reductions["R1.0"].end_s))
    static = max(n + m for n, m in zip(divided.costs.param_bytes, divided.costs.optimizer_bytes, strict=True))
    update_s = 2 * static / (divided.target.memory_bytes_per_s * Efficiency().bandwidth)
    assert divided.update_s == pytest.approx(update_s + max(divided.costs.gather_s))


def test_reductions_of_a_file_are_those_of_the_step(tmp_path: Path) -> None:
    plain, path = generate("1f1b", 2, 4), tmp_path / "r.sched"
    write_schedule(with_reductions(plain, gather=True), path)
    config = small(dp=2, schedule=str(path))
    assert prediction_of(config).schedule.rows == plain.rows
    assert prediction_of(config).step_s == prediction_of(small(dp=2)).step_s


def test_post_validation_takes_the_longest_span_and_reads_the_state_once_more() -> None:
    config = small(schedule="zb-2p")
    off, on = (prediction_of(config.override([f"pipeline.post_validation={x}"])) for x in ("off", "auto"))
    assert on.step_s == on.late_step_s == on.timeline.max_span + on.update_s
    assert on.step_s == off.late_step_s and on.update_s == pytest.approx(1.5 * off.update_s)
    twice = [a.by_kind["optimizer"] - b.by_kind["optimizer"] for a, b in zip(on.memory, off.memory, strict=True)]
    assert twice == [m.by_kind["parameters"] for m in off.memory]  # float32
    even = simulate(off.schedule, CostProfile.uniform(2))
    assert even.max_span < even.makespan
    texts = [prediction_text(replace(p, timeline=even), ()) for p in (off, on)]
    assert ["with post-validation)" in text for text in texts] == [True, False]


@pytest.mark.parametrize("schedule", ["1f1b", "v-half", "v-min", pytest.param("v-zb", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "name",
    ["gpt-9.6b", pytest.param("gpt-21b", marks=pytest.mark.soak), pytest.param("gpt-38.5b", marks=pytest.mark.soak)],
)
def test_activation_memory_of_the_paper(name: str, schedule: str, table_2: tuple[TrainConfig, StageCosts]) -> None:
    """Within 10% of `controllable-memory.txt` table 4: bfloat16, attention scores kept, sequence 1024."""
    config, stage_costs = (
        table_2 if name == "gpt-9.6b" else (config := load_config(PLANS / f"{name}.toml"), stage_costs_for(config))
    )
    if schedule != "1f1b":
        blocks = len(stage_costs.model.layers) - 3
        v = (f"pipeline.schedule={schedule}", "pipeline.chunks=2", f"pipeline.cut={list(range(1, blocks + 2))}")
        config = config.override(v)
    got = max(prediction_of(config, stage_costs).activation_bytes) / 1e9
    assert got == pytest.approx(ACTIVATION_GB[name][schedule], rel=0.1)


def test_offload_is_priced_at_the_shared_host_link() -> None:
    config = small(schedule="po-h", chunks=2)
    unshared = prediction_of(config)
    shared = prediction_of(config, stage_costs_for(config, TARGETS["a100"]))
    assert unshared.costs.host.groups == ()
    assert shared.costs.host.groups == ((0, 1),)
    assert unshared.offloaded > 0
    assert max(unshared.offload_bytes) > 0
    half = prediction_of(config.override(["offload.fraction=0.5"]))
    assert 0 < max(half.offload_bytes) < max(unshared.offload_bytes)


# -- suggestions ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight() -> tuple[Prediction, StageCosts, float]:
    config = small(microbatches=8, ranks=2)
    stage_costs = stage_costs_for(config)
    roomy = prediction_of(config, stage_costs)
    limit = 0.95 * roomy.worst.peak_bytes
    return prediction_of(config, stage_costs, limit), stage_costs, limit


@pytest.mark.soak
def test_suggestions_fit_and_are_what_their_overrides_give(tight: tuple[Prediction, StageCosts, float]) -> None:
    current, stage_costs, limit = tight
    assert not current.fits
    suggestions = suggest(current, lambda c, t: prediction_of(c, stage_costs, limit, transform=t), silent, 1e9)
    assert suggestions.fitting
    assert suggestions.left_out == 0
    speeds = [s.prediction.tokens_per_s_per_device for s in suggestions.fitting]
    assert speeds == sorted(speeds, reverse=True)
    for s in suggestions.fitting[:5]:
        assert s.prediction.worst.peak_bytes <= limit
        if s.schedule is None:
            repeat = prediction_of(current.config.override(s.overrides), stage_costs, limit)
            assert (repeat.step_s, repeat.worst.peak_bytes) == (s.prediction.step_s, s.prediction.worst.peak_bytes)
    assert any(o.startswith("pipeline.recompute=") for s in suggestions.fitting for o in s.overrides)
    assert any(o.startswith("pipeline.schedule=") for s in suggestions.fitting for o in s.overrides)


def test_no_time_for_suggestions_is_said(tight: tuple[Prediction, StageCosts, float]) -> None:
    current, stage_costs, limit = tight
    suggestions = suggest(current, lambda c, t: prediction_of(c, stage_costs, limit, transform=t), silent, 0.0)
    assert suggestions.fitting == ()
    assert suggestions.left_out > 10
    assert suggestions.smallest.prediction is current


# -- compiling --------------------------------------------------------------------------------------------------------


def test_workspace_by_compiling_for_this_cpu() -> None:
    config, notices = small(recompute="full"), list[str]()
    compiler = Compiler(TARGETS["cpu"], notices.append, 1e9)
    stage_costs = stage_costs_for(config, TARGETS["cpu"], temp_of=compiler)
    p = prediction_of(config, stage_costs, compile_stages=True)
    assert notices == []
    assert compiler.count == 4  # F and BW of two different stages: 1F1B has no B and W
    pipeline = Pipeline.build(
        stage_costs.model,
        p.schedule,
        microbatch_size=2,
        boundaries=planner(config, stage_costs.model)(2).cut,
        recompute="full",
    )
    exact = pipeline.memory_report().ranks
    assert [m.by_kind["temporaries"] > 0 for m in p.memory] == [True, True]
    for planned, compiled in zip(p.memory, exact, strict=True):
        beside = compiled.by_kind.get("data", 0) + compiled.by_kind.get("losses", 0) + compiled.by_kind.get("code", 0)
        assert (
            compiled.peak_bytes - beside
            <= planned.peak_bytes - planned.by_kind["optimizer"]
            <= 1.05 * compiled.peak_bytes
        )


def test_a_compile_budget_is_kept_and_told() -> None:
    config, notices = small(), list[str]()
    stage_costs = stage_costs_for(config, TARGETS["cpu"], temp_of=Compiler(TARGETS["cpu"], notices.append, 0.0))
    p = prediction_of(config, stage_costs, compile_stages=True)
    assert len(notices) == 1
    assert "the rest is estimated" in notices[0]
    assert p.worst.by_kind["temporaries"] > 0


def _no_cuda() -> str:
    devices = compile_only_devices("h100", device_text(H100))
    return devices if isinstance(devices, str) else ""


@pytest.mark.parametrize(
    "name", ["h100", *(pytest.param(name, marks=pytest.mark.soak) for name in ("a100", "h20", "b200"))]
)
def test_compiling_for_a_gpu_that_is_not_here(name: str) -> None:
    if reason := _no_cuda():
        pytest.skip(reason)
    config, notices = small().override(["run.dtype=bfloat16"]), list[str]()
    compiler = Compiler(TARGETS[name], notices.append, 1e9)
    p = prediction_of(config, stage_costs_for(config, TARGETS[name], temp_of=compiler), compile_stages=True)
    assert notices == [] and p.fused_attention
    assert compiler.count == 4
    assert p.worst.by_kind["temporaries"] > 0


def test_without_the_wheels_the_reason_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpipe.planning.stages.compile_only_devices", lambda *a: "no wheels here")
    notices: list[str] = []
    compiler = Compiler(H100, notices.append)
    config = small()
    p = prediction_of(config, stage_costs_for(config, temp_of=compiler), compile_stages=True)
    assert notices == ["workspace is estimated from the jaxprs where it was not compiled: no wheels here"]
    assert compiler.count == 0
    assert p.worst.by_kind["temporaries"] > 0


def test_a_long_stage_is_compiled_short_and_scaled() -> None:
    config = small(ranks=1, microbatches=2)
    compiler = Compiler(TARGETS["cpu"], silent, 1e9)
    p = prediction_of(config, stage_costs_for(config, TARGETS["cpu"], temp_of=compiler), compile_stages=True)
    assert compiler.count == 4  # F and BW, with one block and with two
    assert p.worst.by_kind["temporaries"] > 0


# -- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ[name])  # the verb changes them
    path = tmp_path / "run.toml"
    path.write_text(small().to_toml())
    return str(path)


def test_plan_prints_json_and_writes_files(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("plan.svg", "plan.html", "plan.sched", "costs.json")]
    outputs = ["-o", files[0], "-o", files[1], "-o", files[2], "--costs-out", files[3]]
    code = main(["plan", config_file, "pipeline.microbatches=8", "--json", "--compile-seconds", "0", *outputs])
    out, err = capsys.readouterr()
    assert code == 0, err
    plan = json.loads(out)
    assert plan["fits"]
    assert plan["microbatches"] == 8
    assert plan["limit_bytes"] == pytest.approx(0.75 * H100.memory_bytes)
    assert [m["rank"] for m in plan["memory"]] == [0, 1]
    assert plan["peak_bytes"] == max(m["total_bytes"] for m in plan["memory"])
    assert read_schedule(files[2]) == generate("1f1b", 2, 8)
    assert read_costs(files[3]).num_stages == 2
    assert "roofline of h100" in read_costs(files[3]).source
    assert all(Path(f).stat().st_size > 100 for f in files)
    assert "tracing" in err


def test_plan_that_does_not_fit_suggests(config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--compile-seconds", "0", "--suggest-seconds", "2", "--schedules", str(tmp_path)]
    code = main(["plan", config_file, "--memory-limit-gb", "0.00072", *flags])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "DOES NOT FIT: rank" in out
    assert "change that fits" in out
    assert "pipeline.recompute=full" in out
    assert "assumed  precision: float32" in out


def test_a_policy_that_finds_nothing_is_not_claimed(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", config_file, "pipeline.recompute=cheap+gather", "--compile-seconds", "0"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "assumed  but stages 0, 1: recompute=gather finds nothing that sequence parallelism gathers and" in out


def test_a_limit_below_everything_says_the_minimum(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory-limit-gb", "0.0001", "--compile-seconds", "0", "--suggest-seconds", "1"]
    code = main(["plan", config_file, "--json", *flags])
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert code == 2
    assert last.startswith("jaxpipe: nothing tried fits in 0.0001 GB a device: the least memory found is 0.000")
    plan = json.loads(out)
    assert plan["suggestions"] == []
    assert plan["smallest"]["peak_bytes"] > 1e5


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--target", "gb300"], "unknown target 'gb300'; did you mean 'b200'?; known: a100, a100-40, a800, h100"),
        (["--matmul-efficiency", "1.5"], "want a number above 0 and at most 1"),
        (["--memory-limit-gb", "0"], "want a number above 0"),
        (["other.toml"], "give one config file"),
        (["-o", "plan.pdf"], "unknown suffix"),
        (["--schedules", "no/such"], "no such directory"),
        (["--tp", "0"], "tp"),
        (["--imbalance", "0.5"], "imbalance is 0.5; want a number at least 1"),
        (["pipeline.recompute=everything"], "everything"),
        (["model.options.num_heads=5"], "num_heads"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    flags: list[str], says: str, config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config_file, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxpipe: ")
    assert err.count("\n") == 1
    assert says in err


def test_host_memory_is_what_is_out_at_once() -> None:
    """One microbatch in flight at a time on one rank: all of its residuals that leave, and no more."""
    config = small(ranks=2, schedule="po-h", chunks=2)
    p = prediction_of(config)
    for rank, host in enumerate(m.host_peak_bytes for m in p.memory):
        offload_bytes = [p.costs.offloadable_bytes[a.stage] for a in p.schedule.actions(rank) if a.op == "O"]
        assert max(offload_bytes, default=0) <= host <= sum(offload_bytes)


@pytest.mark.soak
def test_a_policy_only_where_it_is_needed() -> None:
    """1F1B's first ranks hold the most: recomputing there alone fits, and is faster than recomputing everywhere."""
    config = small(ranks=4, microbatches=8)
    stage_costs = stage_costs_for(config)
    totals = sorted(m.peak_bytes for m in prediction_of(config, stage_costs).memory)
    limit = (totals[-1] + totals[-2]) / 2
    current = prediction_of(config, stage_costs, limit)
    suggestions = suggest(current, lambda c, t: prediction_of(c, stage_costs, limit, transform=t), silent, 1e9)
    speed = {s.change: s.prediction.step_s for s in suggestions.fitting}
    tight = [m.rank for m in current.memory if m.peak_bytes > limit]
    assert len(tight) == 1
    assert speed[f"recompute full on rank {tight[0]}"] < speed["recompute full"]
