"""Experiments on several processes that share one card: bits, messages, losses of a process, MPS, and what NCCL refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.gpu_experiments.here import cannot_ask, lacks_gpu, lacks_program
from scripts.gpu_experiments.process import call_together
from scripts.gpu_experiments.registry import ROOT, Settings, experiment

CONFIG = ROOT / "scripts" / "quickstart.toml"
_PATHS = ("jaxpipe/runtime", "jaxpipe/launch", "jaxpipe/train", "jaxpipe/program", "models/gpt.py")
_SHARE = {"XLA_CLIENT_MEM_FRACTION": ".2"}
_LIMIT_S = 150
_ENDS = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}
_MPS = "nvidia-cuda-mps-control"


@experiment(
    "T8",
    version=1,
    question="do several processes on one card have the bits of one, exchange messages, and survive the loss of one?",
    backs="U11, R7, the tagged transport",
    paths=_PATHS,
    estimate_s=180,
    predicted={
        "bits": "those of one process, with deterministic operations",
        "messages": "1-2 GB/s over TCP",
        "a lost process": "one line, exit code 6; a signal: 75",
    },
    want={
        "messages.most_bytes_per_s": ">= 1.5e9",
        "messages.compute_slowdown": "<= 1.05",
        "differing_arrays": "== 0",
        "differing_losses": "== 0",
        "killed.exit_code": "== 6",
        "killed.lines": "== 1",
        "stopped.exit_code": "== 75",
    },
)
def several_processes(settings: Settings) -> dict[str, Any]:
    """Time messages between two processes; train with all ranks in one process, then with a rank in each of two and four; kill
    one, stop all, and go on. Contexts take turns on the card, so nothing here tells a speed but that of messages."""
    numbers: dict[str, Any] = {"messages": message_seconds(settings, _SHARE)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = {n: _alone(settings, folder / f"alone-{n}", n) for n in ((2,) if settings.tiny else (2, 4))}
        runs: dict[str, tuple[int, Path]] = {}
        for name, number in _ENDS.items() if not settings.tiny else list(_ENDS.items())[:1]:
            _, out = runs[name] = 2, folder / name
            numbers[name] = launched(settings, out, 2, like=folder / "alone-2", stop=number)
            # One process goes on from the checkpoint of two as well, and starts sooner.
            numbers[f"{name}, resumed"] = _alone(settings, out, 2) if settings.tiny else launched(settings, out, 2)
        for n in alone if not settings.tiny else ():
            _, out = runs[f"{n} processes"] = n, folder / f"launched-{n}"
            numbers[f"{n} processes"] = launched(settings, out, n, like=folder / f"alone-{n}")
        results = {name: (alone[n], result_of(out)) for name, (n, out) in runs.items()}
    arrays = {name: differing(one["arrays"], other["arrays"]) for name, (one, other) in results.items()}
    losses = {name: differing(one["losses"], other["losses"]) for name, (one, other) in results.items()}
    return {
        **numbers,
        "by_run": {name: {"arrays": arrays[name], "losses": losses[name]} for name in results},
        "differing_arrays": sum(arrays.values()),
        "differing_losses": sum(losses.values()),
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Count the entries that differ or that one lacks."""
    return sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())


def _overrides(settings: Settings, folder: Path, ranks: int) -> list[str]:
    steps = 40 if settings.tiny else 200
    width, layers = (16, 1) if settings.tiny else (256, 4)
    overrides: dict[str, Any] = {
        "run.steps": steps,
        "run.batch": 4,
        "run.eval_every": 0,
        "run.checkpoint_every": steps // 2,
        "run.log_every": steps // 2,
        "run.out_dir": folder,
        "run.deterministic": "true",
        "run.platform": "cpu" if settings.tiny else "auto",
        "data.path": ROOT / "LICENSE",
        "data.seq_len": 16 if settings.tiny else 128,
        "model.options.d_model": width,
        "model.options.num_layers": layers,
        "pipeline.ranks": ranks,
        "pipeline.microbatches": 4,
        "pipeline.schedule": "1f1b",
        "pipeline.recompute": "none",
        # Without it each process decides by its own times.
        "pipeline.split_backwards": "never",
    }
    return [f"{name}={value}" for name, value in overrides.items()]


