"""Numbers printed in the papers, which ``paper_tables.py`` puts beside ours. Facts only; nothing here is computed.

`controllable-memory.txt`: table 4's bubble rates in percent, with the costs of table 5 (first microbatch size, milliseconds per
V-chunk; a rank's share is two chunks) and the transfer times with which the printed rates reproduce (FACTS.md). Table 4 prints
74 rates: V-ZB on the 21B model with 384 microbatches is missing. (1F1B-R's are those of 1F1B.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """A column group of table 4. ``chunk_ms``: F, B, W of one chunk. ``comm_ms``: one transfer between ranks."""

    name: str
    ranks: int
    chunk_ms: tuple[float, float, float]
    comm_ms: float
    microbatches: tuple[int, ...]


MODELS = (
    Model("9.6B", 16, (12.96, 13.22, 9.76), 1.34, (16, 32, 64, 128, 256)),
    Model("21B", 24, (9.30, 9.47, 7.19), 0.89, (24, 48, 96, 192, 384)),
    Model("38.5B", 32, (6.72, 6.89, 5.06), 0.577, (32, 64, 128, 256, 512)),
)

TABLE_4: dict[str, tuple[tuple[float | None, ...], ...]] = {
    "v-zb": (
        (18.7, 8.88, 4.57, 2.32, 1.16),
        (18.9, 8.51, 4.39, 2.19, None),
        (18.7, 8.61, 4.3, 2.24, 1.14),
    ),
    "zb-1p": (
        (31.7, 20.1, 11.2, 5.92, 3.06),
        (31.5, 19.8, 11.0, 5.82, 3.0),
        (32.1, 20.1, 11.1, 5.89, 3.04),
    ),
    "v-half": (
        (40.5, 24.2, 13.8, 7.41, 3.84),
        (41.3, 24.6, 14.0, 7.5, 3.89),
        (42.0, 24.9, 14.3, 7.6, 3.97),
    ),
    "1f1b": (
        (50.1, 34.3, 21.7, 13.5, 8.76),
        (50.5, 34.6, 21.9, 13.5, 8.67),
        (50.7, 34.6, 21.8, 13.4, 8.44),
    ),
    "v-min": (
        (48.4, 36.5, 28.0, 23.1, 20.3),
        (47.8, 35.8, 27.4, 21.9, 19.1),
        (48.6, 36.5, 27.8, 22.5, 19.5),
    ),
}

TABLE_1_MEMORY = {"1f1b": (1.0, 6.0), "v-min": (1 / 3, 4.0), "v-half": (1 / 2, 3.0), "v-zb": (1.0, 0.0)}
"""`controllable-memory.txt` table 1: peak memory ÷ 1F1B's, and bubble ÷ d in units of one chunk's F = B = W; small constants
are left out there."""

ACTIVATION_GB: dict[str, dict[str, float]] = {
    "9.6B": {"1f1b": 46, "v-half": 28, "v-min": 19, "v-zb": 48},
    "21B": {"1f1b": 42, "v-half": 24, "v-min": 17, "v-zb": 43},
    "38.5B": {"1f1b": 35, "v-half": 19, "v-min": 14, "v-zb": 36},
}
"""`controllable-memory.txt` table 4, activation memory in GB, the same at every number of microbatches."""

STP_PEAK_GB: dict[tuple[int, int], dict[str, float]] = {
    (4, 4): {"v-zb": 30, "interleaved-1f1b": 41},
    (8, 2): {"v-zb": 24, "interleaved-1f1b": 31},
    (2, 8): {"v-zb": 42, "interleaved-1f1b": 58},
}
"""`stp.txt` tables 5 and 8, peak memory in GB of the 12.1B model at sequence 6144 by (TP, PP)."""

STP_THROUGHPUT: dict[tuple[str, int, int, int], dict[int, tuple[float, float, float]]] = {
    ("12.1B", 3072, 4, 4): {64: (9.52, 9.12, 9.87), 128: (9.63, 9.26, 10.1), 192: (9.66, 9.31, 10.1)},
    ("12.1B", 3072, 8, 2): {64: (6.57, 6.42, 7.28), 128: (6.60, 6.46, 7.32), 192: (6.60, 6.46, 7.33)},
    ("12.1B", 6144, 4, 4): {64: (4.51, 4.45, 4.74), 128: (4.57, 4.48, 4.82), 192: (4.58, 4.49, 4.83)},
    ("12.1B", 6144, 8, 2): {64: (3.11, 3.13, 3.46), 128: (3.13, 3.13, 3.47), 192: (3.11, 3.13, 3.49)},
    ("26.3B", 2048, 4, 8): {96: (12.3, 12.4, 13.0), 176: (12.8, 12.7, 13.2), 256: (12.7, 12.8, 13.4)},
    ("26.3B", 2048, 8, 4): {96: (8.60, 8.71, 9.48), 176: (8.67, 8.79, 9.56), 256: (8.68, 8.79, 9.61)},
    ("26.3B", 4096, 4, 8): {96: (6.16, 6.17, 6.33), 176: (6.17, 6.28, 6.49), 256: (6.28, 6.31, 6.51)},
    ("26.3B", 4096, 8, 4): {96: (4.23, 4.26, 4.66), 176: (4.24, 4.28, 4.70), 256: (4.25, 4.29, 4.72)},
}
"""`stp.txt` table 6: samples a second of 1F1B-I, ZB-V and STP by (model, sequence, TP, PP) and number of microbatches."""

STP_MEMORY_GB: dict[tuple[str, int, int, int], tuple[float, float, float]] = {
    ("12.1B", 3072, 4, 4): (41, 30, 53),
    ("12.1B", 3072, 8, 2): (31, 24, 43),
    ("12.1B", 6144, 4, 4): (41, 30, 54),
    ("12.1B", 6144, 8, 2): (31, 24, 43),
    ("26.3B", 2048, 4, 8): (55, 38, 72),
    ("26.3B", 2048, 8, 4): (43, 32, 59),
    ("26.3B", 4096, 4, 8): (55, 38, 72),
    ("26.3B", 4096, 8, 4): (43, 32, 59),
}
"""`stp.txt` table 5: peak memory in GB of 1F1B-I, ZB-V and STP."""

STP_TABLE_10: dict[tuple[int, int, int], tuple[int, tuple[float, float, float]]] = {
    (12288, 2, 1): (128, (2.64, 2.61, 2.71)),
    (4096, 1, 2): (256, (9.22, 9.16, 9.40)),
}
"""`stp.txt` table 10, 12.1B, TP 2, PP 4: by (sequence, CP, DP) samples a step, and samples a second of 1F1B-I, ZB-V, STP."""

STP_EXPOSED = (8, 6144, 0.275)
"""`stp.txt` figure 1 and section 1: at this TP and sequence this part of a layer's forward is TP communication."""

STP_CHUNK_GB = 3.6
"""`stp.txt` appendix C: activations of one microbatch in one virtual stage of ZB-V at TP 8."""

VLM_THROUGHPUT: dict[tuple[str, int, int], tuple[dict[int, tuple[float, float, float]], tuple[float, float, float]]] = {
    ("14.9B", 8, 2): ({64: (2.42, 2.48, 2.86), 128: (2.44, 2.49, 2.86), 192: (2.46, 2.49, 2.87)}, (26, 30, 51)),
    ("28.8B", 8, 4): ({96: (3.37, 3.51, 3.72), 176: (3.40, 3.53, 3.80), 256: (3.40, 3.53, 3.80)}, (43, 38, 47)),
    ("14.9B", 4, 4): ({64: (4.36, 4.25, 4.53), 128: (4.44, 4.30, 4.63), 192: (4.46, 4.31, 4.65)}, (40, 30, 56)),
    ("30.3B", 4, 8): ({96: (5.79, 5.90, 5.97), 176: (5.89, 5.97, 6.19), 256: (5.85, 6.01, 6.19)}, (60, 48, 69)),
}
"""`stp.txt` table 3: samples a second of 1F1B-I, ZB-V and STP by (model, TP, PP) and number of microbatches; and GB of each."""
