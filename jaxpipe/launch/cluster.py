"""Write files that start a run on a cluster: a batch script for Slurm, a JobSet for Kubernetes. Users read and change them.

One process a node (or several) drives that node's GPUs. A rank lies within one process. A user's value reaches its reader
unchanged: bash, sbatch, YAML and Kubernetes each have their own quotes, and no value with a line break is written.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jaxpipe.errors import CheckpointError, ConfigError, NotFiniteError
from jaxpipe.files import check_one_line
from jaxpipe.launch.local import RESTARTABLE
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.run.ending import INTERRUPTED, STOPPED
from jaxpipe.train.settings.sections import PipelineConfig

_PORT = 61440
_SAVE_S = 120
_FINAL = (ConfigError.exit_code, CheckpointError.exit_code, NotFiniteError.exit_code, INTERRUPTED)
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_OPTION = re.compile(r"(--)?([A-Za-z][\w-]*)(=.*)?", re.ASCII | re.DOTALL)
_CLAIM = re.compile(r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?):(/[^:]*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A run of ``jaxpipe ARGUMENTS`` on ``nodes`` hosts with ``gpus`` each, which share them among ``processes``.

    Raises:
        ConfigError: ``config`` needs another number of devices, a rank does not lie within a process, or an argument holds a
            control character.
    """

    name: str
    config: TrainConfig
    arguments: Sequence[str]
    nodes: int
    gpus: int
    processes: int = 1
    restarts: int = 0

    def __post_init__(self) -> None:
        pipe = self.config.pipeline
        num_gpus, each = self.nodes * self.gpus, pipe.rank_devices
        if _LABEL.fullmatch(self.name) is None:
            raise ConfigError(f"--name {self.name}: want at most 40 of a-z, 0-9 and -, from a letter to no -")
        for argument in self.arguments:
            check_one_line(argument, "an argument")
        if pipe.num_devices != num_gpus:
            raise ConfigError(
                f"{pipe.ranks} ranks × {_axes(pipe)} are {pipe.num_devices} devices and {self.nodes} nodes with "
                f"{self.gpus} GPUs have {num_gpus}; change --nodes, --gpus-per-node, --pp, --tp, --cp or --dp"
            )
        if self.gpus % self.processes or self.gpus // self.processes % each:
            raise ConfigError(
                f"a rank's {_axes(pipe)} = {each} GPUs must lie within one process, which has "
                f"{self.gpus / self.processes:g} of its node's {self.gpus}; change --tp, --cp, --dp or --processes-per-node"
            )

    @property
    def summary(self) -> str:
        pipe = self.config.pipeline
        return f"{self.nodes} nodes × {self.gpus} GPUs = {pipe.ranks} ranks × {_axes(pipe)}"


def _axes(pipe: PipelineConfig) -> str:
    """Describe the axes that divide a rank's devices."""
    return f"tp {pipe.tp} × " + (f"cp {pipe.cp} × " if pipe.cp > 1 else "") + f"dp {pipe.dp}"


def sbatch(job: ClusterJob, options: Sequence[str], folder: Path) -> str:
    """Return a batch script for Slurm. ``options``: more of sbatch, such as ``time=12:00:00``; ``folder``: where the run
    starts.

    Raises:
        ConfigError: an option is none, or it or the folder holds a control character.
    """
    command = shlex.join([sys.executable, "-m", "jaxpipe", *job.arguments])
    check_one_line(sys.executable, "the path of Python")
    check_one_line(str(folder), "the working directory")
    settings = {"job-name": job.name, "nodes": job.nodes, "ntasks-per-node": job.processes, "gpus-per-node": job.gpus}
    settings |= {"chdir": folder, "output": f"{job.name}-%j.log", "open-mode": "append", "signal": f"USR1@{_SAVE_S}"}
    directives = [f"{name}={value}" for name, value in settings.items()]
    for option in options:
        check_one_line(option, "--sbatch")
        if (option_match := _OPTION.fullmatch(option)) is None:
            raise ConfigError(f"--sbatch {option}: want OPTION=VALUE, such as time=12:00:00")
        directives.append(option_match[2] + (option_match[3] or ""))
    option_lines = "".join(f"#SBATCH --{_sbatch_quoted(directive)}\n" for directive in directives)
    codes = " || ".join(f"code == {code}" for code in (STOPPED, *RESTARTABLE))
    again = f"""
# The time was over and the run saved itself ({STOPPED}), or something was lost: at most {job.restarts} times again.
if (( ({codes} || code > {INTERRUPTED}) && ${{SLURM_RESTART_COUNT:-0}} < {job.restarts} )); then
  scontrol requeue "$SLURM_JOB_ID"
fi
"""
    return f"""#!/bin/bash
# Written by jaxpipe launch slurm: {job.summary}.
# Submit it with sbatch; submitted again, it goes on from the newest checkpoint of its run directory.
{option_lines}
# Processes find each other by the variables of their step, and end together by themselves. {_SAVE_S} seconds before the time is
# over all get SIGUSR1, save and stop.
code=0
srun --kill-on-bad-exit=0 --wait=60 {command} || code=$?
{again if job.restarts else ""}exit $code
"""


