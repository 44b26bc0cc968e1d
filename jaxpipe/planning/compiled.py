"""Exact workspace of stage functions: compiled by XLA for a GPU that need not be there, or for this machine's CPU.

A stage of more than three equal layers is compiled with one and with two of them; the workspace of n is taken to grow
linearly (with unrolled layers it mostly stays). Autotuning is off, since it would have to run kernels: real runs may choose
algorithms with other workspace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe._jax_compat import compile_only_devices
from jaxpipe.mesh import AXES
from jaxpipe.planning.stages import StageKey, Workbench
from jaxpipe.planning.targets import Target, device_text
from jaxpipe.stage.compiled.footprint import compiled_footprint

_OPTIONS = {"xla_gpu_autotune_level": "0"}
_MOST_EQUAL = 3


class Compiler:
    """``temp_of`` of a :class:`~jaxpipe.planning.stages.Workbench`: workspace in bytes of one of the rank's ``tp`` devices.

    ``notice`` is told once why no more is compiled, if so; from then on workspace is estimated. ``budget_s``: no compilation
    starts after as many seconds of it. ``count``: functions compiled, in ``spent_s`` seconds.
    """

    def __init__(self, target: Target, notice: Callable[[str], None], budget_s: float = 60.0, tp: int = 1) -> None:
        self.notice, self.budget_s, self.count, self.spent_s = notice, budget_s, 0, 0.0
        self.mesh: Mesh | None = None
        here = target.chip is None and target.name == "cpu" and tp == 1
        self._options = {} if here else _OPTIONS
        devices: Sequence[jax.Device] | str = f"target {target.name} has no 'chip' numbers"
        if here:
            devices = jax.devices("cpu")[:1]
        elif target.chip is not None:
            devices = compile_only_devices(target.name, device_text(target), tp)
        self.works = not isinstance(devices, str)
        if isinstance(devices, str):
            self._stop(devices)
        else:
            self.mesh = Mesh(np.array([devices], dtype=object), AXES)

    def _stop(self, reason: str) -> None:
        self.works = False
        self.notice(f"workspace is estimated from the jaxprs where it was not compiled: {reason}")

    def __call__(self, bench: Workbench, stage: StageKey, op: str) -> float | None:
        one, more = _shorter(stage, 1)
        short = self._compiled(bench, one, op)
        if short is None or more == 0:
            return short
        long = self._compiled(bench, _shorter(stage, 2)[0], op)
        return None if long is None else short + more * max(0.0, long - short)

    def _compiled(self, bench: Workbench, stage: StageKey, op: str) -> float | None:
        if not self.works:
            return None
        if self.spent_s > self.budget_s:
            self._stop(f"{self.budget_s:g} s were spent on compiling {self.count} functions; the rest is estimated")
            return None
        start, function = time.monotonic(), bench.functions_of(stage).functions[op]
        if len(function.forwarded) == len(function.outputs):
            return 0.0
        try:
            lowered = function.jitted.lower(*function.avals_in)
            temp = float(compiled_footprint(lowered.compile(compiler_options=self._options)).temp_bytes)
        except Exception as error:
            self._stop(f"XLA says {str(error).splitlines()[0][:160]}")
            return None
        took = time.monotonic() - start
        self.count += 1
        self.spent_s += took
        bench.progress(f"compiled {op} of {stage}: {temp / 1e6:,.1f} MB workspace, {took:.1f} s")
        return temp


def _shorter(stage: StageKey, kept: int) -> tuple[StageKey, int]:
    """The stage with each long run of the same layer cut to ``kept`` of them, and how many fewer the longest run has."""
    runs = [list(run) for _, run in groupby(range(len(stage.layers)), key=lambda i: stage.layers[i].code)]
    dropped = {i for run in runs if len(run) > _MOST_EQUAL for i in run[kept:]}
    if not dropped or any(len(stage.links.takes[i]) != 1 for i in dropped):
        return stage, 0
    layers = tuple(layer for i, layer in enumerate(stage.layers) if i not in dropped)
    return replace(stage, layers=layers, links=stage.links.without(dropped)), max(map(len, runs)) - kept
