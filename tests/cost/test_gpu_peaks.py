"""Predicted peaks against those that an H200's allocator reported (``scripts/results/gpu-h200.json``), and that allocator."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.cost.memory import LARGEST_REST, Chunks, account
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.transfer import OffloadOptions
from jaxpipe.schedule import generate
from jaxpipe.stage.functions import Footprint
from models.gpt import GPT
from tests.support.paths import ROOT
from tests.support.virtual_gpu import H200

RANKS, M, STAGES = 4, 8, 8
SIZES = {size["hidden"]: size for size in json.loads((ROOT / "scripts/results/gpu-h200.json").read_text())["sizes"]}


def peaks(hidden: int, families: list[str]) -> dict[str, tuple[float, float]]:
    """Return predicted ÷ measured peak of rank 1, alone on the card, by family, and the ratio without what a GPU adds."""
    size = SIZES[hidden]
    model = GPT(vocab_size=32768, d_model=hidden, num_layers=STAGES, num_heads=hidden // 128, seq_len=4096, tied=False)
    cuts = [0, *range(2, STAGES + 1), len(model.layers)]
    pipe = Pipeline.build(
        model,
        generate("po", RANKS, M),
        microbatch_size=1,
        boundaries=list(pairwise(cuts)),
        devices=[jax.devices()[0]] * RANKS,
        compute_dtype=jnp.bfloat16,
        recompute="flash",
        offload=OffloadOptions(host_memory_bytes=1e15, fallback=True),
    )
    workspace = {
        id(f.jitted): Footprint(temp_bytes=size["split"]["functions"][op]["temp_bytes"], alias_bytes=1 << 60)
        for stage in pipe.stages
        for op, f in stage.functions.items()
    }
    ratios = {}
    for step in size["steps"]:
        if step["schedule"] in families:
            # The orders of that day took copies to be free.
            rank = pipe.with_schedule(generate(step["schedule"], RANKS, M), H200[hidden].costs()).alone(1, Any)
            by_align = [
                account(
                    rank.local_programs,
                    rank.order,
                    rank.functions,
                    num_microbatches=M,
                    timeline=rank.predicted_timeline(),
                    footprint_of=lambda f: workspace[id(f.jitted)],
                    align=align,
                    all_programs=rank.programs,
                ).peak_bytes[0]
                for align in (256, 1)
            ]
            ratios[step["schedule"]] = tuple(peak / step["measured_peak_bytes"] for peak in by_align)
    return ratios  # type: ignore[return-value]


@pytest.mark.parametrize(("hidden", "families"), [(4096, ["po", "po-h", "po-f"]), (8192, ["po"])])
def test_predicted_peaks_are_those_of_a_card(hidden: int, families: list[str]) -> None:
    """Predictions lacked rests of chunks, and what a recorder keeps that waits for receives. Attention is XLA's here, and was
    cuDNN's, which keeps half a megabyte more: with it the ratios are 0.994 to 1.020, and were 0.934 to 0.982."""
    ratios = peaks(hidden, families)
    assert set(ratios) == set(families)
    for family, (ratio, before) in ratios.items():
        assert 0.98 <= ratio <= 1.02, family
        assert before < ratio, family


def test_chunks_are_divided_where_the_rest_is_worth_it() -> None:
    chunks = Chunks()
    (first, _), (second, _), _ = (chunks.take(n) for n in (700, 600, 300))
    chunks.give_back(first)
    assert chunks.take(400) == (first, 300), "the rest is less than was asked for"
    chunks.give_back(first)
    assert chunks.take(300) == (first, 0), "it would be more than half"
    chunks.give_back(first)
    chunks.give_back(second)
    assert chunks.take(1300) == (first, 0), "neighbours are one"
    chunks = Chunks()
    large, _ = chunks.take(3 * LARGEST_REST)
    chunks.take(1)
    chunks.give_back(large)
    assert chunks.take(2 * LARGEST_REST + 1) == (large, LARGEST_REST - 1)
    chunks.give_back(large)
    assert chunks.take(2 * LARGEST_REST) == (large, 0)


def test_chunks_never_overlap_and_all_come_back() -> None:
    chunks, rng = Chunks(), random.Random(0)
    held: dict[int, int] = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            chunk = rng.choice([*held])
            del held[chunk]
            chunks.give_back(chunk)
            continue
        n = rng.randrange(1, 1 << rng.randrange(1, 30))
        chunk, padding = chunks.take(n)
        assert all(chunk + n + padding <= other or other + size <= chunk for other, size in held.items())
        assert padding < n and padding < LARGEST_REST
        held[chunk] = n + padding
    for chunk in held:
        chunks.give_back(chunk)
    assert chunks.take(1 << 50) == (0, 0)