def _alone(settings: Settings, folder: Path, ranks: int) -> dict[str, Any]:
    (result,) = call_together(train_alone, settings, str(folder), ranks, number=1, environment=_SHARE)
    return dict(result)


def train_alone(settings: Settings, folder: str, ranks: int, mine: int) -> dict[str, Any]:
    """Train in one process, all ranks on its one device, which ``jaxpipe train`` would refuse."""
    from jaxpipe.train.config import load_config
    from jaxpipe.train.devices import request_devices, request_gpus

    config = load_config(CONFIG, _overrides(settings, Path(folder), ranks))
    request_devices(1, config.run.machine.platform)
    request_gpus(config.run)
    import jax

    from jaxpipe.train import loop

    vars(loop)["devices_of"] = lambda pipe, *_: [jax.devices()[0]] * pipe.num_devices
    loop.train(config)
    return result_of(Path(folder))


def result_of(folder: Path) -> dict[str, Any]:
    """Return the digest of each array of the newest checkpoint, and the losses that were logged."""
    from jaxpipe.train.checkpoint import read_manifest

    manifest = read_manifest(folder)
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "arrays": {
            f"{group} {leaf.name}": " ".join(piece.sha256 for piece in leaf.pieces)
            for group, leaves in manifest.leaves.items()
            for leaf in leaves
        },
        "losses": {str(row["step"]): row["loss"] for row in rows if "loss" in row},
    }


def launched(
    settings: Settings,
    folder: Path,
    ranks: int,
    *extra: str,
    like: Path | None = None,
    stop: signal.Signals | None = None,
) -> dict[str, Any]:
    """Train by ``jaxpipe launch local`` with a rank a process: exit code, seconds, how many lines the launcher says, and the
    last of them. ``like``: a run whose choice of kernels is taken. ``stop``: once a checkpoint is there, SIGKILL for the last
    process, or another signal for the launcher."""
    folder.mkdir(exist_ok=True)
    if like is not None and (chosen := like / "autotuning.txt").exists():
        shutil.copy(chosen, folder)
    train = ["train", "--config", str(CONFIG), *_overrides(settings, folder, ranks), *extra]
    logs = folder.with_name(f"{folder.name}-logs")
    command = [sys.executable, "-m", "jaxpipe", "launch", "local", "-n", str(ranks), "--logs", str(logs), "--", *train]
    began, output = time.monotonic(), logs.with_suffix(".txt")
    with output.open("wb") as file:
        launcher = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **_SHARE})
    try:
        if stop is not None:
            _signal(launcher, stop, folder)
        code = launcher.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
        launcher.terminate()
        launcher.wait()
    said = output.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in said if line.startswith("jaxpipe: ")]
    return {"exit_code": code, "seconds": time.monotonic() - began, "lines": len(lines), "said": said[-3:]}


def _signal(launcher: subprocess.Popen[bytes], number: signal.Signals, folder: Path) -> None:
    """Send the signal once a checkpoint is there, unless the launcher has ended."""
    while launcher.poll() is None and not any(x.name.isdecimal() for x in folder.glob("checkpoints/*")):
        time.sleep(0.01)
    if launcher.poll() is None:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="ascii").split()
        os.kill(int(children[-1]) if number is signal.SIGKILL else launcher.pid, number)


# -- messages -------------------------------------------------------------------------------------------------------------


