"""Some training steps in one of several processes, and digests of what comes of them."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import socket
from contextlib import suppress
from typing import Any, NoReturn

from jaxpipe.cli.train_verbs import ending_together
from jaxpipe.runtime.peers import Peers
from jaxpipe.runtime.processes import Processes, ProcessGroup, SingleProcess
from jaxpipe.train.devices import request_devices

M, SIZE, STEPS = 4, 2, 3


def steps(
    processes: Processes,
    *,
    schedule: str,
    ranks: int,
    layers: int = 4,
    dtype: str = "float32",
    tied: bool = True,
    dropout: float = 0.0,
    dp: int = 1,
    ep: int = 0,
    columns: int = 0,
    size: int = SIZE,
    cp: int = 1,
    tp: int = 1,
    zero1: bool = False,
    recompute: str = "none",
    measured: bool = False,
    folder: str = "",
    saved: str = "",
    transport: str = "tagged",
    ahead: bool = False,
    two_losses: bool = False,
    **options: Any,
) -> dict[str, str]:
    """Train some steps; return by layer a digest of its parameters and optimizer state, by name the bits of loss, norm and
    held-out loss. ``folder``: of checkpoints, to go on from and to save to; ``saved``: of folders of checkpoints to save to, by
    the number of processes. ``measured``: by measured costs, whose digest is told, too. ``ep``: a mixture of experts, over so
    many of dp. ``two_losses``: of a chain with one in its middle. ``ahead``: several processes begin each step early, after the
    first; of the steps before the last, one is clipped and one is not finite."""
    import jax
    import numpy as np
    import optax

    from jaxpipe.axes import RankMesh
    from jaxpipe.errors import ProgramError
    from jaxpipe.mesh import spec_of
    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.runtime.transfer import OffloadOptions
    from jaxpipe.schedule import generate, parse_schedule
    from jaxpipe.schedule.files import to_costs
    from jaxpipe.stage.model.reference import init_params
    from jaxpipe.train.run.agreement import devices_of
    from jaxpipe.train.settings.sections import PipelineConfig
    from jaxpipe.train.step import TrainStep
    from jaxpipe.train.trainer import Trainer
    from models.gpt import GPT
    from models.moe import MoE
    from tests.support import graph_models

    sizes: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "num_layers": layers, "num_heads": 2, "seq_len": 8}
    if ep:
        # The bias and the fractions follow from the counts of a step, after it.
        balance = {"balance": "batch", "router_bias": True, "bias_rate": 1e-3}
        model = MoE(**sizes, num_experts=4, expert_size=8, dropout=dropout, **balance)
    else:
        model = GPT(**sizes, tied=tied, dropout=dropout)
    mesh = RankMesh(dp=dp, ep=ep or 1, cp=cp, tp=tp, cp_method="ring", sequence=ep > 0 and tp > 1)
    if two_losses:
        model = graph_models.two_losses(dropout > 0)
    processes.arrange(ranks, mesh, columns)
    pipe = Pipeline.build(
        model,
        parse_schedule(schedule) if "\n" in schedule else generate(schedule, ranks, M, **options),
        microbatch_size=size,
        compute_dtype=dtype,
        tp=mesh,
        recompute=recompute,
        offload=OffloadOptions(1.0, None, True),
        devices=devices_of(PipelineConfig(ranks=ranks, dp=dp, cp=cp, tp=tp), "cpu", processes),
        processes=processes,
        transport=transport,
    )
    clip_norm, count = (0.73 if ep else 0.68, STEPS + 3) if ahead else (0.5, STEPS)
    mode = "on" if ahead and processes.number > 1 else "off"
    step = TrainStep(pipe, optax.adamw(1e-2), clip_norm=clip_norm, zero1=zero1, post_validation=mode)
    step.post_validation.steps_to_compare = 0
    trainer = Trainer.over(step).measured(1) if measured else Trainer.over(step)
    step = trainer.train_step
    state, rng = step.init(init_params(model, 0)), np.random.default_rng(0)
    if folder:
        state = trainer.restore(folder, default=state)
    scalars = []
    for n in range(count):
        ids = rng.integers(0, 32, (M, size, 9)).astype(np.int32)
        weights = np.ones((M, size, 8), np.float32)
        weights[0, 0, 0] = np.nan if ahead and n == 2 else 1
        batch = {"tokens": ids[..., :-1], "targets": ids[..., 1:], "weights": weights}
        if two_losses:
            rows = graph_models.rows(M * size, n).items()
            batch = {name: x.reshape(M, size, *x.shape[1:]) for name, x in rows}
        own = pipe.own_rows(M) if n == count - 1 else None
        read = batch
        if own is not None:
            flat = {name: x.reshape(M * size, *x.shape[2:])[own] for name, x in batch.items()}
            read = {name: x.reshape(M, -1, *x.shape[1:]) for name, x in flat.items()}
        state, metrics = step(state, read, jax.random.key(n), stop=n == 1 and processes.mine == processes.number - 1)
        scalars.append((metrics.stop, metrics.applied, metrics.grad_norm))
    stops, applied, norms = zip(*jax.device_get(scalars), strict=True)
    assert [bool(x) for x in stops] == [n == 1 for n in range(count)], "all hear of it after the same step"
    assert bool(metrics.finite)
    if ahead:
        assert 0 < sum(norm > clip_norm for norm in norms) < count - 1 and sum(applied) == count - 1, norms
    if mode == "on":
        assert step.post_validation.rollbacks == count - sum(norm <= clip_norm for norm in norms)
    if processes.number > 1:
        with suppress(ProgramError):
            pipe.loss_and_grads(state.compute, batch)
            raise AssertionError("other processes have ranks that it reads")
    for to in filter(None, (folder, saved and f"{saved}/{processes.number}")):
        trainer.save(state, to)
    reported = [float(value).hex() for value in (metrics.loss, *metrics.metrics.values())]
    sums = str(jax.tree.map(np.ndarray.tolist, metrics.sums)) if metrics.sums else ""
    digests = {"mean loss": " ".join(reported) + sums, "norm": float(metrics.grad_norm).hex()}
    digests["held out"] = pipe.evaluate(state.compute, batch)[0].hex()
    digests["costs"] = json.dumps(to_costs(step.pipeline.costs))
    if columns:
        trees, state = {}, state.committed()
        for r, s in state.master:
            specs = [spec_of(a) for a in pipe.functions[r, s].param_avals]
            compute = pipe.rank_views[r].widen(state.compute[r, s], specs)
            trees[f"stage {s}"] = (state.master[r, s], compute, state.optimizer[s])
    else:
        params, optimizer = step.by_layer(state)
        trees = {name: (tree, optimizer[name]) for name, tree in params.items()}
    for name, tree in trees.items():
        leaves = map(whole, jax.tree.leaves(tree))
        digests[name] = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
    return digests


def whole(array: Any) -> Any:
    """Return an array on the host; all processes that have some of it call this."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
        array = jax.jit(lambda x: x, out_shardings=everywhere)(array)
    return np.asarray(array)


