"""``jaxpipe launch``: processes started here, told of signals, started again; batch scripts under a stand-in for Slurm; JobSets
by the fields of the published definition. What is launched mostly talks and ends as training would, without JAX."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import jaxpipe.launch
from jaxpipe.cli import main
from jaxpipe.errors import ConfigError
from jaxpipe.launch import Launch
from jaxpipe.train.config import load_config
from tests.support.job_readers import ODD, STRAY, is_stray, pod_of, sbatch_options, srun_arguments
from tests.support.paths import ROOT

JOIN = """
import os, signal, sys, time
from jaxpipe.runtime.peers import find_peers
from jaxpipe.runtime.processes import ProcessGroup
from jaxpipe.train.run.ending import Stop
processes = ProcessGroup(find_peers((None, None, None)), 600)
mine = processes.mine
processes.barrier("all here")
"""
"""The code that every launched process begins with."""
SMALL = ["model.options.d_model=16", "model.options.num_layers=2", "model.options.num_heads=2", "data.seq_len=8"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have launchers wait for processes to end, and for their output, however slow the machine is."""
    monkeypatch.setattr("jaxpipe.launch._GRACE_S", 600)
    monkeypatch.setattr("jaxpipe.launch._READ_S", 600)


@contextmanager
def signalled(number: signal.Signals, is_time: Callable[[], bool], then: Callable[[], object] = bool) -> Iterator[None]:
    """Send this process a signal once ``is_time``, and do something ``then``; unless the block ends before."""
    over = threading.Event()

    def ask() -> None:
        while not is_time():
            if over.wait(0.01):
                return
        os.kill(os.getpid(), number)
        then()

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.fixture
def launch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, list[str]]]:
    """Run a command; return its exit code, standard output, and standard error by line, sorted."""

    def run(code: str, number: int = 2, restarts: int = 0) -> tuple[int, str, list[str]]:
        with Launch([sys.executable, "-c", JOIN + code], number, tmp_path) as started:
            exit_code = started.run(restarts)
        out, err = capfd.readouterr()
        return exit_code, out, sorted(err.splitlines())

    return run


def test_output_and_cores(launch: Callable[..., tuple[int, str, list[str]]], tmp_path: Path) -> None:
    say = "print('out', mine, flush=True); print('err', mine, len(os.sched_getaffinity(0)), file=sys.stderr)"
    code, out, err = launch(f"{say}; processes.leave()")
    each = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert (code, out) == (0, "out 0\n")
    assert err == [f"[0] err 0 {each}", f"[1] err 1 {each}", "[1] out 1"]
    logs = [sorted((tmp_path / f"process-{k}.log").read_text().splitlines()) for k in (0, 1)]
    assert logs == [[f"err {k} {each}", f"out {k}"] for k in (0, 1)]


def test_an_interrupt_before_processes_listen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It waits until they do; the launcher says the line."""
    listen = f"""
