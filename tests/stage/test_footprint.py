"""Footprints of compiled stage functions: what XLA reports agrees with the shapes, and nothing is compiled twice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.axes import RankMesh
from jaxpipe.mesh import batch_sharded, pipeline_submeshes, replicated
from jaxpipe.schedule import circular
from jaxpipe.stage.functions import UNKNOWN, compiled_footprint, device_bytes, footprint, total_device_bytes
from tests.support.pipelines import compiled

POINTER = 8
"""The CPU backend counts a table of pointers, one per result, into the results."""


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", ["F", "BW"])
def test_arguments_and_results_are_those_of_the_shapes(op: str) -> None:
    pipe = compiled("gpt", circular(2, 2))
    for stage in pipe.stages:
        function = stage.functions[op]
        memory = footprint(function)
        results = [a for k, a in enumerate(function.avals_out) if k not in function.forwarded]
        assert memory.argument_bytes == total_device_bytes(function.avals_in)
        assert 0 <= memory.output_bytes - total_device_bytes(results) <= POINTER * len(results)
        donated = total_device_bytes([function.avals_in[k] for k in function.donated])
        assert memory.alias_bytes == donated, "accumulators are written in place"
        assert memory.temp_bytes >= 0
        assert not memory.note
        assert memory.peak_bytes >= memory.argument_bytes


@pytest.mark.usefixtures("x64")
def test_a_function_is_compiled_once_for_footprint_and_runs(caplog: pytest.LogCaptureFixture) -> None:
    pipe = compiled("gpt", circular(2, 2))
    pipe.warm_up()
    with jax.log_compiles():
        for stage in pipe.functions.values():
            for op in ("F", "BW"):
                footprint(stage.functions[op])
        pipe.warm_up()
    text = [r.getMessage() for r in caplog.records]
    assert not [line for line in text if "XLA compilation of jit(F_stage" in line or "of jit(BW_stage" in line]


@pytest.mark.usefixtures("x64")
def test_a_footprint_is_remembered() -> None:
    function = compiled("gpt", circular(2, 2)).stages[1].functions["F"]
    assert footprint(function) is footprint(replace(function, op="F"))


def test_a_backend_that_does_not_tell_counts_as_zero() -> None:
    silent: Any = SimpleNamespace(memory_analysis=lambda: None)
    assert compiled_footprint(silent) is UNKNOWN
    assert UNKNOWN.peak_bytes == 0
    assert "does not report" in str(UNKNOWN)


def test_workspace_is_what_no_argument_or_result_holds() -> None:
    def square_twice(x: jax.Array) -> jax.Array:
        return (x @ x) @ (x @ x).T

    compiled_function = jax.jit(square_twice).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    memory = compiled_footprint(compiled_function)
    assert memory.argument_bytes == 64 * 64 * 4
    assert memory.temp_bytes >= 64 * 64 * 4, "x @ x has to be somewhere"


@pytest.mark.parametrize("dp", [1, 2])
def test_bytes_of_a_device_are_those_of_its_shard(dp: int) -> None:
    (mesh,) = pipeline_submeshes(1, RankMesh(dp=dp))
    split = jax.ShapeDtypeStruct((8, 5), jnp.bfloat16, sharding=batch_sharded(mesh))
    replicated_aval = jax.ShapeDtypeStruct((8, 5), jnp.bfloat16, sharding=replicated(mesh))
    assert device_bytes(split) == 80 // dp
    assert device_bytes(replicated_aval) == 80
    assert device_bytes(replicated_aval, align=256) == 256
    assert device_bytes(jax.ShapeDtypeStruct((0, 5), jnp.float32)) == 0
    array = jax.device_put(jnp.ones((8, 5), jnp.bfloat16), batch_sharded(mesh))
    assert device_bytes(array) == array.addressable_shards[0].data.nbytes