def trained(processes: Processes, *, overrides: list[str], finds: list[str]) -> dict[str, str]:
    """Train with a search for better schedules that finds these families, and return what process 0 prints. The first one
    can't be built in the last process, and what is adopted measures slow; every process counts as slow."""
    from jaxpipe.errors import ProgramError
    from jaxpipe.runtime import pipeline
    from jaxpipe.schedule import Schedule, generate
    from jaxpipe.schedule.passes.braid import split_backwards
    from jaxpipe.search.solve import solver
    from jaxpipe.search.solve.solver import Found
    from jaxpipe.train import replan
    from jaxpipe.train.config import load_config
    from jaxpipe.train.loop import train
    from jaxpipe.train.run import run_directory, step_log
    from tests.support.train_runs import equal_seconds

    class Finds:
        def __init__(self, task: Any, options: Any) -> None:
            schedules = [split_backwards(generate(name, 2, M)) for name in finds]
            self.found = [[Found(schedule, "test")] for schedule in schedules]

        def take(self) -> list[Found]:
            return self.found.pop(0) if self.found else []

        def close(self) -> None:
            pass

    fails = [True] * (processes.mine == processes.number - 1)
    real = pipeline.lower

    def lower(schedule: Schedule, *args: Any) -> Any:
        if schedule.name == "solved-1" and fails:
            fails.clear()
            raise ProgramError("there is no room")
        return real(schedule, *args)

    pipeline.lower = lower  # type: ignore[assignment]
    solver.BackgroundSolve = Finds  # type: ignore[assignment, misc]
    replan.seconds_by_op = equal_seconds
    replan.Replanner.gains = property(lambda self: (0.0, -1.0) if self._before else (math.nan,) * 2)  # type: ignore[method-assign, assignment]
    run_directory.PICTURES = run_directory.PICTURES[:1]
    step_log._LEAST_PEERS, step_log._SLOW, step_log._SPREADS = 2, 0.0, -1e9
    printed = io.StringIO()
    train(load_config(None, overrides), printed, processes=processes)
    return {"printed": printed.getvalue()}


