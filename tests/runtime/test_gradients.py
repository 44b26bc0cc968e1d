"""Scheduling changes nothing: gradients through any schedule are those of the same functions run one after another (bit for
bit), and those of ``jax.value_and_grad`` of the unpipelined model (float64)."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import FAMILIES, Schedule, bidirectional, circular, generate, v_shape, wave
from jaxpipe.schedule.passes import unbraid
from tests.support.pipelines import (
    MODELS,
    assert_same_arrays,
    parameters,
    pipeline_for,
    random_batch,
    run_sequentially,
    sized,
    unpipelined,
)
from tests.support.schedule_strategies import random_schedule

pytestmark = pytest.mark.usefixtures("x64", "one_build")

SIZES = [(1, 3, 1), (2, 1, 1), (2, 5, 1), (4, 4, 1), (4, 7, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)]
"""(ranks, microbatches, chunks)."""
FEW_SIZES = [(2, 5, 1), (2, 4, 2)]
"""One rank: test_runtime_families.py."""


FAMILIES_HERE = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb")
"""Real models with a few families; every family with a small model: ``test_runtime_families.py``."""
ALWAYS = {"1f1b": "llama", "interleaved-1f1b": "gpt-tied", "zb-h1": "gpt-tied", "zb-2p": "llama"}
"""Families and the model of each; the others, and the sizes not in ``FEW_SIZES``, run in the soak."""


def _family_schedules() -> list[Any]:
    cases = []
    for name in FAMILIES_HERE:
        family = FAMILIES[name]
        for p, m, v in SIZES:
            if v > 1 and "chunks" not in family.options:
                continue
            limit = 1.5 * p if "memory_limit" in family.options else None
            chunks = v if "chunks" in family.options else None
            try:
                schedule = generate(name, p, m, chunks=chunks, memory_limit=limit)
            except Exception:  # sizes that this family refuses (its own tests say which)
                continue
            for model in MODELS:
                usual = (p, m, v) in FEW_SIZES and ALWAYS.get(name) == model
                marks = [] if usual else [pytest.mark.soak]
                cases.append(pytest.param(schedule, model, id=f"{name}-p{p}-m{m}-v{v}-{model}", marks=marks))
    return cases


def _check(name: str, schedule: Schedule, seed: int = 0, recompute: str | tuple[str, ...] = "none") -> None:
    name = sized(name, schedule)
    pipe = pipeline_for(name, schedule, recompute)
    batch = random_batch(schedule.num_microbatches, seed)
    params = pipe.place(parameters(name))
    out = pipe.run(params, {at: pipe.zeros(at) for at in pipe.own_instances}, batch)
    acc, losses = run_sequentially(pipe, schedule, params, batch)
    assert_same_arrays(dict(out.acc), acc)
    assert_same_arrays(list(out.losses), losses)


@pytest.mark.parametrize(("schedule", "name"), _family_schedules())
def test_family_is_bit_equal_to_sequential_and_close_to_unpipelined(name: str, schedule: Schedule) -> None:
    name = sized(name, schedule)
    _check(name, schedule)
    batch = random_batch(schedule.num_microbatches)
    pipe = pipeline_for(name, schedule)
    loss, grads = pipe.loss_and_grads(pipe.place(parameters(name)), batch)
    expected_loss, expected = unpipelined(name, batch)
    np.testing.assert_allclose(np.asarray(loss), np.asarray(expected_loss), rtol=1e-10)
    got_leaves, got_tree = jax.tree.flatten(grads)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    assert got_tree == expected_tree
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10, atol=1e-12)


PLACEMENTS = [circular(2, 2), v_shape(2), circular(3, 1), wave(2, 3), bidirectional(2)]


RANDOM = given(
    which=st.integers(0, len(PLACEMENTS) - 1),
    m=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    offload=st.sampled_from([0.0, 0.4]),
)


@settings(max_examples=8)
@RANDOM
def test_random_schedules_are_bit_equal_to_sequential(which: int, m: int, seed: int, offload: float) -> None:
    check_random(which, m, seed, offload)


@pytest.mark.soak
@settings(max_examples=150)
@RANDOM
def test_150_random_schedules(which: int, m: int, seed: int, offload: float) -> None:
    check_random(which, m, seed, offload)


def check_random(which: int, m: int, seed: int, offload: float) -> None:
    """Braided slots as separate calls; as one function each they are in test_runtime_braids.py."""
    schedule = unbraid(random_schedule(PLACEMENTS[which], m, random.Random(seed), offload=offload, braid=0.2))
    with jax.enable_x64(True):
        _check("gpt-tied", schedule, seed)


EACH_ITS_OWN = ("cheap", "cheap+attention+mlp", "full", "mlp")


@pytest.mark.parametrize(
    ("name", "ranks", "recompute"),
    [
        pytest.param("gpt", 2, "cheap", marks=pytest.mark.soak),
        pytest.param("gpt", 2, "full", marks=pytest.mark.soak),
        ("gpt", 4, EACH_ITS_OWN),
        ("llama", 4, EACH_ITS_OWN),
    ],
)
def test_recompute_policies_give_the_unpipelined_gradient(
    name: str, ranks: int, recompute: str | tuple[str, ...]
) -> None:
    """Not bit-equal: XLA fuses recomputed values differently from saved ones (4e-16 of the largest gradient was seen)."""
    schedule = generate("zb-h1", ranks, 4)
    _check(name, schedule, recompute=recompute)
    batch = random_batch(4)
    pipe = pipeline_for(name, schedule, recompute)
    _, grads = pipe.loss_and_grads(pipe.place(parameters(name)), batch)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(unpipelined(name, batch)[1]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10, atol=1e-12)


def test_dropout_does_not_depend_on_cut_or_schedule() -> None:
    batch = random_batch(4)
    key = jax.random.key(7)
    grads = []
    for schedule in (generate("1f1b", 1, 4), generate("zb-h1", 2, 4), generate("interleaved-1f1b", 2, 4, chunks=2)):
        pipe = pipeline_for("gpt-tied", schedule, dropout=0.3)
        loss, grad = pipe.loss_and_grads(pipe.place(parameters("gpt-tied")), batch, key)
        grads.append((loss, grad))
    for other in grads[1:]:
        for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10, atol=1e-12)
    plain = pipeline_for("gpt-tied", generate("1f1b", 2, 4))
    without, _ = plain.loss_and_grads(plain.place(parameters("gpt-tied")), batch)
    assert abs(float(without) - float(grads[0][0])) > 1e-6, "dropout did nothing"


def test_dropout_needs_a_key() -> None:
    from jaxpipe.errors import ProgramError

    pipe = pipeline_for("gpt-tied", generate("1f1b", 1, 2), dropout=0.3)
    with pytest.raises(ProgramError, match="PRNG key"):
        pipe.loss_and_grads(pipe.place(parameters("gpt-tied")), random_batch(2))
