"""Stages with the ports of real ones and nothing behind them: any schedule can be lowered, nothing is traced or compiled."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxpipe.schedule import Placement
from jaxpipe.stage.functions import Port, StageFunction, StageFunctions
from jaxpipe.stage.model.params import ParamLayout
from jaxpipe.stage.model.plan import StageLinks

AVAL = jax.ShapeDtypeStruct((2,), np.dtype("float32"))


def bare_stages(placement: Placement, params: int = 1, residuals: int = 1) -> list[StageFunctions]:
    """Return a stage each, whose functions read and make one array of every kind for each neighbour and microbatch, but
    ``params`` parameters and accumulators and so many ``residuals``."""
    return [_bare_stage(placement, s, params, residuals) for s in range(placement.num_stages)]


def _bare_stage(placement: Placement, s: int, num_params: int, num_residuals: int) -> StageFunctions:
    before, after = sorted(placement.predecessors(s)), sorted(placement.successors(s))
    span = placement.span[s]
    x, dx = ([Port(kind, k) for k in range(span * len(before))] for kind in ("x", "dx"))
    dy, y = [Port("dy", k) for k in range(len(after))], [Port("y") if after else Port("loss")]
    counts = {"param": num_params, "res": num_residuals, "wres": num_residuals, "acc": num_params}
    param, res, wres, acc = ([Port(kind, k) for k in range(count)] for kind, count in counts.items())  # type: ignore[arg-type]
    token = Port("token")

    def function(op: str, inputs: list[Port], outputs: list[Port]) -> StageFunction:
        nothing: Any = None
        avals = ((AVAL,) * len(inputs), (AVAL,) * len(outputs))
        return StageFunction(tuple(inputs), tuple(outputs), *avals, (), nothing, nothing, nothing, op=op)

    functions = [
        function("F", [*param, *x], [*y, *res, token]),
        function("B", [*param, *res, *dy], [*dx, *wres, token]),
        function("W", [*wres, *acc], [*acc, token]),
        function("BW", [*param, *res, *dy, *acc], [*dx, *acc, token]),
    ]
    links = StageLinks(
        takes=(tuple(~k for k in range(len(before))),),
        before=tuple((t, 0) for t in before),
        leaving=(0,) * bool(after),
        readers=tuple((t, (0,)) for t in after),
        losses=(0,) * (not after),
        x_learns=(True,) * len(before),
        y_learns=(True,) * bool(after),
        loss_learns=(True,) * (not after),
        span=span,
    )
    return StageFunctions(
        stage=s,
        functions={f.op: f for f in functions},
        evaluation=functions[0],
        x=None,
        y=None,
        links=links,
        data_names=(),
        uses_key=False,
        layout=ParamLayout((f"layer{s}",), (), (), 0, {}, {}),
        param_avals=(AVAL,),
        acc_avals=(AVAL,),
        residual_bytes=8,
        w_residual_bytes=8,
        cotangent_bytes=8,
        boundary_bytes=8,
        param_bytes=8,
        flops={},
        offloaded=(0,),
        offloadable_bytes=8,
        x_from=tuple((t, 0) for t in before),
        dy_from=tuple((t, sorted(placement.predecessors(t)).index(s)) for t in after),
    )