def put_between_cpus() -> None:
    """Let ``jax.device_put`` go between the CPUs of two processes as it does on GPUs, calls matched by order: over TCP, by
    JAX's transfers between data centres. In more processes each would have to make every call."""
    import jax

    from jaxpipe.runtime import transfer

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    jax.config.update("jax_cross_host_transfer_socket_address", address)
    jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0,127.0.0.1:0")
    jax.config.update("jax_cross_host_transfer_transfer_size", 1 << 20)
    vars(transfer)["puts_between_processes"] = lambda device: True


def main(port: int, number: int, process: int, cases: list[dict[str, Any]]) -> NoReturn:
    """Print the digests of each case, whose items are arguments of `steps` or `trained`, and end this process."""
    from tests.support import small_programs

    small_programs.collect_seldom()
    each = [math.prod(case.get(axis, 1) for axis in ("dp", "cp", "tp")) for case in cases]
    # In columns a process has fewer devices of more ranks: so many are enough for either.
    devices = max(
        -(-case.get("ranks", 2) * n // number) if case.get("columns") else -(-case.get("ranks", 2) // number) * n
        for case, n in zip(cases, each, strict=True)
    )
    processes = ProcessGroup(Peers("127.0.0.1", port, number, process), 60) if number > 1 else SingleProcess()
    with ending_together(processes):
        request_devices(devices, "cpu", processes=number)
        small_programs.share_context()
        if number > 1 and any(case.get("transport") == "nccl" for case in cases):
            put_between_cpus()
        processes.start_jax()
        print(json.dumps([(trained if "finds" in case else steps)(processes, **case) for case in cases]), flush=True)
    os._exit(0)


def put_behind(one: str, other: str) -> None:
    """Let this process dispatch action ``one``, and what it sends, behind action ``other``, from the second step on: after all
    have agreed on the order."""
    from jaxpipe.runtime.executor import Executor, StepInputs, StepOutputs
    from jaxpipe.train.run.ending import Watchdog

    run, took = Executor.run, Watchdog.took

    def run_in_other_order(self: Executor, inputs: StepInputs, **options: Any) -> StepOutputs:
        code = list(zip(self._code, self.instruction_kinds, strict=True))
        moved = [x for x, kind in code if str(x.action) == one and kind != "recv"]
        rest = [(x, kind) for x, kind in code if x not in moved]
        behind = 1 + next(k for k, (x, kind) in enumerate(rest) if str(x.action) == other and kind != "recv")
        self._code[:] = [x for x, _ in rest[:behind]] + moved + [x for x, _ in rest[behind:]]
        return run(self, inputs, **options)

    def take(self: Watchdog, seconds: float) -> None:
        took(self, seconds)
        Executor.run = run_in_other_order  # type: ignore[method-assign]

    Watchdog.took = take  # type: ignore[method-assign]


def wait_for_dispatches() -> None:
    """Let every dispatch wait for what it dispatches, as XLA lets those of small programs on CPUs."""
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