import os, time
open({str(tmp_path)!r} + "/up" + os.environ["JAXPIPE_PROCESS"], "w").close()
while not os.path.exists({str(tmp_path / "asked")!r}): time.sleep(0.01)
from jaxpipe.cli import main, registry
registry.run = lambda argv: time.sleep(600)
main()
"""
    with (
        Launch([sys.executable, "-c", listen], 2, tmp_path) as started,
        signalled(signal.SIGINT, lambda: len([*tmp_path.glob("up?")]) == 2, (tmp_path / "asked").touch),
    ):
        code = started.run(0)
    assert (code, capfd.readouterr().err) == (130, "jaxpipe: interrupted\n")


def test_noise_of_libraries_is_kept_in_files(launch: Callable[..., tuple[int, str, list[str]]], tmp_path: Path) -> None:
    fatal = "F1123 08:00:00.123456   99 client.cc:80] Terminating\n*** Check failure stack trace: ***\n    @ 0x1\n"
    say = f"os.write(2, {fatal.encode()!r}) if mine else time.sleep(600); os.abort()"
    code, _, err = launch(f"os.write(2, b'W1123 08:00:00.123456 a warning\\n'); processes.barrier('said'); {say}")
    lost = r"\[0\] jaxpipe: process 1 \(host .*\) was lost: it ended without a word"
    assert code == 6
    assert re.fullmatch(lost, err[1])
    assert [*err[:1], *err[2:]] == [
        "[0] W1123 08:00:00.123456 a warning",
        "[1] W1123 08:00:00.123456 a warning",
        f"jaxpipe: process 1 was killed by SIGABRT; all ended; their logs: {tmp_path}",
    ]
    assert fatal in (tmp_path / "process-1.log").read_text()


def test_what_is_lost_starts_again(launch: Callable[..., tuple[int, str, list[str]]], tmp_path: Path) -> None:
    mark = tmp_path / "tried"
    die = f"open({str(mark)!r}, 'a').write('x'); os.kill(os.getpid(), signal.SIGKILL)"
    often = f"os.path.exists({str(mark)!r}) and os.path.getsize({str(mark)!r}) > 1"
    code, _, err = launch(
        f"if {often}: processes.leave(); sys.exit(75)\nif mine:\n    {die}\ntime.sleep(600)", restarts=3
    )
    assert code == 75
    assert [line for line in err if line.startswith("jaxpipe")] == [
        f"jaxpipe: process 1 was killed by SIGKILL; starting all again ({k} of 3)" for k in (1, 2)
    ]
    code, _, err = launch("if mine: processes.end('failed: no such file', 2)\ntime.sleep(600)", restarts=3)
    assert (code, len(err)) == (2, 2)


def test_who_does_not_end_is_killed(
    launch: Callable[..., tuple[int, str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpipe.launch._GRACE_S", 0.5)
    stuck = """
pids = processes.gather("pid", os.getpid())
if mine: os.kill(os.getpid(), signal.SIGSTOP)
while open(f"/proc/{pids[1]}/stat").read().rpartition(")")[2].split()[0] != "T": time.sleep(0.01)
os._exit(5)
"""
    code, _, err = launch(stuck)
    assert (code, *err)[:1] == (5,)
    assert err[-1].startswith("jaxpipe: process 0 ended with exit code 5; all ended; their logs: ")


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.soak), "SIGUSR1"])
def test_signals_reach_every_process_once(
    launch: Callable[..., tuple[int, str, list[str]]], name: str, tmp_path: Path
) -> None:
    wait = """
with Stop() as stop:
    print("ready", file=sys.stderr, flush=True)
    while not stop.requested: time.sleep(0.02)
    time.sleep(0.3)
    processes.leave()
    print("stopped by", stop.requested, file=sys.stderr)
    sys.exit(75)
"""

    def are_ready() -> bool:
        logs = [*tmp_path.glob("process-?.log")]
        return len(logs) == 2 and all("ready" in log.read_text() for log in logs)

    with signalled(signal.Signals[name], are_ready):
        code, _, err = launch(wait)
    assert code == 75
    stopping = f"{name}: stopping after this step and saving; a second signal ends at once"
    assert err == sorted(f"[{k}] {line}" for k in (0, 1) for line in ("ready", stopping, f"stopped by {name}"))


FOLLOWING = """
from jaxpipe.launch import follow_launcher
follow_launcher()
with Stop() as stop:
    open(f"{os.environ['WHERE']}/{mine}", "w").close()
    while not stop.requested: time.sleep(0.02)