def _sbatch_quoted(text: str) -> str:
    """Quote ``text`` as one word of an ``#SBATCH`` line, for sbatch's own reader (``_get_argument`` in its source): a
    backslash makes the next character plain, in quotes too, and quotes keep blanks and ``#``. Its releases blank out or
    look for the words packjob and hetjob in a line before they read it; a backslash within hides them."""
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    escaped = re.sub("(?i)(pack|het)(?=job)", r"\1\\", escaped)
    return escaped if re.fullmatch(r"[\w./:=,%@+-]*", text, re.ASCII) else f'"{escaped}"'


def _yaml_quoted(text: str) -> str:
    """Quote ``text`` as a string of YAML, which is one of JSON, but that YAML joins no halves of surrogate pairs."""
    return json.dumps(text, ensure_ascii=False)


def jobset(job: ClusterJob, image: str, claim: str) -> str:
    """Return a JobSet (``jobset.x-k8s.io/v1alpha2``) of one Job with a pod a node. ``claim``, ``NAME:PATH``: the
    PersistentVolumeClaim that all pods share, and where.

    Raises:
        ConfigError: the claim is no such pair, the run directory is not in there, or a value holds a control character.
    """
    for value, name in ((image, "--image"), (claim, "--claim")):
        check_one_line(value, name)
    if (claim_match := _CLAIM.fullmatch(claim)) is None:
        raise ConfigError(f"--claim {claim}: want NAME:PATH, such as runs:/runs")
    claim, mount = claim_match[1], claim_match[3]
    out_dir = PurePosixPath(job.config.run.out_dir)
    if not out_dir.is_relative_to(mount):
        raise ConfigError(
            f"run.out_dir={out_dir} is not within {mount}, where the claim {claim} is mounted for all pods"
        )
    # Kubernetes puts the environment's NAME in the place of $(NAME), and $ in that of $$
    words = [_yaml_quoted(word.replace("$", "$$")) for word in ("jaxpipe", *job.arguments)]
    command = "".join(f"\n                    - {word}" for word in words)
    return f"""# Written by jaxpipe launch k8s: {job.summary}.
# Start it with kubectl apply -f; applied again, it goes on from the newest checkpoint of its run directory.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  failurePolicy:
    maxRestarts: {job.restarts}
    rules:
      - name: mistakes
        action: FailJobSet # what another attempt would not mend: exit codes {", ".join(map(str, _FINAL))}
        onJobFailureReasons: [PodFailurePolicy]
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  replicatedJobs:
    - name: train
      replicas: 1
      template:
        spec:
          completionMode: Indexed # JOB_COMPLETION_INDEX is the number of a process
          parallelism: {job.nodes}
          completions: {job.nodes}
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: train
                  operator: In
                  values: {list(_FINAL)}
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {_SAVE_S} # to save in
              containers:
                - name: train
                  image: {_yaml_quoted(image)}
                  command:{command}
                  env:
                    - name: JAXPIPE_COORDINATOR
                      value: {job.name}-train-0-0.{job.name}:{_PORT}
                    - name: JAXPIPE_PROCESSES
                      value: "{job.nodes}"
                  resources:
                    limits:
                      nvidia.com/gpu: {job.gpus}
                  volumeMounts:
                    - name: runs
                      mountPath: {_yaml_quoted(mount)}
                    - name: shm
                      mountPath: /dev/shm
              volumes:
                - name: runs
                  persistentVolumeClaim:
                    claimName: {_yaml_quoted(claim)}
                - name: shm # NCCL's
                  emptyDir:
                    medium: Memory
"""
