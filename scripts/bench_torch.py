"""jaxpipe against PyTorch's pipelining on the cores of one machine: the same GPT, the same cuts, in one run. Prints JSON.

    python -m venv V && V/bin/pip install torch numpy  # of its own, a build for CPUs is enough
    python scripts/bench_torch.py --torch V/bin/python --rounds 5
    python scripts/bench_torch.py --torch V/bin/python --rounds 5 --alone

Both sides train 10.6M parameters (d 256, 8 layers, 4 heads, sequences of 256, vocabulary 8192, untied, float32) with AdamW
over 2 ranks and 8 microbatches of 2 sequences, without clipping or recomputation. PyTorch: 2 gloo processes of one thread
each, eager, fused AdamW, SDPA; ``unpipelined``: one process of two threads that accumulates gradients. jaxpipe: one process,
2 emulated devices, ``Trainer.measured()``, orders of the zero-bubble schedules by the measured costs, B and then W where BW was
measured to take longer, and what ``jaxpipe train`` sets on a CPU.

A round visits every configuration once, jaxpipe's and PyTorch's in turn, every other round backwards: a step that does not
count, then ``--steps`` that do, each waited for. Who is not asked waits at a pipe. ``foreign_cpu``: the part of the machine
that other processes used meanwhile; above a few per cent only ratios of CPU seconds mean anything.

``--alone``: the functions of a stage of 5 blocks, and layers that mostly reduce (BW: the whole backward pass), in CPU seconds,
medians and least, one process each, both on one core. PyTorch divides B and W by what its zero-bubble schedules use.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpipe.errors import ConfigError, JaxpipeError
from scripts.provenance import commit_id, describe_machine

RANKS = 2
SIZES = {
    "d_model": 256, "num_layers": 8, "num_heads": 4, "seq_len": 256, "vocab_size": 8192, "microbatches": 8,
    "microbatch_size": 2, "lr": 3e-4,
}  # fmt: skip
TINY = {**SIZES, "d_model": 32, "seq_len": 16, "vocab_size": 64, "microbatches": 4}
TWO, FOUR, V = (6,), (4, 6, 8), (3, 6, 8)
"""The layers (embed, 8 blocks, head) at which the second and later stages start."""
TORCH = {"1F1B": TWO, "ZB1P": TWO, "Interleaved1F1B": FOUR, "ZBV": V}
JAXPIPE = {"1f1b": TWO, "zb-1p": TWO, "interleaved-1f1b": FOUR, "v-zb": V}
UNPIPELINED = "unpipelined"
ALONE = "alone"
BLOCKS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a visit")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[*JAXPIPE, *TORCH, UNPIPELINED], help="some of them"
    )
    parser.add_argument("--cut", choices=("hand", "analytic", "measured"), default="hand", help="of jaxpipe's stages")
    parser.add_argument("--alone", action="store_true", help="functions of a stage, on one core")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to see that everything works")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker is not None:
        return _work(json.loads(args.worker))
    try:
        print(json.dumps((run_alone if args.alone else run)(args), indent=1))
    except JaxpipeError as error:
        print(f"bench_torch: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    sizes, selection = TINY if args.tiny else SIZES, args.only or [*JAXPIPE, *TORCH, UNPIPELINED]
    ours, theirs = ([n for n in names if n in selection] for names in (JAXPIPE, (*TORCH, UNPIPELINED)))
    torch = _torch_version(args.torch) if theirs else None
    groups = _groups(args, sizes, ours, theirs)
    try:
        ready = {name: group.started() for name, group in groups.items()}
        order = [n for pair in itertools.zip_longest(ours, theirs) for n in pair if n is not None]
        samples: dict[str, list[Mapping[str, Any]]] = {name: [] for name in order}
        for k in range(args.rounds):
            for name in order if k % 2 == 0 else reversed(order):
                _note(f"round {k + 1} of {args.rounds}: {name}")
                group = groups["jaxpipe" if name in ours else UNPIPELINED if name == UNPIPELINED else "torch"]
                samples[name].append(group.measure(name, args.steps))
    finally:
        for group in groups.values():
            group.close()
    tokens = sizes["microbatches"] * sizes["microbatch_size"] * sizes["seq_len"]
    results = {name: _summary(runs, tokens) for name, runs in samples.items()}
    return {
        "what": "jaxpipe against torch.distributed.pipelining",
        **_told(ready, torch),
        "sizes": sizes,
        "cut": args.cut,
        "rounds": args.rounds,
        "steps": args.steps,
        "jaxpipe": {name: results[name] for name in ours},
        "torch": {name: results[name] for name in theirs},
        "ratios": _ratios(results),
    }


def run_alone(args: argparse.Namespace) -> dict[str, Any]:
    sizes = {**(TINY if args.tiny else SIZES), "blocks": BLOCKS}
    version, core = _torch_version(args.torch), max(os.sched_getaffinity(0))
    request = {"sizes": sizes, "core": core}
    groups = {
        "jaxpipe": Group([[sys.executable, __file__, "--worker", json.dumps(request)]], [{}]).start(),
        "torch": _torch_group(args.torch, [{**request, "rank": None, "threads": 1}]).start(),
    }
    try:
        ready = {name: group.started() for name, group in groups.items()}
        samples: dict[str, list[Mapping[str, Any]]] = {name: [] for name in groups}
        for k in range(args.rounds):
            for name in list(groups) if k % 2 == 0 else reversed(groups):
                _note(f"round {k + 1} of {args.rounds}: {name}")
                samples[name].append(groups[name].measure(ALONE, args.steps))
    finally:
        for group in groups.values():
            group.close()

    def of_all(statistic: Callable[[Sequence[float]], float]) -> dict[str, dict[str, float]]:
        return {
            side: {f: statistic([s for sample in runs for s in sample["functions"][f]]) for f in runs[0]["functions"]}
            for side, runs in samples.items()
        }

    cpu_s, least_s = of_all(statistics.median), of_all(min)
    return {
        "what": "functions of a stage, against PyTorch's, on one core",
        **_told(ready, version),
        "sizes": sizes,
        "rounds": args.rounds,
        "steps": args.steps,
        "foreign_cpu": statistics.mean(sample["foreign_cpu"] for runs in samples.values() for sample in runs),
        "cpu_s": cpu_s,
        "least_s": least_s,
        "ratios": {f: cpu_s["jaxpipe"][f] / of_torch for f, of_torch in cpu_s["torch"].items()},
        "ratios_of_least": {f: least_s["jaxpipe"][f] / of_torch for f, of_torch in least_s["torch"].items()},
    }


def _told(ready: Mapping[str, Mapping[str, Any]], torch: str | None) -> dict[str, Any]:
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit_id(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": {"python": platform.python_version(), "torch": torch, **ready.get("jaxpipe", {})},
    }


def _ratios(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the best jaxpipe over the best PyTorch result, in tokens per second and CPU seconds per step."""
    ours = [results[n] for n in JAXPIPE if n in results]
    ratios = {}
    for what, names in (("pipelined", TORCH), (UNPIPELINED, (UNPIPELINED,))):
        theirs = [results[n] for n in names if n in results]
        if ours and theirs:
            speeds, cpu = ([max(r["tokens_per_s"] for r in side) for side in (ours, theirs)],
                           [min(r["cpu_s"] for r in side) for side in (ours, theirs)])  # fmt: skip
            ratios[f"tokens_per_s_over_torch_{what}"] = speeds[0] / speeds[1]
            ratios[f"cpu_s_over_torch_{what}"] = cpu[0] / cpu[1]
    return ratios


