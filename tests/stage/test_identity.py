"""Digests of programs: equal for what computes the same, in any process; different for other values of constants."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.stage.identity import program_digest
from jaxpipe.train.checkpoints.which_model import model_digest
from models.gpt import GPT
from tests.support.paths import ROOT

TINY = {"vocab_size": 11, "seq_len": 4, "d_model": 8, "num_layers": 1, "num_heads": 2}


def digest(function: Callable[..., Any]) -> str:
    return program_digest(jax.make_jaxpr(function)(jnp.ones(3)))


def doubled(x: Any) -> Any:
    return 2 * x


def tripled(x: Any) -> Any:
    return 3 * x


def called_back(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.pure_callback(function, jax.ShapeDtypeStruct((3,), jnp.float32), x)


TABLE = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (lambda x: x + TABLE, lambda x: x + (TABLE + 1)),
        (lambda x: jax.jit(lambda y: y * TABLE)(x), lambda x: jax.jit(lambda y: y * TABLE[::-1])(x)),
        (
            lambda x: jax.lax.scan(lambda c, _: (c + TABLE, c), x, None, 2)[0],
            lambda x: jax.lax.scan(lambda c, _: (c - TABLE, c), x, None, 2)[0],
        ),
        (lambda x: x + 1.0, lambda x: x + 1.5),
        (lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.bfloat16)),
        (called_back(doubled), called_back(tripled)),
    ],
)
def test_digests_tell_what_is_computed(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert digest(function) == digest(lambda y: function(y))
    assert digest(function) != digest(other)


def test_digests_are_the_same_in_another_process() -> None:
    code = (
        "from models.gpt import GPT; from jaxpipe.train.checkpoints.which_model import model_digest; "
        f"print(model_digest(GPT(**{TINY})))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    digest = model_digest(GPT(**TINY))
    assert child.stdout.strip() == str(digest)
    dropping = model_digest(GPT(**{**TINY, "dropout": 0.5}))
    assert {name for name in digest if digest[name] != dropping[name]} == {"training"}
    other_heads = model_digest(GPT(**{**TINY, "num_heads": 4}))
    assert {name for name in digest if digest[name] != other_heads[name]} == {"sha256", "evaluation", "training"}


# -- callbacks, by what they do -------------------------------------------------------------------------------------------


def twice(x: Any) -> Any:
    return x * 2.0


class Scaled:
    """An object that can be called, and counts its calls."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x * self.factor


def callback(function: Callable[[Any], Any]) -> str:
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    return program_digest(jax.make_jaxpr(lambda x: jax.pure_callback(function, shape, x))(jnp.ones(3)))


def scaled_by(factor: Any) -> Callable[[Any], Any]:
    return lambda x: x * factor


def chain_of(factor: float) -> Callable[[Any], Any]:
    inner = scaled_by(factor)
    return lambda x: inner(twice(x))


FORMS: list[Callable[[Any], Any]] = [
    scaled_by,
    chain_of,
    Scaled,
    lambda factor: Scaled(factor).__call__,
    lambda factor: partial(np.multiply, factor),
    lambda factor: partial(chain_of, factor=factor),
    lambda factor: scaled_by(np.full(3, factor)),
    lambda factor: scaled_by((factor, 1)),
    lambda factor: eval(f"lambda x: x * {factor!r}", {}),
    lambda factor: eval("lambda x: x * factor", {"factor": factor}),
    lambda factor: eval(f"lambda x, factor={factor!r}: x * factor", {}),
    lambda factor: eval(f"lambda x: (lambda y: y * {factor!r})(x)", {}),
]


@pytest.mark.parametrize("form", range(len(FORMS)))
@given(factor=st.floats(-9, 9), other=st.floats(-9, 9))
@settings(max_examples=5, deadline=None)
def test_callbacks_are_the_same_by_what_they_do(form: int, factor: float, other: float) -> None:
    make = FORMS[form]
    assert callback(make(factor)) == callback(make(factor))
    assert (callback(make(factor)) == callback(make(other))) is (repr(factor) == repr(other))


def test_what_a_callback_changes_itself_is_not_what_it_does() -> None:
    counting = Scaled(2.0)
    before = callback(counting)
    counting(1.0)
    assert counting.calls == 1 and callback(counting) == before
