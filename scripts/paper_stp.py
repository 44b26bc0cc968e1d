"""`stp.txt` again: tables 1, 5, 6 (7 is 6 as MFU) and 10 by simulation, with costs from model arithmetic.

The models are Qwen2 with table 2's layers, heads and widths. The paper does not print the MLP's width: 18,944 (Qwen2-7B's) with
untied embeddings gives 12.2 and 26.3 B parameters. A microbatch is one sample, two at sequence 3072 and 2048 (table 5). All
virtual stages have as many layers, the last has two fewer and the head (vocabulary 152,064).

Seconds. FLOPs of GEMMs and causal attention (whose backward takes 2.5 times its forward) at a part of the A800's 312 TFLOP/s; a
layer's forward and backward have two ring all-reduces each, of one activation. Two constants for all cells: the link rate makes
communication 27.5% of a layer's forward at TP 8, sequence 6144 (figure 1), and the part of the peak is the one with which the
geometric mean of 1F1B-I's throughput over table 6 is the paper's. Nothing is fitted to ZB-V or STP, and no cell by itself.
One constant part of the peak can't hold for TP 4 and TP 8: absolute throughput comes out too low at the one and too high at the
other (narrower GEMMs are slower). Gains, the ratio of two schedules on the same costs, hardly depend on it.

Schedules. 1F1B-I as Megatron's. ZB-V is the better of ours and of ours with each W right behind its B, in both a B whose W
follows at once runs as one backward, as the code of its authors has it; with every B split, as table 1 counts (4 m T_AR
exposed), STP would gain 21 to 23% over ZB-V at TP 8, where the paper measured 9 to 13%. All chunks count as equal in memory
when ZB-V is made, as in its paper; simulated bytes are real.

Transfers between ranks are Megatron's: each GPU sends its 1/TP of an activation at 25 GB/s (200 Gb/s a GPU, not in the paper),
which is then gathered over NVLink. They overlap compute here; the paper's STP waits for them (section 5.2). That makes less
difference than it seems: neighbours wait for each other in turn (``schedule/families/stp.py``), so a transfer adds to every
slot of STP either way. ``gain_without_transfers`` says how much that is.

With context parallelism (table 10) a GPU has 1/CP of each sequence's tokens and of its attention. Keys and values go round a
ring, as Megatron's do, under the attention of those before them: here they take a thirtieth of its time, and count as none.
The reduction of gradients over DP and CP, the same for all schedules, is left out.

Bytes: 18 a parameter (bfloat16 with float32 gradients, masters and Adam, nothing sharded over dp); activations as saved with
flash attention and without sequence parallelism: per token and layer 8 h bytes on every rank, and (4 h + 4 kv + 6 ffn) / TP; W
keeps as much. Appendix C measured 3.6 and 4.3 GB where this gives 2.9.

Table 1, section 4.3, is for p ranks, p ≪ m microbatches and two equal chunks per rank. T_F, T_B, T_W: compute of one chunk;
T_AR: its TP collectives, the same for F and B. Where the formulas and the simulator part (tests hold them to this):

* 1F1B-I: bubbles are exact for m a multiple of p and T_AR <= T_W. A rank holds one chunk more than 3p − 2, as in Megatron's
  warm-up.
* ZB-V: the TP bubble is exact where every B is split. The PP bubble is an upper bound by longest rank span: ours is found by
  search, and near 0; by makespan the ranks still wait (p − 1)(T_F + T_AR) for the first microbatch.
* STP: between slots the peak is exact, while a braid runs it is one chunk more. With F = B = W and no collectives the PP bubble
  is exact if rank r may put r W's off, which holds up to r chunks more. Ours is larger, since it keeps W's within the
  peak, and a slot F+B of the cool-down takes T_F − T_W longer than the BW beside it. The TP bubble leaves out the last
  collective of each braid without a W, one of n, and forwards of the warm-up that are not paired.
  The authors' published order, ``stp-published``, has a PP bubble of (p - 1)(2 T_F + 2 T_B - 3 T_W) where T_B >= T_F >= T_W and
  T_AR = 0, so the formula's where all are equal; it holds up to 4p - 1 chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from paper_numbers import STP_EXPOSED, STP_MEMORY_GB, STP_TABLE_10, STP_THROUGHPUT

from jaxpipe.schedule import CostProfile, Link, Schedule, Timeline, generate, simulate
from jaxpipe.schedule.ir import Action, B, W
from jaxpipe.schedule.passes import prompt_weights
from jaxpipe.schedule.passes.braid import fused_backwards, with_fused

Row = dict[str, Any]
PEAK_FLOPS = 312e12
NETWORK_BYTES_PER_S = 25e9
VOCABULARY, FFN = 152_064, 18_944
SCHEDULES = ("interleaved-1f1b", "v-zb", "stp", "stp-published")


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """Seconds of one chunk: T_F, T_B, T_W and T_AR of the paper."""

    f_s: float
    b_s: float
    w_s: float
    all_reduce_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Promise:
    """The values of Table 1 for a schedule: seconds per rank and step; chunks of activations (M_a) on the fullest rank."""

    pp_bubble_s: float
    tp_bubble_s: float
    peak_chunks: float

    @property
    def bubble_s(self) -> float:
        """Both bubbles."""
        return self.pp_bubble_s + self.tp_bubble_s


def _interleaved(p: int, m: int, c: ChunkCosts) -> Promise:
    return Promise((p - 1) * (c.f_s + c.all_reduce_s + c.b_s + c.w_s), 2 * m * c.all_reduce_s, 3 * p - 2)


def _zb_v(p: int, m: int, c: ChunkCosts) -> Promise:
    bubble_s = (p - 1) * max(0.0, c.f_s + 2 * c.all_reduce_s + c.b_s - 2 * c.w_s)
    return Promise(bubble_s, 4 * m * c.all_reduce_s, 2 * p)


def _stp(p: int, m: int, c: ChunkCosts) -> Promise:
    bubble_s = (p - 1) * max(0.0, c.f_s + c.all_reduce_s + c.b_s - c.w_s)
    return Promise(bubble_s, (2 * p + 1) * c.all_reduce_s, 3 * p)


TABLE_1: Mapping[str, Callable[[int, int, ChunkCosts], Promise]] = MappingProxyType(
    {"interleaved-1f1b": _interleaved, "v-zb": _zb_v, "stp": _stp, "stp-published": _stp}
)
"""Family -> its row: ``TABLE_1[family](p, m, costs)``."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of table 2. ``kv``: width of keys, and of values."""

    layers: int
    hidden: int
    kv: int

    @property
    def layer_parameters(self) -> int:
        return 2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * FFN


