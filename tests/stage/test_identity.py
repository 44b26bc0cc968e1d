"""Digests of programs: equal for what computes the same, in any process; different for other values of constants."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.stage.identity import program_digest
from jaxpipe.train.checkpoints.stored import model_digest
from models.gpt import GPT
from tests.support.train_runs import ROOT

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
        (called_back(doubled), called_back(tripled)),  # by name
    ],
)
def test_digests_tell_what_is_computed(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert digest(function) == digest(lambda y: function(y))
    assert digest(function) != digest(other)


def test_digests_are_the_same_in_another_process() -> None:
    code = (
        "from models.gpt import GPT; from jaxpipe.train.checkpoints.stored import model_digest; "
        f"print(model_digest(GPT(**{TINY}))['sha256'])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == model_digest(GPT(**TINY))["sha256"]
    assert model_digest(GPT(**{**TINY, "dropout": 0.5})) == model_digest(GPT(**TINY))
    assert model_digest(GPT(**{**TINY, "num_heads": 4})) != model_digest(GPT(**TINY))
