"""Start the processes of a run: here, or by files for Slurm and Kubernetes. Imports no JAX.

**Here** their output is logged, signals are forwarded, and they are restarted if one is lost. Each gets its share of the
cores, as processes that share them fight for them. The standard output of process 0 is passed on to ours; what the others
write, and every standard error, comes on our standard error with the number of the process before each line. All of it is kept
in files, also what is not shown: the logs of the libraries below JAX, and the stacks that follow when one of these ends a
process.

**On a cluster** a batch script for Slurm or a JobSet for Kubernetes starts them. Users read and change it. One process a node
(or several) drives that node's GPUs. A rank lies within one process. A user's value reaches its reader unchanged: bash,
sbatch, YAML and Kubernetes each have their own quotes, and no value with a line break is written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any, BinaryIO

from jaxpipe.errors import EXIT_CODES, INTERRUPTED, LOST, READER_GONE, STOPPED, ConfigError, RunError
from jaxpipe.files import check_one_line
from jaxpipe.runtime.processes import grid_columns
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.run.ending import Stop
from jaxpipe.train.settings.sections import AXIS_FLAGS

__all__ = ["ClusterJob", "Launch", "follow_launcher", "jobset", "sbatch"]

_LAUNCHER = "JAXPIPE_LAUNCHER"
RESTARTABLE = (RunError.exit_code, LOST)
"""Exit codes that another attempt may mend."""
SAID = (0, ConfigError.exit_code, STOPPED, INTERRUPTED)
"""Exit codes after which nothing is left to say, or to look up in logs."""
_GRACE_S = 5.0
_GLANCE_S = 0.02
_READ_S = 5.0  # after the end, until all is shown
_BLOCK = 1 << 16
_LIBRARY_LOG = re.compile(rb"([EF])\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: ([EF]) ")


class Launch:
    """Runs a command in ``number`` processes. Use as a context: meanwhile every signal that ends a run is passed on to all of
    them, once. ``logs``: a folder for their output."""

    def __init__(self, command: Sequence[str], number: int, logs: Path) -> None:
        self._command, self._number, self._logs = list(command), number, logs
        self._children: list[subprocess.Popen[bytes]] = []
        self._before: dict[int, Any] = {}
        self._asked = 0

    def __enter__(self) -> Launch:
        for number in Stop.signals:
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, restarts: int) -> int:
        """Run to the end, restarting up to ``restarts`` times after a loss; return the exit code of the process that ended
        the run."""
        for attempt in range(restarts + 1):
            listeners = self._start()
            process, code = self._wait()
            for thread in listeners:
                thread.join(_READ_S)
            if code in SAID:
                if code == INTERRUPTED:
                    _write(b"jaxpipe: interrupted\n")
                break
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            code = LOST if code < 0 else code
            again = code in RESTARTABLE and attempt < restarts and not self._asked
            then = (
                f"starting all again ({attempt + 1} of {restarts})" if again else f"all ended; their logs: {self._logs}"
            )
            _write(f"jaxpipe: process {process} {how}; {then}\n".encode())
            if not again:
                break
        return code

    def _start(self) -> list[threading.Thread]:
        """Start all processes; return the threads that read their output."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        of = self._number
        # In the children, until they listen to them; here, until all have started: who starts later would never hear of it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, Stop.signals)
        self._children = []
        listeners = []
        for k in range(of):
            environ = {"JAXPIPE_COORDINATOR": address, "JAXPIPE_PROCESSES": str(of), "JAXPIPE_PROCESS": str(k)}
            environ |= {
                "JAXPIPE_LOCAL_PROCESS": str(k),
                "JAXPIPE_LOCAL_PROCESSES": str(of),
                _LAUNCHER: str(os.getpid()),
            }
            child = subprocess.Popen(
                self._command,
                env={**os.environ, **environ},
                stdin=subprocess.PIPE,  # see follow_launcher
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if k else subprocess.PIPE,
                start_new_session=True,  # a terminal sends Ctrl-C to us alone
            )
            self._children.append(child)
            if len(cores) >= of:
                with suppress(OSError):
                    os.sched_setaffinity(child.pid, cores[k * len(cores) // of : (k + 1) * len(cores) // of])
            log = (self._logs / f"process-{k}.log").open("ab")
            if k == 0:
                listeners.append(threading.Thread(target=self._pass_output, args=(child.stdout, log), daemon=True))
                log = (self._logs / f"process-{k}.log").open("ab")
            listeners.append(
                threading.Thread(target=self._listen, args=(k, child.stderr or child.stdout, log), daemon=True)
            )
        if self._asked:  # before this start
            self._pass_on(self._asked, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for thread in listeners:
            thread.start()
        return listeners

    def _wait(self) -> tuple[int, int]:
        """Wait until all have ended; return the process that ended the others, and its exit code (a killed one: minus the
        signal)."""
        ended: dict[int, int] = {}
        until: float | None = None
        while len(ended) < self._number:
            for k, child in enumerate(self._children):
                if k not in ended and (code := child.poll()) is not None:
                    ended[k] = code
                    if code not in (0, STOPPED):
                        until = until or time.monotonic() + _GRACE_S
            if until is not None and time.monotonic() > until:
                for k in set(range(self._number)) - ended.keys():
                    self._children[k].kill()
                break
            time.sleep(_GLANCE_S)
        for child in self._children:
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        killed = [(k, code) for k, code in ended.items() if code < 0]  # the others may have ended a moment earlier
        failed = [(k, code) for k, code in ended.items() if code not in (0, STOPPED)]
        return next(iter([*killed, *failed, *sorted(ended.items(), key=lambda item: -item[1])]))

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        for child in self._children:
            with suppress(OSError):
                child.send_signal(number)

    def _pass_output(self, stream: Any, log: BinaryIO) -> None:
        """Copy the standard output of process 0 to the log, and to ours while somebody reads it.

        The log gets whole lines, as the lines of standard error go there from another thread.
        """
        lost, line = False, b""
        with stream, log:
            while chunk := stream.read1(_BLOCK):
                lines, end, line = (line + chunk).rpartition(b"\n")
                log.write(lines + end)
                log.flush()
                try:
                    while chunk and not lost:
                        chunk = chunk[os.write(1, chunk) :]
                except OSError as error:
                    lost = True
                    _write(f"jaxpipe: the output can't be written ({error.strerror}); going on without it\n".encode())
            log.write(line)

    def _listen(self, process: int, stream: Any, log: BinaryIO) -> None:
        fatal = False
        with stream, log:
            for line in stream:
                log.write(line)
                log.flush()
                log_match = _LIBRARY_LOG.match(line)
                fatal = fatal or (log_match is not None and b"F" in log_match.groups())
                if self._asked and line.startswith(b"jaxpipe: ") and line.endswith(b"interrupted\n"):
                    continue  # we say it
                if line.startswith(b"jaxpipe: ") or not (log_match or fatal):
                    _write(b"[%d] %s" % (process, line))


def follow_launcher() -> None:
    """Have this process get one SIGTERM when the launcher that started it is gone, as nobody hears it any more. Its standard
    input ends then; Linux's own signal for that (prctl) comes once for every thread that the launcher had."""

    def follow() -> None:
        with suppress(OSError):
            os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ.get(_LAUNCHER) == str(os.getppid()):
        threading.Thread(target=follow, name="jaxpipe-launcher", daemon=True).start()


def _write(line: bytes) -> None:
    with suppress(OSError):
        os.write(2, line)


_PORT = 61440
_SAVE_S = 120
_FINAL = tuple(code for code in EXIT_CODES if code not in (0, *RESTARTABLE, STOPPED, READER_GONE))
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_OPTION = re.compile(r"(--)?([A-Za-z][\w-]*)(=.*)?", re.ASCII | re.DOTALL)
_CLAIM = re.compile(r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?):(/[^:]*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A run of ``jaxpipe ARGUMENTS`` on ``nodes`` hosts with ``gpus`` each, which share them among ``processes``.

    Raises:
        ConfigError: ``config`` needs another number of devices, its ranks do not lie on the processes, or an argument holds a
            control character.
        AgreedError: as :meth:`~jaxpipe.runtime.processes.Processes.arrange`.
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
        num_gpus = self.nodes * self.gpus
        if _LABEL.fullmatch(self.name) is None:
            raise ConfigError(f"--name {self.name}: want at most 40 of a-z, 0-9 and -, from a letter to no -")
        for argument in self.arguments:
            check_one_line(argument, "an argument")
        if pipe.num_devices != num_gpus:
            raise ConfigError(
                f"{pipe.mesh.after(f'{pipe.ranks} ranks')} are {pipe.num_devices} devices and {self.nodes} nodes with "
                f"{self.gpus} GPUs have {num_gpus}; change --nodes, --gpus-per-node, --pp or {AXIS_FLAGS}"
            )
        number = self.nodes * self.processes
        columns = grid_columns(number, pipe.ranks, pipe.mesh, self.config.run.machine.columns)
        if self.gpus % self.processes or pipe.ranks % (number // columns):
            raise ConfigError(
                f"a process has whole ranks, or an equal part of the {pipe.mesh} of one, and here it has "
                f"{self.gpus / self.processes:g} of its node's {self.gpus} GPUs; change --pp, {AXIS_FLAGS} or "
                "--processes-per-node"
            )

    @property
    def summary(self) -> str:
        pipe = self.config.pipeline
        return f"{self.nodes} nodes × {self.gpus} GPUs = {pipe.mesh.after(f'{pipe.ranks} ranks')}"


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
    # Whole nodes: where they are shared a task has one core by default. A node that is lost puts the job into the queue again.
    directives = [*(f"{name}={value}" for name, value in settings.items()), "exclusive", "requeue"]
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
# over all get SIGUSR1, save and stop. Each line of the log begins with the number of the process that wrote it.
code=0
srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none --label {command} || code=$?
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