MODELS = {"12.1B": Model(30, 5120, 1024), "26.3B": Model(46, 7168, 1024)}


@dataclass(frozen=True, slots=True)
class Setting:
    """A cell's model, sequence and mesh."""

    name: str
    sequence: int
    tp: int
    pp: int
    cp: int = 1

    @property
    def model(self) -> Model:
        return MODELS[self.name]

    @property
    def samples(self) -> int:
        """Samples a microbatch."""
        return 2 if self.sequence in (3072, 2048) else 1

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one GPU."""
        return self.samples * self.sequence / self.cp

    def layer_flops(self) -> tuple[float, float, float]:
        """F, B and W of a layer on one GPU."""
        gemm = 2.0 * self.model.layer_parameters * self.tokens / self.tp
        attention = 2.0 * self.sequence * self.model.hidden * self.tokens / self.tp
        return gemm + attention, gemm + 2.5 * attention, gemm

    def all_reduce_bytes(self) -> float:
        """The bytes that a GPU sends in the two ring all-reduces of a layer's forward."""
        return 2 * 2 * (self.tp - 1) / self.tp * self.tokens * self.model.hidden * 2


def link_bytes_per_s(efficiency: float) -> float:
    """Return the rate at which figure 1's part of a layer's forward is communication."""
    tp, sequence, part = STP_EXPOSED
    setting = Setting("12.1B", sequence, tp, 2)
    return setting.all_reduce_bytes() / (setting.layer_flops()[0] / (efficiency * PEAK_FLOPS) * part / (1 - part))


def transfer_bytes_per_s(tp: int, efficiency: float) -> float:
    """Return the rate at which an activation reaches another rank: its part over the network, the others' over NVLink."""
    return 1 / (1 / (tp * NETWORK_BYTES_PER_S) + (tp - 1) / tp / link_bytes_per_s(efficiency))


