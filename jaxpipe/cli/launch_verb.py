"""The verb ``launch``: starts the processes of a training run here, or writes the file that starts them on a cluster."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpipe.cli.parser import add_repeated, add_value, whole_number
from jaxpipe.cli.registry import parsed
from jaxpipe.errors import ConfigError

if TYPE_CHECKING:
    from jaxpipe.train.config import TrainConfig

_OF = {
    "local": ("number", "max_restarts", "logs"),
    "slurm": ("output", "nodes", "gpus", "per_node", "max_restarts", "name", "sbatch"),
    "k8s": ("output", "nodes", "gpus", "max_restarts", "name", "image", "claim"),
}
"""Which flags each takes."""
_NEEDED = {
    "local": ("number",),
    "slurm": ("output", "nodes", "gpus"),
    "k8s": ("output", "nodes", "gpus", "image", "claim"),
}


def configure_launch(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxpipe launch local|slurm|k8s FLAGS -- train …"
    parser.add_argument("where", choices=list(_OF), help="start processes here, or write a file for sbatch or kubectl")
    text = "restart the run up to N times after it is lost"
    add_value(parser, "--max-restarts", "N", whole_number("restarts", 10**6, least=0), text)
    local_flags = parser.add_argument_group("local")
    add_value(local_flags, "-n", "N", whole_number("processes", 4096), "number of processes", dest="number")
    add_value(local_flags, "--logs", "DIR", str, "log folder (default: temporary, removed on success)")
    cluster = parser.add_argument_group("slurm, k8s")
    add_value(cluster, "-o", "FILE", str, "the file to write", dest="output")
    add_value(cluster, "--nodes", "N", whole_number("nodes", 65536), "number of hosts")
    add_value(cluster, "--gpus-per-node", "N", whole_number("GPUs", 4096), "GPUs per node", dest="gpus")
    add_value(cluster, "--name", "NAME", str, "job name (default: jaxpipe)")
    per = whole_number("processes", 4096)
    add_value(cluster, "--processes-per-node", "N", per, "slurm: processes per node (default: one)", dest="per_node")
    add_repeated(cluster, "--sbatch", "OPTION=VALUE", "slurm: option such as time=12:00:00 (repeatable)", default=None)
    add_value(cluster, "--image", "IMAGE", str, "k8s: container image with jaxpipe installed")
    add_value(cluster, "--claim", "NAME:PATH", str, "k8s: volume claim that all pods share, and its mount path")


def run_launch(args: argparse.Namespace) -> int:
    for flag in sorted({flag for flags in _OF.values() for flag in flags} - set(_OF[args.where])):
        if getattr(args, flag) is not None:
            raise ConfigError(
                f"{_FLAG[flag]} is not a flag of 'jaxpipe launch {args.where}' (see 'jaxpipe launch --help')"
            )
    if missing := [_FLAG[flag] for flag in _NEEDED[args.where] if getattr(args, flag) is None]:
        raise ConfigError(f"jaxpipe launch {args.where} needs {', '.join(missing)} (see 'jaxpipe launch --help')")
    if args.rest[:1] != ["train"]:
        raise ConfigError(
            "give the command to launch after --, such as: jaxpipe launch local -n 2 -- train --config run.toml"
        )
    from jaxpipe.cli.train_verbs import config_of

    config = config_of(parsed("train", args.rest[1:]))
    return _here(args, config) if args.where == "local" else _file(args, config)


_FLAG = {"number": "-n", "output": "-o", "gpus": "--gpus-per-node", "per_node": "--processes-per-node"} | {
    flag: f"--{flag.replace('_', '-')}"
    for flag in ("max_restarts", "logs", "nodes", "name", "sbatch", "image", "claim")
}


def _here(args: argparse.Namespace, config: TrainConfig) -> int:
    from jaxpipe.files import check_local
    from jaxpipe.launch.local import SAID, Launch
    from jaxpipe.runtime.processes import divided

    divided(config.pipeline.ranks, args.number)
    check_local(args.logs or "", "--logs")
    logs = Path(args.logs or tempfile.mkdtemp(prefix="jaxpipe-launch-"))
    logs.mkdir(parents=True, exist_ok=True)
    with Launch([sys.executable, "-m", "jaxpipe", *args.rest], args.number, logs) as launch:
        code = launch.run(args.max_restarts or 0)
    if args.logs is None and code in SAID:
        shutil.rmtree(logs, ignore_errors=True)
    return code


def _file(args: argparse.Namespace, config: TrainConfig) -> int:
    from jaxpipe.files import write_atomically
    from jaxpipe.launch.cluster import Job, jobset, sbatch

    name, restarts = args.name or "jaxpipe", args.max_restarts or 0
    job = Job(name, config, args.rest, args.nodes, args.gpus, args.per_node or 1, restarts)
    if args.where == "slurm":
        text, start = sbatch(job, args.sbatch or (), Path.cwd()), "sbatch"
    else:
        text, start = jobset(job, args.image, args.claim), "kubectl apply -f"
    write_atomically(Path(args.output), text)
    print(f"{job.summary}; start it with: {start} {shlex.quote(args.output)}")
    return 0
