"""Table 1 of `stp.txt` in closed form: pipeline bubble, TP bubble and peak memory of 1F1B-I, ZB-V and STP.

Source: `stp.txt` section 4.3, for p ranks, p ≪ m microbatches, two equal chunks per rank. T_F, T_B, T_W: compute of one chunk;
T_AR: its TP collectives, the same for F and B. Where the formulas and the simulator part (tests hold them to this):

* 1F1B-I: bubbles are exact for m a multiple of p and T_AR <= T_W. A rank holds one chunk more than 3p − 2, as in Megatron's
  warm-up.
* ZB-V: the TP bubble is exact where every B is split. The PP bubble is an upper bound by longest rank span: ours is found by
  search, and near 0; by makespan the ranks still wait (p − 1)(T_F + T_AR) for the first microbatch.
* STP: between slots the peak is exact, while a braid runs it is one chunk more. With F = B = W and no collectives the PP bubble
  is exact if rank r may put r W's off, which holds up to r chunks more. Ours is larger, since it keeps W's within the
  peak, and a slot F+B of the cool-down takes T_F − T_W longer than the BW beside it. The TP bubble leaves out the last
  collective of each braid without a W, one of n, and forwards of the warm-up that are not paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """Seconds of one chunk: T_F, T_B, T_W and T_AR of the paper."""

    f_s: float
    b_s: float
    w_s: float
    all_reduce_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Promise:
    """What Table 1 says of a schedule: seconds per rank and step; chunks of activations (M_a) on the fullest rank."""

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
    {"interleaved-1f1b": _interleaved, "v-zb": _zb_v, "stp": _stp}
)
"""Family -> its row: ``TABLE_1[family](p, m, costs)``."""