def costs_of(setting: Setting, efficiency: float, *, transfers: bool = True) -> CostProfile:
    """Seconds and bytes of the 2 PP virtual stages, in the order of the model."""
    model, stages, tp = setting.model, 2 * setting.pp, setting.tp
    each = (model.layers + 2) // stages
    layers = [each] * (stages - 1) + [each - 2]
    head_flops = 2.0 * VOCABULARY * model.hidden * setting.tokens / tp
    heads = [0.0] * (stages - 1) + [head_flops]

    def seconds(layer_flops: float) -> tuple[float, ...]:
        return tuple(
            (n * layer_flops + head) / (efficiency * PEAK_FLOPS) for n, head in zip(layers, heads, strict=True)
        )

    f_s, b_s, w_s = map(seconds, setting.layer_flops())
    collective_s = setting.all_reduce_bytes() / link_bytes_per_s(efficiency)
    split = 4 * model.hidden + 4 * model.kv + 6 * FFN
    saved = tuple(n * setting.tokens * (8.0 * model.hidden + split / tp) for n in layers)
    ends = [VOCABULARY * model.hidden / tp] + [0.0] * (stages - 2) + [VOCABULARY * model.hidden / tp]
    parameters = [n * model.layer_parameters / tp + end for n, end in zip(layers, ends, strict=True)]
    return CostProfile(
        f_s=f_s,
        b_s=b_s,
        w_s=w_s,
        bw_s=tuple(b + w for b, w in zip(b_s, w_s, strict=True)),
        residual_bytes=saved,
        w_residual_bytes=saved,
        boundary_bytes=(2.0 * setting.tokens * model.hidden,) * stages,
        param_bytes=tuple(2 * x for x in parameters),
        optimizer_bytes=tuple(16 * x for x in parameters),
        link=Link(bytes_per_s=transfer_bytes_per_s(tp, efficiency)) if transfers else Link(),
        f_comm_s=tuple(n * collective_s for n in layers),
        b_comm_s=tuple(n * collective_s for n in layers),
        collectives=tuple(max(1, 2 * n) for n in layers),
        source="stp.txt table 2",
    )


def timeline_of(family: str, setting: Setting, microbatches: int, costs: CostProfile) -> Timeline:
    """Return the simulation of a family; of ZB-V as described above."""
    equal = (1.0,) * costs.num_stages
    even = replace(costs, residual_bytes=equal, w_residual_bytes=equal, offloadable_bytes=equal)
    schedule = generate(family, setting.pp, microbatches, costs=even)
    schedules: Iterable[Schedule] = [schedule]
    if family == "v-zb":
        # The fastest baseline: its order by all costs, or by those without collectives, which more of its W's may stay behind.
        without_collectives = replace(even, f_comm_s=(0.0,) * costs.num_stages, b_comm_s=(0.0,) * costs.num_stages)
        orders = (schedule, generate(family, setting.pp, microbatches, costs=without_collectives))
        schedules = (fuse_neighbours(x) for order in orders for x in (order, prompt_weights(order)))
    return min((simulate(x, costs) for x in schedules), key=lambda x: x.makespan)


def fuse_neighbours(schedule: Schedule) -> Schedule:
    """``schedule`` with BW in place of each B whose own W is the next slot of its rank.

    The result of B is later by W, and B's TP collectives have W under them (:mod:`~jaxpipe.schedule.engine`). The published
    code of ZB-V's authors does so "to overlap grad all-reduce for tensor parallel" (sail-sg/zero-bubble-pipeline-parallelism,
    ``zb_schedules.py``).
    """
    fused = frozenset(
        (one.stage, one.microbatch)
        for row in schedule.rows
        for one, two in pairwise(row)
        if type(one) is Action and one.op == B.name and two == replace(one, op=W.name)
    )
    return with_fused(schedule, fused | fused_backwards(schedule))


def efficiency_of(quick: bool) -> float:
    """Return the part of the peak with which 1F1B-I is, in the geometric mean over table 6, as fast as the paper's.

    Throughput is proportional to it but for transfers, whose share of 1F1B-I's time is below 1%; so one simulation does.
    """
    start, logs = 0.5, []
    for key, by_microbatches in STP_THROUGHPUT.items():
        setting = Setting(*key)
        costs = costs_of(setting, start, transfers=False)
        for m, (paper, _, _) in by_microbatches.items():
            if not quick or m == min(by_microbatches):
                ours = m * setting.samples / timeline_of("interleaved-1f1b", setting, m, costs).makespan
                logs.append(math.log(paper / ours))
    return start * math.exp(sum(logs) / len(logs))


def table_6(quick: bool) -> list[Row]:
    """Tables 5 and 6: throughput, STP's gain over the others in percent, peak memory; the paper's beside ours."""
    efficiency = efficiency_of(quick)
    rows = []
    for key, by_microbatches in STP_THROUGHPUT.items():
        setting = Setting(*key)
        if quick and (setting.tp < 8 or setting.pp > 2):
            continue
        for m, paper in by_microbatches.items():
            if not quick or m == min(by_microbatches):
                rows.append(_cell(setting, m, paper, efficiency))
    return rows