def message_seconds(settings: Settings, environment: Mapping[str, str]) -> dict[str, Any]:
    """Time messages between two processes."""
    port = _free_port()
    first, _ = call_together(exchange, settings, port, number=2, environment=environment)
    return dict(first)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def exchange(settings: Settings, port: int, mine: int) -> dict[str, Any]:
    """Send arrays of several sizes there and back: seconds of one way, bytes per second; then how much longer products take
    while the largest message is under way both ways."""
    from jaxpipe.runtime.peers import Peers
    from jaxpipe.runtime.processes import ProcessGroup

    processes = ProcessGroup(Peers("127.0.0.1", port, 2, mine), 60)
    processes.start_jax()
    import jax
    import jax.numpy as jnp

    from jaxpipe.cost.seconds import random_array
    from jaxpipe.runtime.transfer import TransferServer

    home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    channel, numbers = TransferServer(processes, (0, 1)).channel(), iter(range(1 << 20))

    def swap(array: Any) -> Any:
        """Send ``array`` to the other process and return what it sends."""
        at = 2 * next(numbers)
        aval = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=home)
        channel.put(at + mine, [array], [aval])
        (received,) = channel.get(at + 1 - mine, 1 - mine, [aval])
        return received

    unit = 1 << (8 if settings.tiny else 20)
    rows, array = {}, None
    for size in (1, 16, 64):
        array = jax.block_until_ready(
            random_array(jax.ShapeDtypeStruct((size * unit // 4,), jnp.float32, sharding=home))
        )
        times = []
        for _ in range(settings.repeats + 1):
            processes.barrier("swap")
            began = time.perf_counter()
            jax.block_until_ready(swap(array))
            times.append(time.perf_counter() - began)
        rows[f"{size} MB"] = {"seconds": min(times[1:]), "bytes_per_s": array.nbytes / min(times[1:])}
    n = 64 if settings.tiny else 8192
    matrix = random_array(jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=home), 1 / n**0.5)
    product = jax.jit(lambda x, y: x @ y)

    def products(message: Any) -> float:
        """Return the seconds of some products; process 1 leaves the card to process 0."""
        processes.barrier("products")
        arriving = None if message is None else swap(message)
        began, x = time.perf_counter(), matrix
        for _ in range(1 if mine else 20):
            x = product(x, matrix)
        jax.block_until_ready(x)
        spent = time.perf_counter() - began
        jax.block_until_ready(arriving)
        return spent

    products(None)
    ratios = sorted(products(array) / products(None) for _ in range(settings.repeats))
    processes.leave()
    return {
        "by_size": rows,
        "most_bytes_per_s": max(row["bytes_per_s"] for row in rows.values()),
        "compute_slowdown": ratios[len(ratios) // 2],
    }


@experiment(
    "T19",
    version=1,
    question="does MPS let a message's copies run beside the products of another process?",
    backs="several processes on one card",
    paths=("jaxpipe/runtime/transfer.py",),
    estimate_s=60,
    predicted={"MPS": "absent"},
    want={},
)
def under_mps(settings: Settings) -> dict[str, Any]:
    """Time messages with and without MPS, which gets folders of its own and changes no mode of the card."""
    if missing := lacks_gpu() or lacks_program(_MPS):
        return cannot_ask(missing)
    without = message_seconds(settings, _SHARE)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with _daemon({**os.environ, **environment}):
            return {"without": without, "with": message_seconds(settings, {**_SHARE, **environment})}


@contextmanager
def _daemon(environment: Mapping[str, str]) -> Iterator[None]:
    subprocess.run([_MPS, "-d"], env=environment, check=True)
    try:
        yield
    finally:
        subprocess.run([_MPS], input="quit\n", text=True, env=environment, check=False)


@experiment(
    "T20",
    version=1,
    question="what does a user get who asks for nccl with two processes on one card?",
    backs="launch",
    paths=_PATHS,
    estimate_s=30,
    predicted={"NCCL": "Duplicate GPU detected"},
    want={"exit_code": ">= 1", "seconds": "<= 30", "lines": "== 1"},
)
def duplicate_gpu(settings: Settings) -> dict[str, Any]:
    """Launch two processes with ``run.transport=nccl`` on one card: the exit code, the seconds, the line that a user reads."""
    if missing := lacks_gpu():
        return cannot_ask(missing)
    with tempfile.TemporaryDirectory() as folder:
        return launched(settings, Path(folder, "run"), 2, "run.transport=nccl")
