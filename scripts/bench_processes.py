"""Measure the cost of dividing a pipeline between processes: step time of several ÷ that of one on the same cores, and the
host's time to send and to receive between two of them and within one. Prints one JSON object.

    python scripts/bench_processes.py > scripts/results/processes.json      # the quick start's model, 4 ranks, 4 processes
    python scripts/bench_processes.py --ranks 2 --processes 2 --columns 2 --schedule v-zb

With ``--columns`` instead: one group of processes, in so many columns, with dp as large, whose gradients are reduced in the
pipeline and after it, in turns; and what of the reductions of a recorded step lay under compute of their rank.

Both are there the whole time and take turns (A B A B …), the others asleep; medians over rounds. ``step_s``: between two
barriers of all processes, by the number of steps; scalars are read one step late, as in training. ``cpu_s``: seconds of
processor time of all processes a step. ``host_us``: processor time of the dispatching thread for one message of the model's
activations: ``tagged`` to another process (JAX's transfer server), ``in_process`` to another device of this one; ``arrives``:
until what was sent is there (of two, there and back, half), by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpipe.runtime.peers import Peers
from jaxpipe.runtime.processes import Processes, ProcessGroup, SingleProcess
from jaxpipe.train.config import load_config
from jaxpipe.train.devices import keep_heap, request_devices
from scripts.provenance import commit_id, describe_machine

CONFIG = Path(__file__).with_name("quickstart.toml")
_MESSAGES = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--columns", type=int, default=0, help="of the processes; then what reducing early is worth")
    parser.add_argument("--zero1", action="store_true", help="with --columns")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--cores", type=int, default=2, help="that all of it may use")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to scripts/quickstart.toml")
    parser.add_argument("--worker", nargs=3, type=int, metavar=("PORT", "NUMBER", "MINE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args, *args.worker)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    if args.columns:
        return compare_reductions(args)
    one, several = Group(1), Group(args.processes)
    turns: dict[int, list[dict[str, float]]] = {1: [], args.processes: []}
    for _ in range(args.rounds + 1):
        for group in (one, several):
            turns[group.number].append(group.ask(f"steps {args.steps}"))
    messages = {"in_process": one.ask("messages"), "tagged": several.ask("messages")}
    for group in (one, several):
        group.end()
    single_turns, several_turns = (records[1:] for records in turns.values())  # the first turn compiles
    report: dict[str, Any] = {
        "what": "jaxpipe in several processes",
        "command": " ".join(["python", *sys.argv]),
        "commit": commit_id(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(args.cores),
        "ranks": args.ranks,
        "processes": args.processes,
        "microbatches": args.microbatches,
        "schedule": args.schedule,
        "rounds": args.rounds,
        "step_s": {"1": _median(single_turns, "step_s"), str(args.processes): _median(several_turns, "step_s")},
        "cpu_s": {"1": _median(single_turns, "cpu_s"), str(args.processes): _median(several_turns, "cpu_s")},
        "step_ratio": statistics.median(
            b["step_s"] / a["step_s"] for a, b in zip(single_turns, several_turns, strict=True)
        ),
        "step_ratios": [round(b["step_s"] / a["step_s"], 3) for a, b in zip(single_turns, several_turns, strict=True)],
        "cpu_ratio": statistics.median(
            b["cpu_s"] / a["cpu_s"] for a, b in zip(single_turns, several_turns, strict=True)
        ),
        "host_us": messages,
    }
    print(json.dumps(report, indent=1))
    return 0


def compare_reductions(args: argparse.Namespace) -> int:
    """Print what reducing gradients in the pipeline is worth against reducing them after it."""
    group = Group(args.processes)
    turns: dict[str, list[dict[str, float]]] = {"steps": [], "after": []}
    for _, how in product(range(args.rounds + 1), turns):
        turns[how].append(group.ask(f"{how} {args.steps}"))
    within, after = (records[1:] for records in turns.values())  # the first turn compiles
    recorded = [group.ask("record") for _ in range(args.rounds)]
    group.end()
    report = {
        "what": "gradients reduced in the pipeline, and after it",
        "command": " ".join(["python", *sys.argv]),
        "commit": commit_id(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(args.cores),
        "step_s": {"in": _median(within, "step_s"), "after": _median(after, "step_s")},
        "step_ratio": statistics.median(a["step_s"] / b["step_s"] for a, b in zip(within, after, strict=True)),
        "step_ratios": [round(a["step_s"] / b["step_s"], 3) for a, b in zip(within, after, strict=True)],
        "cpu_ratio": statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in zip(within, after, strict=True)),
        "recorded": {name: _median(recorded, name) for name in recorded[0]},
    }
    print(json.dumps(report, indent=1))
    return 0


def _median(records: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(x[name] for x in records)


class Group:
    """``number`` processes that hold one pipeline; process 0 is told what to do, line by line."""

    def __init__(self, number: int) -> None:
        self.number = number
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._children = [
            subprocess.Popen(
                [sys.executable, *sys.argv, "--worker", str(port), str(number), str(mine)],
                stdin=subprocess.DEVNULL if mine else subprocess.PIPE,
                stdout=subprocess.DEVNULL if mine else subprocess.PIPE,
                text=True,
            )
            for mine in range(number)
        ]

    def ask(self, what: str) -> dict[str, float]:
        """Return the answer of process 0."""
        first = self._children[0]
        assert first.stdin is not None and first.stdout is not None
        print(what, file=first.stdin, flush=True)
        # gloo prints lines of its own
        answer: dict[str, float] = json.loads(next(line for line in first.stdout if line.startswith("{")))
        return answer

    def end(self) -> None:
        first = self._children[0]
        assert first.stdin is not None
        first.stdin.close()
        for child in self._children:
            child.wait(60)


# -- in the processes of a group ------------------------------------------------------------------------------------------


def work(args: argparse.Namespace, port: int, number: int, mine: int) -> int:
    processes: Processes = ProcessGroup(Peers("127.0.0.1", port, number, mine), 60) if number > 1 else SingleProcess()
    if args.columns:
        from jaxpipe.axes import RankMesh

        processes.arrange(args.ranks, RankMesh(dp=args.columns), args.columns)
    request_devices(len(processes.ranks(args.ranks)[mine]), "cpu", processes=number)
    keep_heap()
    processes.start_jax()
    train, step, shape = trained(args, processes)
    within = step.pipeline
    read_command = sys.stdin.readline if mine == 0 else str
    while words := processes.broadcast("command", read_command().strip()).split():
        step.pipeline = within.with_reductions({}) if words[0] == "after" else within
        if words[0] == "record":
            answer = reductions_under_compute(train(record=True))
        elif words[0] == "messages":
            answer = messages(processes, within, shape)
        else:
            answer = steps(processes, train, int(words[1]))
        if mine == 0:
            print(json.dumps(answer), flush=True)
    processes.leave()
    os._exit(0)


def trained(args: argparse.Namespace, processes: Processes) -> tuple[Callable[..., Any], Any, tuple[int, ...]]:
    """Return a function that runs one more step, the training step, and the shape of an activation."""
    import jax
    import numpy as np
    import optax

    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.schedule import generate
    from jaxpipe.stage.model.reference import init_params, resolve_model
    from jaxpipe.train.run.agreement import devices_of
    from jaxpipe.train.step import TrainStep

    dp = [f"pipeline.dp={args.columns}"] if args.columns else []
    config = load_config(CONFIG, [f"pipeline.ranks={args.ranks}", "run.platform=cpu", *dp, *args.overrides])
    options = {"vocab_size": 256, "seq_len": config.data.seq_len, **config.model.options}
    model = resolve_model(config.model.target, options)
    pipe = Pipeline.build(
        model,
        generate(args.schedule, args.ranks, args.microbatches),
        microbatch_size=args.microbatch_size,
        dp=max(1, args.columns),
        devices=devices_of(config.pipeline, config.run.machine.platform, processes),
        processes=processes,
    )
    step = TrainStep(pipe, optax.adamw(1e-3), clip_norm=1.0, zero1=args.zero1)
    shape = (args.microbatches, args.microbatch_size, config.data.seq_len)
    tokens = np.random.default_rng(0).integers(0, 256, (*shape[:2], shape[2] + 1)).astype(np.int32)
    batch = {
        "tokens": tokens[..., :-1].copy(),
        "targets": tokens[..., 1:].copy(),
        "weights": np.ones(shape, np.float32),
    }
    state, key, before = step.init(init_params(model, 0)), jax.random.key(0), None

    def one(record: bool = False) -> Any:
        nonlocal state, before
        state, metrics = step(state, batch, key, record=record)
        if before is not None:
            jax.device_get((before.loss, before.grad_norm, before.stop))
        before = metrics
        return metrics.timeline if record else (state.master, metrics.loss)

    return one, step, (*shape[1:], int(config.model.options["d_model"]))


def steps(processes: Processes, one: Callable[[], Any], count: int) -> dict[str, float]:
    """Seconds of a step, and of processors for it."""
    import jax

    processes.barrier("begin")
    began, spent = time.perf_counter(), _cpu_s()
    for _ in range(count):
        last = one()
    jax.block_until_ready(last)
    texts = processes.gather("processors", repr(_cpu_s() - spent))
    took_s = time.perf_counter() - began
    processes.barrier("end")
    return {"step_s": took_s / count, "cpu_s": sum(map(float, texts)) / count}


def reductions_under_compute(timeline: Any) -> dict[str, float]:
    """Seconds of the reductions of a step on all ranks, and of those while their rank computes; process 0 knows."""
    under_s = total_s = 0.0
    for event in timeline.events if timeline else ():
        if event.lane == "net":
            total_s += event.end_s - event.start_s
            computed = timeline.of(event.rank, "compute")
            under_s += sum(max(0.0, min(event.end_s, e.end_s) - max(event.start_s, e.start_s)) for e in computed)
    return {"reductions_s": total_s, "under_compute_s": under_s}


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def messages(processes: Processes, pipe: Any, shape: tuple[int, ...]) -> dict[str, float]:
    """µs of the dispatching thread to send an array of ``shape`` to rank 1 or process 1, and to receive one."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.cost.seconds import random_array
    from jaxpipe.mesh import replicated
    from jaxpipe.runtime.transfer import LocalTransport

    ownership, send_s, receive_s, trips, arrays = pipe.ownership, [], [], [], []
    homes = [replicated(mesh) for mesh in pipe.submeshes]
    if not ownership.divided:
        local = LocalTransport({n: [homes[1]] for n in range(_MESSAGES)})
        array = random_array(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=homes[0]))
        jax.block_until_ready(array)
        for n in range(_MESSAGES):
            began = time.perf_counter()
            send_s.append(_timed(lambda n=n: local.send(n, 1, [array])))  # type: ignore[misc]
            receive_s.append(_timed(lambda n=n: arrays.extend(local.recv(n))))  # type: ignore[misc]
            jax.block_until_ready(arrays.pop())
            trips.append(2 * (time.perf_counter() - began))
        return _summary(send_s, receive_s, trips)
    carrier = ownership.remote_transport()
    if processes.mine > 1:
        return {}
    home, other = homes[ownership.ranks[0]], ownership.process_of.index(1 - processes.mine)
    home_aval, other_aval = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at) for at in (home, homes[other]))
    array = jax.block_until_ready(random_array(home_aval))

    def put(n: int) -> None:
        send_s.append(_timed(lambda: carrier.put(2 * n + processes.mine, [array], [other_aval])))

    def get(n: int) -> None:
        def receive() -> None:
            arrays[:] = carrier.get(2 * n + 1 - processes.mine, other, [home_aval])

        receive_s.append(_timed(receive))
        jax.block_until_ready(arrays)

    for n in range(_MESSAGES):
        began = time.perf_counter()
        for turn in (put, get) if processes.mine == 0 else (get, put):
            turn(n)
        trips.append(time.perf_counter() - began)
    return _summary(send_s, receive_s, trips)


def _timed(what: Callable[[], None]) -> float:
    began = time.thread_time_ns()
    what()
    return (time.thread_time_ns() - began) / 1e3


def _summary(send_s: Sequence[float], receive_s: Sequence[float], trips: Sequence[float]) -> dict[str, float]:
    half = _MESSAGES // 2  # connections are made, and processors warm
    kinds = {"send": send_s, "receive": receive_s, "arrives": [1e6 * x / 2 for x in trips]}
    return {name: round(statistics.median(values[half:]), 1) for name, values in kinds.items()}


if __name__ == "__main__":
    raise SystemExit(main())