def _cell(setting: Setting, m: int, paper: tuple[float, ...], efficiency: float) -> Row:
    costs = costs_of(setting, efficiency)
    timelines = {name: timeline_of(name, setting, m, costs) for name in SCHEDULES}
    paper = (*paper, paper[-1])
    ours = tuple(m * setting.samples / timelines[name].makespan for name in SCHEDULES)
    peaks_gb = STP_MEMORY_GB[setting.name, setting.sequence, setting.tp, setting.pp]
    free = costs_of(setting, efficiency, transfers=False)
    instant = [timeline_of(name, setting, m, free).makespan for name in SCHEDULES[:3]]
    return {
        "model": setting.name,
        "sequence": setting.sequence,
        "tp": setting.tp,
        "ranks": setting.pp,
        "microbatches": m,
        "efficiency": round(efficiency, 4),
        "throughput": [_beside(a, b) for a, b in zip(paper, ours, strict=True)],
        "gain": [_beside(gain(paper, k), gain(ours, k)) for k in (0, 1)],
        "gain_published": [_beside(gain(paper, k), gain(ours, k, of=3)) for k in (0, 1)],
        "gain_without_transfers": [round(100 * (instant[k] / instant[2] - 1), 2) for k in (0, 1)],
        "tp_exposed": [round(100 * timelines[name].tp_exposed_rate, 2) for name in SCHEDULES],
        "memory_gb": [
            _beside(gb, max(timelines[name].peak_bytes) / 1e9)
            for gb, name in zip((*peaks_gb, peaks_gb[-1]), SCHEDULES, strict=True)
        ],
    }


def table_10(quick: bool) -> list[Row]:
    """Table 10: as :func:`table_6`, with CP or DP."""
    efficiency = efficiency_of(quick)
    rows = []
    for (sequence, cp, dp), (samples, paper) in STP_TABLE_10.items():
        setting, m = Setting("12.1B", sequence, 2, 4, cp), samples // dp // (4 if quick else 1)
        costs = costs_of(setting, efficiency)
        spans = [timeline_of(name, setting, m, costs).makespan for name in SCHEDULES[:3]]
        ours = tuple(m * dp / span for span in spans)
        rows.append(
            {
                "sequence": sequence,
                "cp": cp,
                "dp": dp,
                "microbatches": m,
                "throughput": [_beside(a, b) for a, b in zip(paper, ours, strict=True)],
                "gain": [_beside(gain(paper, k), gain(ours, k)) for k in (0, 1)],
            }
        )
    return rows


def gain(throughputs: tuple[float, ...], over: int, of: int = 2) -> float:
    """Return the gain in percent of STP, or of the published order (``of`` 3), over another schedule of ``SCHEDULES``."""
    return 100 * (throughputs[of] / throughputs[over] - 1)


def table_1(quick: bool) -> list[Row]:
    """Table 1 in chunk units: both bubbles and the peak, the formulas' beside the simulator's.

    The PP bubble is the longest rank span minus work and exposed collectives; four layers a chunk; W keeps a whole activation.
    """
    rows = []
    for p in (2, 4) if quick else (2, 4, 8, 16):
        for chunk in (ChunkCosts(1, 1, 1), ChunkCosts(1, 1, 0.75), ChunkCosts(1, 1, 0.75, 0.2)):
            for name, promise in TABLE_1.items():
                rows.append(_table_1_row(name, p, 4 * p, chunk, promise(p, 4 * p, chunk)))
    return rows


def _table_1_row(name: str, p: int, m: int, c: ChunkCosts, promise: Any) -> Row:
    share = {"f": 2 * c.f_s, "b": 2 * c.b_s, "w": 2 * c.w_s, "tp_comm": 2 * c.all_reduce_s}
    costs = CostProfile.uniform(2 * p, chunks=2, tp_collectives=8, **share)  # type: ignore[arg-type]
    timeline = simulate(generate(name, p, m, costs=costs), costs)
    exposed = max(timeline.tp_exposed_s, default=0.0)
    work = 2 * m * (c.f_s + c.b_s + c.w_s)
    return {
        "family": name,
        "ranks": p,
        "microbatches": m,
        "costs": [c.f_s, c.b_s, c.w_s, c.all_reduce_s],
        "bubble": _beside(promise.pp_bubble_s, timeline.max_span - work - exposed),
        "tp_bubble": _beside(promise.tp_bubble_s, exposed),
        "peak": _beside(promise.peak_chunks, 2 * max(timeline.peak_activations)),
    }


def _beside(paper: float, ours: float) -> Row:
    return {"paper": round(paper, 3), "ours": round(ours, 3), "difference": round(ours - paper, 3)}