def _summary(samples: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, float]:
    steps = [s for sample in samples for s in sample["step_s"]]
    low, median, high = statistics.quantiles(steps, method="inclusive") if len(steps) > 1 else [steps[0]] * 3
    wall, count = sum(sum(sample["step_s"]) for sample in samples), len(steps)
    ratio_names = [name for name in samples[0] if name.endswith(("_ratio", "_measured", "_over_step"))]
    return {
        "step_s": median,
        "low_s": low,
        "high_s": high,
        "tokens_per_s": tokens / median,
        "cpu_s": statistics.median(sample["cpu_s"] / len(sample["step_s"]) for sample in samples),
        "cpu_over_wall": sum(sample["cpu_s"] for sample in samples) / wall,
        "foreign_cpu": statistics.mean(sample["foreign_cpu"] for sample in samples),
        "loss": samples[-1]["loss"],
        "steps": count,
        **{name: statistics.median(sample[name] for sample in samples) for name in ratio_names},
    }


# -- processes ------------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """Processes that do what a line on their standard input says, and answer with a line of JSON each."""

    commands: Sequence[Sequence[str]]
    environments: Sequence[Mapping[str, str]]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> Group:
        for command, environment in zip(self.commands, self.environments, strict=True):
            self.processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
                )
            )
        return self

    def started(self) -> dict[str, Any]:
        return self._answers()[0]

    def measure(self, name: str, steps: int) -> dict[str, Any]:
        """Seconds of each step on the slowest process, CPU seconds of all, and the part of the machine that others used."""
        before, began = _machine_cpu_s(), time.perf_counter()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{name} {steps}\n")
            process.stdin.flush()
        answers = self._answers()
        machine_s, wall_s = _machine_cpu_s() - before, time.perf_counter() - began
        own_s = sum(a["cpu_s"] + a.get("first_cpu_s", 0.0) for a in answers)
        return {
            **answers[0],
            "step_s": [max(times) for times in zip(*(a["step_s"] for a in answers), strict=True)],
            "cpu_s": sum(a["cpu_s"] for a in answers),
            "loss": next((a["loss"] for a in answers if a["loss"] is not None), None),
            "foreign_cpu": max(0.0, machine_s - own_s) / (wall_s * (os.cpu_count() or 1)),
        }

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ConfigError(f"a process ended with code {process.wait()}; what it said stands above")
            answers.append(json.loads(line))
        return answers