os.remove(f"{os.environ['WHERE']}/{mine}")
processes.leave()
"""


def test_a_launcher_that_is_killed_takes_its_processes_along(tmp_path: Path) -> None:
    command = [sys.executable, "-c", JOIN + FOLLOWING]
    code = f"from pathlib import Path; Launch({command}, 2, Path({str(tmp_path)!r})).run(0)"
    with subprocess.Popen(
        [sys.executable, "-c", f"from jaxpipe.launch import Launch; {code}"],
        cwd=ROOT,
        env={**os.environ, "WHERE": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    ) as launcher:
        _wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        launcher.kill()
    _wait_for(lambda: not (tmp_path / "0").exists() and not (tmp_path / "1").exists())


def _wait_for(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local", "-n", "2"], "give the command to launch after --, such as: jaxpipe launch local -n 2 -- train --config"),
        (["local", "--", "train"], "jaxpipe launch local needs -n (see"),
        (["local", "-n", "9", "--", "train"], "9 processes for 4 pipeline ranks: each has whole ranks"),
        (["slurm", "-o", "x", "--nodes", "3", "--gpus-per-node", "4", "--", "train", "--dp", "auto"], "use 8 (dp 2) or 16 ("),
        (["local", "-n", "2", "--", "train", "run.stepz=3"], "unknown key run.stepz: did you mean run.steps?"),
        (["local", "-n", "2", "--", "train", "--confg", "x"], "unknown flag '--confg'; did you mean '--config'?"),
        (["local", "-n", "2", "--nodes", "2", "--", "train"], "--nodes is not a flag of 'jaxpipe launch local'"),
        (["ssh", "-n", "2", "--", "train"], "invalid choice: 'ssh'"),
        (["slurm", "-o", "x", "--nodes", "2"], "jaxpipe launch slurm needs --gpus-per-node"),
        (
            ["slurm", "-o", "x", "--nodes", "2", "--gpus-per-node", "8", "--", "train"],
            "4 ranks are 4 devices and 2 nodes with 8 GPUs have 16; change --nodes, --gpus-per-node, --pp",
        ),
        (
            ["slurm", "-o", "x", "--nodes", "3", "--gpus-per-node", "2", "--", "train", "--pp", "2", "--tp", "3"],
            "3 processes for 2 pipeline ranks × tp 3: each has whole ranks, or an equal part of a rank's devices; start 2 or 6",
        ),
        (
            ["k8s", "-o", "x", "--nodes", "4", "--gpus-per-node", "1", "--image", "i", "--claim", "c:/runs", "--", "train"],
            "run.out_dir=runs/default is not within /runs, where the claim c is mounted for all pods",
        ),
        (
            ["k8s", "-o", "x", "--nodes", "4", "--gpus-per-node", "1", "--image", "i", "--claim", "c", "--", "train"],
            "--claim c: want NAME:PATH, such as runs:/runs",
        ),
        (
            ["slurm", "-o", "x", "--nodes", "4", "--gpus-per-node", "1", "--name", "A b", "--", "train"],
            "--name A b: want at most 40 of a-z, 0-9 and -",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxpipe: ") and err.count("\n") == 1
    assert message in err


# -- Slurm ----------------------------------------------------------------------------------------------------------------

SRUN = """#!{python}
import os, subprocess, sys
options = sys.argv[1:5]
assert options == ["--kill-on-bad-exit=0", "--wait=60", "--cpu-bind=none", "--label"], options
nodes, per = int(os.environ["FAKE_NODES"]), int(os.environ["FAKE_TASKS"])
step = {{
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": f"127.0.0.[1-{{nodes}}]",
    "SLURM_STEP_NUM_TASKS": str(nodes * per),
    "SLURM_STEP_TASKS_PER_NODE": f"{{per}}(x{{nodes}})",
}}
tasks = [
    subprocess.Popen(
        sys.argv[5:],
        env={{**os.environ, **step, "SLURM_PROCID": str(k), "SLURM_LOCALID": str(k % per), "SLURM_NODEID": str(k // per)}},
    )
    for k in range(nodes * per)
]
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
"""Starts the tasks of a step, and ends with the highest exit code, as srun does."""


@pytest.fixture
def cluster_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, str, bool]]]:
    """Submit what ``jaxpipe launch slurm`` writes, with other code than training; exit code, standard error, and whether the
    job was put back into the queue."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (
        ("srun", SRUN.format(python=sys.executable)),
        ("scontrol", f'#!/bin/bash\necho "$@" > {tmp_path}/queued\n'),
        ("python", f'#!/bin/bash\nexec {sys.executable} -c "$FAKE_CODE"\n'),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def submit(code: str, restarts: int = 0) -> tuple[int, str, bool]:
        file = tmp_path / "job.sbatch"
        flags = ["--nodes", "2", "--gpus-per-node", "4", "--processes-per-node", "2", "--max-restarts", "2"]
        with monkeypatch.context() as patch:
            patch.setattr(jaxpipe.launch.sys, "executable", str(tools / "python"))
            train = ["train", "--pp", "4", "--tp", "2", "run.out_dir=/shared/a run"]
            flags += ["--unchecked", "--sbatch", "time=4:00:00"]
            assert main(["launch", "slurm", "-o", str(file), *flags, "--", *train]) == 0
        text = file.read_text()
        directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
        assert (directives["gpus-per-node"], directives["time"], directives["signal"]) == ("4", "4:00:00", "USR1@120")
        assert directives["chdir"] == str(Path.cwd())
        assert f"{tools / 'python'} -m jaxpipe train --pp 4 --tp 2 'run.out_dir=/shared/a run' ||" in text
        result = subprocess.run(
            ["bash", str(file)],
            env={
                **os.environ,
                "PATH": f"{tools}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "FAKE_CODE": JOIN + code,
                "FAKE_NODES": directives["nodes"],
                "FAKE_TASKS": directives["ntasks-per-node"],
                "SLURM_JOB_ID": str(os.getpid()),
                "SLURM_RESTART_COUNT": str(restarts),
            },
            capture_output=True,
            text=True,
        )
        queued = tmp_path / "queued"
        is_requeued = queued.exists() and queued.read_text() == f"requeue {os.getpid()}\n"
        queued.unlink(missing_ok=True)
        return result.returncode, result.stderr, is_requeued

    yield submit


def test_a_batch_script_runs_on_nodes(cluster_of: Callable[..., tuple[int, str, bool]]) -> None:
    """Four tasks on two nodes that are this machine: they find each other; one is killed, one fails, all stop."""
    where = (
        "x = (*processes.gather('x', str(mine)), find_peers((None,) * 3).local); os.write(2, str(x).encode() + b'\\n')"
    )
    code, err, is_requeued = cluster_of(f"{where}; processes.leave()")
    assert (code, is_requeued) == (0, False)
    assert sorted(err.splitlines()) == ["('0', '1', '2', '3', (0, 2))", "((0, 2),)", "((1, 2),)", "((1, 2),)"]
    kill = "os.kill(os.getpid(), signal.SIGKILL) if mine == 2 else time.sleep(600)"
    code, err, is_requeued = cluster_of(kill)
    assert (code, is_requeued, err.count("jaxpipe: process 2 ")) == (137, True, 3)
    assert cluster_of(kill, restarts=2)[::2] == (137, False)
    code, err, is_requeued = cluster_of("processes.end('failed: a mistake', 2) if mine == 3 else time.sleep(600)")
    assert (code, is_requeued, err.count("failed: a mistake\n")) == (2, False, 4)
    assert cluster_of("processes.leave(); sys.exit(75)")[::2] == (75, True)


SMALL = ("model.options.d_model=16", "model.options.num_heads=2", "model.options.num_layers=2", "data.seq_len=16")


@pytest.mark.parametrize(
    ("gpus", "train", "words"),
    [
        (128, ["--pp", "128"], "the job could not start: 128 stages of 5 layers"),
        (6, ["--pp", "2", "--tp", "3"], "the job could not start: .*num_heads is 2, .* tp 3"),
        (2, ["--pp", "2", "model.target=nothing_here:Model"], "the job could not start: .*nothing_here"),
        (
            2,
            ["--pp", "2", "model.options.d_model=32768"],
            r"rank 0 needs 22\d\.\d GB a device and JAX gets 63.71 GB on h100",
        ),
        (2, ["--pp", "2"], ""),
    ],
)
def test_a_job_is_written_for_a_run_that_can_start(
    gpus: int, train: Sequence[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file is written otherwise, unless that is asked for."""
    flags = ["-o", str(tmp_path / "job"), "--nodes", "1", "--gpus-per-node", str(gpus)]
    command = ["--", "train", *SMALL, *train]
    assert main(["launch", "slurm", *flags, "--target", "h100", *command]) == (2 if words else 0)
    err = capsys.readouterr().err
    assert (re.search(words, err) is not None) and err.count("\n") == bool(words), err
    assert (tmp_path / "job").exists() == (not words)
    assert main(["launch", "slurm", *flags, "--unchecked", *command]) == 0


# -- Kubernetes -----------------------------------------------------------------------------------------------------------

_JOB = "spec.replicatedJobs[].template.spec"
_POD = f"{_JOB}.template.spec"
_CONTAINER = f"{_POD}.containers[]"
FIELDS: Mapping[str, Any] = {
    # Of jobset.x-k8s.io_jobsets.yaml (kubernetes-sigs/jobset 08dfbdf): those fields that are used, their types or values.
    "apiVersion": ["jobset.x-k8s.io/v1alpha2"],
    "kind": ["JobSet"],
    "metadata.name": str,
    "spec.failurePolicy.maxRestarts": int,
    "spec.failurePolicy.rules[].name": str,
    "spec.failurePolicy.rules[].action": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"],
    "spec.failurePolicy.rules[].onJobFailureReasons[]": [
        "BackoffLimitExceeded",
        "DeadlineExceeded",
        "PodFailurePolicy",
    ],
    "spec.network.enableDNSHostnames": bool,
    "spec.network.publishNotReadyAddresses": bool,
    "spec.replicatedJobs[].name": str,
    "spec.replicatedJobs[].replicas": int,
    f"{_JOB}.completionMode": ["Indexed", "NonIndexed"],
    f"{_JOB}.parallelism": int,
    f"{_JOB}.completions": int,
    f"{_JOB}.backoffLimit": int,
    f"{_JOB}.podFailurePolicy.rules[].action": ["Count", "FailIndex", "FailJob", "Ignore"],
    f"{_JOB}.podFailurePolicy.rules[].onExitCodes.containerName": str,
    f"{_JOB}.podFailurePolicy.rules[].onExitCodes.operator": ["In", "NotIn"],
    f"{_JOB}.podFailurePolicy.rules[].onExitCodes.values[]": int,
    f"{_POD}.restartPolicy": ["Never"],  # the only one that a podFailurePolicy goes with
    f"{_POD}.terminationGracePeriodSeconds": int,
    f"{_CONTAINER}.name": str,
    f"{_CONTAINER}.image": str,
    f"{_CONTAINER}.command[]": str,
    f"{_CONTAINER}.env[].name": str,
    f"{_CONTAINER}.env[].value": str,
    f"{_CONTAINER}.resources.limits.nvidia\0com/gpu": int,
    f"{_CONTAINER}.volumeMounts[].name": str,
    f"{_CONTAINER}.volumeMounts[].mountPath": str,
    f"{_POD}.volumes[].name": str,
    f"{_POD}.volumes[].persistentVolumeClaim.claimName": str,
    f"{_POD}.volumes[].emptyDir.medium": str,
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every leaf; a dot of a key is a null character."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key.replace('.', chr(0))}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path, value


def test_a_jobset_has_the_published_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "jobset.yaml"
    flags = ["--nodes", "2", "--gpus-per-node", "4", "--image", "registry/me:1", "--claim", "runs:/runs", "--unchecked"]
    train = ["train", "--pp", "4", "--tp", "2", 'data.path=/runs/"x": y.txt', "run.out_dir=/runs/a"]
    assert main(["launch", "k8s", "-o", str(file), *flags, "--max-restarts", "3", "--name", "big", "--", *train]) == 0
    assert capsys.readouterr().out == (f"2 nodes × 4 GPUs = 4 ranks × tp 2; start it with: kubectl apply -f {file}\n")
    document = yaml.safe_load(file.read_text())
    for path, value in leaves(document):
        field = FIELDS[path]
        assert value in field if isinstance(field, list) else type(value) is field, path
    assert {path for path, _ in leaves(document)} == FIELDS.keys()
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["jaxpipe", *train]
    assert (job["parallelism"], job["completions"]) == (2, 2)
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environ == {"JAXPIPE_COORDINATOR": "big-train-0-0.big:61440", "JAXPIPE_PROCESSES": "2"}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


# -- What no value can become ---------------------------------------------------------------------------------------------

VALUES = st.lists(st.sampled_from(ODD) | st.characters(exclude_categories=("Cs",)), max_size=6).map("".join)


def _job(words: Sequence[str]) -> jaxpipe.launch.ClusterJob:
    return jaxpipe.launch.ClusterJob("packjob", load_config(None, ["run.out_dir=/runs/a"]), ["train", *words], 4, 1)


@given(
    st.lists(VALUES.filter(lambda text: not is_stray(text)), max_size=4),
    *[VALUES.filter(lambda t: not is_stray(t))] * 2,
)
def test_values_reach_their_readers_as_they_are(words: list[str], folder: str, value: str) -> None:
    where = Path("/", folder)
    text = jaxpipe.launch.sbatch(_job(words), [f"comment={value}", "--requeue"], where)
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch, "job.sbatch")
        script.write_text(text, encoding="utf-8")
        assert srun_arguments(script, Path(scratch)) == [sys.executable, "-m", "jaxpipe", "train", *words]
    assert sbatch_options(text) == [
        "--job-name=packjob", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=1", f"--chdir={where}",
        "--output=packjob-%j.log", "--open-mode=append", "--signal=USR1@120", "--exclusive", "--requeue",
        f"--comment={value}", "--requeue",
    ]  # fmt: skip
    document, pod = pod_of(jaxpipe.launch.jobset(_job(words), f"i{value}", "runs:/"))
    assert {path for path, _ in leaves(document)} == FIELDS.keys()
    (container,) = pod["containers"]
    assert (container["command"], container["image"]) == (["jaxpipe", "train", *words], f"i{value}")