def _groups(args: argparse.Namespace, sizes: Any, ours: Sequence[str], theirs: Sequence[str]) -> dict[str, Group]:
    groups = {}
    if ours:
        request = json.dumps({"sizes": sizes, "names": ours, "cut": args.cut})
        groups["jaxpipe"] = Group([[sys.executable, __file__, "--worker", request]], [{}])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def torch(threads: int, ranks: Sequence[int | None], cuts: Mapping[str, Sequence[int]]) -> Group:
        return _torch_group(
            args.torch, [{"sizes": sizes, "rank": r, "port": port, "threads": threads, "cuts": cuts} for r in ranks]
        )

    if cuts := {name: TORCH[name] for name in theirs if name in TORCH}:
        groups["torch"] = torch(1, range(RANKS), cuts)
    if UNPIPELINED in theirs:
        groups[UNPIPELINED] = torch(RANKS, [None], {})
    return {name: group.start() for name, group in groups.items()}


def _torch_group(python: str, requests: Sequence[Mapping[str, Any]]) -> Group:
    path = str(Path(__file__).with_name("torch_pipeline.py"))
    return Group(
        [[python, path, json.dumps(a)] for a in requests], [{"OMP_NUM_THREADS": str(a["threads"])} for a in requests]
    )


def _torch_version(python: str) -> str:
    """Raises ConfigError: there is no torch with pipelining."""
    advice = "make one with: python -m venv V && V/bin/pip install torch; then --torch V/bin/python"
    try:
        code = "import torch, torch.distributed.pipelining as p; p.ScheduleZBVZeroBubble; print(torch.__version__)"
        completed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--torch {python}: {error.strerror}; {advice}") from None
    if completed.returncode:
        why = completed.stderr.strip().splitlines()[-1:] or ["it failed"]
        raise ConfigError(f"--torch {python} has no torch to compare with ({why[0]}); {advice}")
    return completed.stdout.strip()