@pytest.mark.parametrize("stray", STRAY)
def test_no_line_break_is_written(
    stray: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No value may hold one; the run directory of a config file is not in the files at all."""
    text = f"a{stray}touch PWNED"
    for write in (
        lambda: _job([text]),
        lambda: jaxpipe.launch.sbatch(_job([]), [f"time={text}"], Path("/a")),
        lambda: jaxpipe.launch.sbatch(_job([]), [], Path("/", text)),
        lambda: jaxpipe.launch.jobset(_job([]), text, "runs:/runs"),
        lambda: jaxpipe.launch.jobset(_job([]), "i", f"runs:/{text}"),
        lambda: jaxpipe.launch.jobset(_job([]), "i", f"ru{text}:/runs"),
    ):
        with pytest.raises(ConfigError, match=r"holds .* at character") as caught:
            write()
        assert is_stray(str(caught.value)) is False
    monkeypatch.setattr(jaxpipe.launch.sys, "executable", text)
    with pytest.raises(ConfigError, match="the path of Python"):
        jaxpipe.launch.sbatch(_job([]), [], Path("/a"))
    monkeypatch.undo()
    config, file = tmp_path / "run.toml", tmp_path / "job"
    out_dir = json.dumps(f"/runs/a{stray}kind: Evil\n#", ensure_ascii=ord(stray) < 0xD800)
    config.write_text(f"[run]\nout_dir = {out_dir}", encoding="utf-8", errors="replace")
    flags = ["-o", str(file), "--nodes", "4", "--gpus-per-node", "1", "--unchecked"]
    for where in (["slurm"], ["k8s", "--image", "i", "--claim", "runs:/runs"]):
        code = main(["launch", *where, *flags, "--", "train", "--config", str(config)])
        assert code == 0 or "null" in capsys.readouterr().err
        assert not file.exists() or "Evil" not in file.read_text()


def test_options_of_sbatch_have_a_name(tmp_path: Path) -> None:
    for option in ("", "=1", "-p main", "--", "a b=c", "--\u00e9=1"):
        with pytest.raises(ConfigError, match="want OPTION=VALUE"):
            jaxpipe.launch.sbatch(_job([]), [option], tmp_path)