def _machine_cpu_s() -> float:
    """Seconds that all cores together have been busy."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- jaxpipe's process ----------------------------------------------------------------------------------------------------


def _work(request: Mapping[str, Any]) -> int:
    from jaxpipe.train.devices import cpu_settings, keep_heap, request_devices

    if "core" in request:
        os.sched_setaffinity(0, {request["core"]})
    request_devices(RANKS, "cpu")
    settings = cpu_settings(keep_heap())
    import jax

    steps: dict[str, Callable[[bool], Mapping[str, Any]]] = {}
    trainers: dict[Any, Any] = {}
    if "core" in request:
        steps[ALONE] = _alone(request["sizes"])
    for name in request.get("names", ()):
        _note(f"jaxpipe: compiling and timing {name}")
        steps[name] = _stepper(name, request, trainers)
    versions = {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "xla_flags": os.environ["XLA_FLAGS"],
        "settings": settings,
    }
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        name, count = line.split()
        began = time.process_time()
        steps[name](False)
        first_s, seconds, record = time.process_time() - began, [], {}
        began = time.process_time()
        for _ in range(int(count)):
            start = time.perf_counter()
            record = steps[name](False)
            seconds.append(time.perf_counter() - start)
        cpu_s = time.process_time() - began
        began = time.process_time()
        record = {**record, **steps[name](True)}
        first_s += time.process_time() - began
        print(json.dumps({"step_s": seconds, "cpu_s": cpu_s, "first_cpu_s": first_s, **record}), flush=True)
    return 0


def _stepper(name: str, request: Mapping[str, Any], trainers: dict[Any, Any]) -> Callable[[bool], Mapping[str, float]]:
    """Runs a step and waits for it; if recorded, tells what was measured of it too."""
    import jax
    import numpy as np
    import optax

    from jaxpipe.schedule import generate
    from jaxpipe.schedule.passes.braid import costly_backwards, fused_stages, with_fused_stages
    from jaxpipe.stage.model.reference import resolve_model
    from jaxpipe.train.trainer import Trainer

    sizes = request["sizes"]
    options = ("d_model", "num_layers", "num_heads", "seq_len", "vocab_size")
    model = resolve_model("models.gpt:GPT", {**{k: sizes[k] for k in options}, "tied": False})
    m, size, length = sizes["microbatches"], sizes["microbatch_size"], sizes["seq_len"]
    chunks = 2 if len(JAXPIPE[name]) > 1 else None
    placement = generate(name, RANKS, m, chunks=chunks if name.startswith("interleaved") else None).placement
    if placement not in trainers:
        trainers[placement] = Trainer(
            model,
            optimizer=optax.adamw(sizes["lr"], b1=0.9, b2=0.95, weight_decay=0.1),
            schedule=name,
            ranks=RANKS,
            microbatches=m,
            chunks=chunks,
            microbatch_size=size,
            cut=JAXPIPE[name] if request["cut"] == "hand" else request["cut"],
            platform="cpu",
        ).measured(5)
    trainer = trainers[placement].with_schedule(name)
    schedule, costs = trainer.schedule, trainer.pipeline.costs
    fused = set(fused_stages(schedule)).difference(costly_backwards(schedule, costs))
    trainer = trainer.with_schedule(with_fused_stages(schedule, fused))
    trainer.pipeline.warm_up()
    ids = np.random.default_rng(1).integers(0, sizes["vocab_size"], (m * size, length + 1)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((m * size, length), np.float32)}
    state = trainer.init()

    def step(record: bool) -> dict[str, float]:
        nonlocal state
        state, metrics = trainer.step(state, batch, record=record)
        jax.block_until_ready((dict(state.master), metrics.loss))
        results = {"loss": float(metrics.loss)}
        if record:
            pipe, outputs = trainer.pipeline, metrics.outputs
            results["replay_ratio"] = pipe.replay_ratio(outputs)
            results["bubble_measured"] = metrics.timeline.bubble_rate
            results["predicted_over_step"] = pipe.predicted_timeline().makespan / outputs.step_s
        return results

    return step


def _alone(sizes: Mapping[str, int]) -> Callable[[bool], Mapping[str, Any]]:
    """Runs the functions of stages; if recorded, tells the CPU seconds of each run since it last did."""
    import jax
    import numpy as np
    from flax import linen as nn

    from jaxpipe.mesh import pipeline_submeshes
    from jaxpipe.stage.compiled.compile import build_all
    from jaxpipe.stage.functions import Port, StageFunctions
    from jaxpipe.stage.model.adapters import from_linen
    from jaxpipe.stage.model.layer import Layer
    from jaxpipe.stage.model.reference import resolve_model

    b, t, d = (sizes[n] for n in ("microbatch_size", "seq_len", "d_model"))
    options = {k: sizes[k] for k in ("d_model", "num_heads", "seq_len", "vocab_size")}
    gpt = resolve_model("models.gpt:GPT", {**options, "num_layers": sizes["blocks"], "tied": False})
    wide = {"x": jax.ShapeDtypeStruct((b, sizes["num_heads"], t, t), np.float32)}
    data = {**gpt.batch_spec(b), "x": jax.ShapeDtypeStruct((b, t, d), np.float32)}

    def of_one(layer: Layer, data: Mapping[str, Any]) -> StageFunctions:
        """Return a stage of ``layer``, which gets what another makes of the array x."""
        input_layer = Layer(
            "given", lambda key: {"by": np.ones(())}, lambda p, x, c: c.data["x"] * p["by"], reads=("x",)
        )
        loss = Layer("loss", lambda key: {}, lambda p, x, c: (x.sum(), x[..., 0].sum()))
        return built([[input_layer], [layer], [loss]], data)

    def built(stages: Sequence[Sequence[Layer]], data: Mapping[str, Any]) -> StageFunctions:
        params = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for stage in stages for layer in stage}
        return build_all(stages, params, data, pipeline_submeshes(1) * len(stages))[min(1, len(stages) - 1)]

    example = (data["x"],)
    softmax = Layer("softmax", lambda key: {}, lambda p, x, c: jax.nn.softmax(x, axis=-1))
    functions_by_layer = {
        "": built([gpt.layers[:1], gpt.layers[1:-2], gpt.layers[-2:]], gpt.batch_spec(b)),
        "softmax ": of_one(softmax, wide),
        "layer norm ": of_one(from_linen("norm", nn.LayerNorm(use_fast_variance=False), example=example), data),
        "RMS norm ": of_one(from_linen("norm", nn.RMSNorm(), example=example), data),
        "cross entropy ": built([gpt.layers[:-1], gpt.layers[-1:]], gpt.batch_spec(b)),
    }
    rng = np.random.default_rng(1)
    port_arrays: dict[tuple[str, Port], Any] = {}
    seconds: dict[str, list[float]] = {}

    def run(name: str, op: str) -> None:
        f = functions_by_layer[name].functions[op]
        for port, aval in zip(f.inputs, f.avals_in, strict=True):
            if (name, port) not in port_arrays:
                number = np.issubdtype(aval.dtype, np.floating)
                outputs = rng.standard_normal(aval.shape) / 50 if number else rng.integers(0, 50, aval.shape)
                port_arrays[(name, port)] = jax.device_put(outputs.astype(aval.dtype), aval.sharding)
        last = {"acc"} if op == "B" else {"acc", "res", "wres"}
        arguments = [port_arrays.pop((name, p)) if p.kind in last else port_arrays[(name, p)] for p in f.inputs]
        began = time.process_time()
        outputs = jax.block_until_ready(f.call(*arguments))
        seconds.setdefault(name + op, []).append(time.process_time() - began)
        port_arrays.update(
            ((name, p), v) for p, v in zip(f.outputs, outputs, strict=True) if p.kind in ("res", "wres", "acc")
        )

    def step(record: bool) -> dict[str, Any]:
        if record:
            seconds_by_function = dict(seconds)
            seconds.clear()
            return {"functions": seconds_by_function}
        for name in functions_by_layer:
            for op in ("F", "B", "W", "F", "BW") if not name else ("F", "BW"):
                run(name, op)
        return {"loss": None}

    return step


if __name__ == "__main__":
    sys.exit(main())
