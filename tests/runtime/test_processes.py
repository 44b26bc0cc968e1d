"""The processes of a run: how they find each other, what they agree on, and how they end. Most of it in processes that import
no JAX; those that only talk are threads here."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.errors import LOST, AgreedError, ConfigError
from jaxpipe.runtime import connections
from jaxpipe.runtime.peers import Peers, find_peers
from jaxpipe.runtime.processes import ClockOffset, Processes, ProcessGroup, SingleProcess, divided
from jaxpipe.schedule import generate
from jaxpipe.schedule.files import to_schedule
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.run import agreement
from jaxpipe.train.settings.sections import PipelineConfig
from tests.support.paths import ROOT
from tests.support.processes import LONG_S, free_port, run_in_threads

HOST = socket.gethostname()
NONE = (None, None, None)


START = """
import os, signal, sys, time
from jaxpipe.errors import ConfigError
from jaxpipe.runtime import connections
from jaxpipe.runtime.peers import Peers
from jaxpipe.runtime.processes import ProcessGroup
port, number, mine, wait = map(int, sys.argv[1:])
connections._HELLO_S = 600  # how long process 0 tells those that come late
LIMITS
try:
    processes = ProcessGroup(Peers("127.0.0.1", port, number, mine), wait)
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
processes.barrier("all here")
"""


def start(
    code: str, port: int, number: int, process: int, wait: int = LONG_S, limits: str = ""
) -> subprocess.Popen[str]:
    """Start a process that joins the others and runs ``code``. ``limits``: code that sets the time limits of its connections
    before, which are those of users else: 30 s of silence."""
    return subprocess.Popen(
        [sys.executable, "-c", START.replace("LIMITS", limits) + code, *map(str, (port, number, process, wait))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(children: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for the processes and return their exit codes and standard errors."""
    errors = [child.communicate()[1] for child in children]
    return [(child.returncode, text) for child, text in zip(children, errors, strict=True)]


# -- finding each other ---------------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "rack[1-2]-node[04-07,11],login",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
TORCHRUN = {
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "65536.0;tcp://10.0.0.5,10.1.0.5:3491",
}
OURS = {"JAXPIPE_COORDINATOR": "b:1", "JAXPIPE_PROCESSES": "2", "JAXPIPE_PROCESS": "0"}


@pytest.mark.parametrize(
    ("environ", "peers"),
    [
        ({}, None),
        (OURS, Peers("b", 1, 2, 0)),
        ({**OURS, "JAXPIPE_LOCAL_PROCESS": "0", "JAXPIPE_LOCAL_PROCESSES": "2"}, Peers("b", 1, 2, 0, (0, 2))),
        ({**OURS, **TORCHRUN, **SLURM}, Peers("b", 1, 2, 0)),
        ({**OURS, "JAXPIPE_COORDINATOR": "[fe80::1]:7"}, Peers("fe80::1", 7, 2, 0)),
        ({"JAXPIPE_PROCESSES": "1", "JOB_COMPLETION_INDEX": "3"}, None),
        (TORCHRUN, Peers("a", 29500, 4, 3, (1, 2))),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, Peers("a", 29501, 4, 3, (1, 2))),
        ({**TORCHRUN, **SLURM}, Peers("a", 29500, 4, 3, (1, 2))),
        (SLURM, Peers("rack1-node04", 61440 + 47116 % 4000, 9, 3, (1, 2))),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "c:9"}, Peers("c", 9, 9, 3, (1, 2))),
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({**OURS, "JAXPIPE_PROCESS": "", "JOB_COMPLETION_INDEX": "1"}, Peers("b", 1, 2, 1)),
        (OPEN_MPI, Peers("10.0.0.5", 61442, 2, 1)),
    ],
)
def test_where_peers_come_from(environ: dict[str, str], peers: Peers | None) -> None:
    assert find_peers(NONE, environ) == peers
    assert find_peers(("d:2", 3, 1), environ) == Peers("d", 2, 3, 1)


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (("d:2", None, None), {}, "--coordinator is given, --processes, --process are not: several processes need all"),
        (NONE, {"JAX_COORDINATOR_ADDRESS": "c:9"}, "JAX_COORDINATOR_ADDRESS is given, JAXPIPE_PROCESSES, JAXPIPE_PROCESS are"),
        (NONE, {"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE, RANK are given, MASTER_ADDR and MASTER_PORT is not"),
        (NONE, {"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX is given, JAXPIPE_COORDINATOR, JAXPIPE_PROCESSES are not"),
        (NONE, {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""}, "JAXPIPE_COORDINATOR is not"),
        (NONE, {**TORCHRUN, "RANK": "4"}, "RANK is 4 and WORLD_SIZE 4; processes are numbered from 0 to one less"),
        (NONE, {**TORCHRUN, "RANK": "x"}, "RANK is 'x'; want a whole number"),
        (NONE, {**OURS, "JAXPIPE_COORDINATOR": "b"}, "JAXPIPE_COORDINATOR is 'b'; want HOST:PORT of process 0"),
        (("d:99999", 3, 1), {}, "--coordinator is 'd:99999'; want HOST:PORT"),
    ],
)  # fmt: skip
def test_half_a_set_is_a_mistake(flags: tuple[Any, Any, Any], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_peers(flags, environ)


def test_processes_of_a_host_share_its_gpus() -> None:
    peers = Peers("a", 1, 8, 5, (1, 2))
    assert peers.device_ids({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == [2, 3]
    assert peers.device_ids({"CUDA_VISIBLE_DEVICES": "0"}) is None
    assert peers.device_ids({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_LOCAL_DEVICE_IDS": "0"}) is None
    assert Peers("a", 1, 8, 5).device_ids({"CUDA_VISIBLE_DEVICES": "0,1"}) is None


UNTIL_ONE_HAS_COME = """
from types import SimpleNamespace
now, admit = [0.0], connections._Acceptor._admit
def admit_last(*came):
    admit(*came)
    now[0] = 2.0
connections._Acceptor._admit = admit_last
connections.time = SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]})
"""
"""Time stands still for process 0 until another process has come; then two seconds are over."""


def test_some_who_do_not_come_are_named() -> None:
    port = free_port()
    outcomes = ends([start("", port, 4, 0, 1, UNTIL_ONE_HAS_COME), start("", port, 4, 2)])
    line = f"waited 1 s at 127.0.0.1:{port} for processes 1, 3 of 4: start them, or correct the address and the number"
    assert [code for code, _ in outcomes] == [2, 2]
    assert all(text.startswith(line) and text.count("\n") == 1 for _, text in outcomes), outcomes
    ((code, text),) = ends([start("", port, 2, 1, 1)])
    assert code == 2
    assert text.startswith(f"waited 1 s at 127.0.0.1:{port} for process 0 of 2: start it, or correct ")


def test_one_that_dies_before_all_have_come() -> None:
    port = free_port()
    first = start("", port, 3, 0)
    gone = (
        f'import socket; s = socket.create_connection(("127.0.0.1", {port})); s.sendall(b\'["jaxpipe", 2, 3, "h"]\\n\')'
    )
    while subprocess.run([sys.executable, "-c", gone], capture_output=True).returncode:
        time.sleep(0.05)
    outcome = (2, "process 2 (host h) was lost while others were waited for\n")
    assert ends([first, start("", port, 3, 1)]) == [outcome, outcome]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([(3, 1), (2, 1)], f"process 1 (host {HOST}) says that there are 2 processes, process 0 (host {HOST}) 3: "),
        ([(3, 1), (3, 1)], f"two processes say that they are number 1, on hosts {HOST} and {HOST}: "),
    ],
)
def test_processes_that_do_not_fit_together(numbers: list[tuple[int, int]], message: str) -> None:
    port = free_port()
    outcomes = ends([start("", port, 3, 0), *(start("", port, *other) for other in numbers)])
    (line,) = {text for _, text in outcomes}
    assert [code for code, _ in outcomes] == [2, 2, 2]
    assert line.startswith(message) and line.count("\n") == 1


def test_a_port_that_is_taken_and_strangers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=r"^process.*0 can't.*\(Address.*use\)"):
            ProcessGroup(Peers("127.0.0.1", port, 2, 0), LONG_S)
        threading.Thread(target=lambda: server.accept()[0].close()).start()
        with pytest.raises(ConfigError, match="did not answer, or ended: look at its output"):
            ProcessGroup(Peers("127.0.0.1", port, 2, 1), LONG_S)
    port = free_port()
    first = start("processes.leave()", port, 2, 0)
    for payload in (b"GET / HTTP/1.1\r\n\r\n", b'["jaxpipe", 7, 2, "host"]\n', b""):
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(payload)
                break
            except ConnectionRefusedError:
                assert first.poll() is None
                time.sleep(0.01)
    message = "process 0 turned away a connection from 127.0.0.1: its first line is no message of jaxpipe's\n"
    assert ends([first, start("processes.leave()", port, 2, 1)]) == [(0, message), (0, "")]


# -- talking --------------------------------------------------------------------------------------------------------------


def test_texts_of_any_length_arrive_in_order() -> None:
    def talk(processes: Processes) -> Any:
        long = f"{processes.mine}é\n" * (1 << 20)
        lengths = [len(text) for text in processes.gather("long", long)]
        processes.barrier("between")
        texts = [processes.broadcast("count", f"{processes.mine} {k}") for k in range(100)]
        return lengths, texts[99], [processes.who(k) for k in range(processes.number)]

    results = run_in_threads(3, talk)
    who = [f"process {k} (host {HOST})" for k in range(3)]
    assert results == [([3 << 20] * 3, "0 99", who), ([], "0 99", who), ([], "0 99", who)]


def test_threads_talk_beside_each_other() -> None:
    """Process 0 begins with the one exchange, the other process with the other."""

    def talk(processes: Processes) -> Any:
        messages: list[Any] = []
        started = threading.Event()

        def beside() -> None:
            started.set()
            messages.append([processes.broadcast("beside: count", f"{k}") for k in range(50)])

        thread = threading.Thread(target=beside)
        if processes.mine:
            messages.append(processes.broadcast("count", "1"))
        thread.start()
        started.wait()
        if processes.mine == 0:
            messages.append(processes.broadcast("count", "0"))
        thread.join()
        return sorted(messages, key=len)

    assert run_in_threads(2, talk) == [["0", [str(k) for k in range(50)]]] * 2


def test_long_values_come_whole() -> None:
    value = {"rows": [f"{k}F{k} {k}B{k}" for k in range(20_000)], "text": "é\n"}
    everybody = run_in_threads(3, lambda processes: [processes.gather("all", value), processes.broadcast("one", value)])
    assert everybody == [[(value,) * 3, value], [(), value], [(), value]]


STUCK = """
import socket, types
def initialize(address, *_, **__):
    server = socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) if LISTENS and mine == 0 else None
    time.sleep(600)
processes._join_s = 100 if mine == 0 else 1
distributed = types.SimpleNamespace(initialize=initialize)
sys.modules["jax"] = types.SimpleNamespace(config=types.SimpleNamespace(update=lambda *_: None), distributed=distributed)
sys.modules["jaxpipe._jax_compat"] = types.SimpleNamespace(set_cpu_address=str)
processes.start_jax()
"""


@pytest.mark.parametrize(
    ("listens", "words"), [(False, "did not reach JAX's service at "), (True, "waited 1 s at JAX's ")]
)
def test_who_does_not_join_jax_ends_all(listens: bool, words: str) -> None:
    """Process 0 offers no service, or process 1 reaches it and does not join. The other one allows more time."""
    port, limits = free_port(), "from jaxpipe.runtime import processes as p; p._REACH_S = 0.5"
    children = [start(STUCK.replace("LISTENS", str(listens)), port, 2, process, limits=limits) for process in (0, 1)]
    for code, text in ends(children):
        assert code == 2 and text.startswith(f"jaxpipe: process 1 (host {HOST}) {words}") and text.count("\n") == 1, (
            text
        )


def test_who_is_waited_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 speaks of others and process 1 of process 0; both ever more seldom."""
    lines: list[str] = []
    monkeypatch.setattr(connections, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(connections, "say", lines.append)
    late = threading.Event()

    def meet(processes: Processes) -> None:
        if processes.mine >= 2:
            late.wait(LONG_S)
        elif processes.mine == 1:
            threading.Thread(target=lambda: _until(lambda: len(lines) >= 4) or late.set()).start()
        processes.barrier("data")

    assert run_in_threads(4, meet) == [None] * 4
    waits = [re.sub(r"\d+ s", "N s", line).replace(f" (host {HOST})", "") for line in lines]
    away = "it has not come to its steps yet"
    assert f"jaxpipe: process 0 has waited N s at 'data' for process 2: {away}; process 3: {away}" in waits
    assert f"jaxpipe: process 1 has waited N s at 'data' for process 0: {away}" in waits
    assert not any(line.startswith("jaxpipe: process 2") for line in waits if "'data'" in line)


def _until(is_met: Callable[[], bool]) -> None:
    ends = time.monotonic() + LONG_S
    while not is_met() and time.monotonic() < ends:
        time.sleep(0.01)


def test_what_differs_is_said_alike_in_all() -> None:
    def differ(processes: Processes) -> None:
        processes.require_equal("all the same", {"a": "1"}, "never said")
        processes.raise_if_any("all well", "")
        values = {"a": "1", "pipeline.microbatches": "16" if processes.mine == 2 else "8"}
        processes.require_equal("settings", values, "start all with one config")

    errors = run_in_threads(3, differ)
    assert {type(error) for error in errors} == {AgreedError}
    assert {str(error) for error in errors} == {
        f"process 2 (host {HOST}) has pipeline.microbatches=16, process 0 (host {HOST}) has 8: start all with one config"
    }


def test_one_process_talks_to_itself() -> None:
    process = SingleProcess()
    process.barrier("x")
    process.require_equal("x", {"a": "1"}, "never said")
    assert (process.number, process.mine, *process.gather("x", "a"), process.broadcast("x", "b")) == (1, 0, "a", "b")
    process.end("said by who calls", 2)
    process.start_jax()
    process.leave()
    with pytest.raises(AgreedError, match=r"^process 0: too few$"):
        process.raise_if_any("x", "too few")
    code = "import sys, jaxpipe.cli.train_verbs, jaxpipe.train.run.agreement; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT).stdout == b"False\n"


def test_ranks_of_processes() -> None:
    for number in range(1, 9):
        for count in range(number, 33):
            ranks = divided(count, number)
            assert [r for part in ranks for r in part] == list(range(count))
            assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
        with pytest.raises(ConfigError, match=f"^{number} processes for {number - 1} pipeline ranks; each needs one"):
            divided(number - 1, number)
    assert SingleProcess().ranks(3) == (range(3),)


# -- ending ---------------------------------------------------------------------------------------------------------------

SLEEP = "time.sleep(600)"
SIGNALLED = """
from jaxpipe.train.run.ending import EndingEarly
with EndingEarly(processes.end):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("processes.end('failed: no such file', 3)", 3, "failed: no such file"),
        (SIGNALLED, 75, "was stopped by a signal"),
        ("os._exit(0)", LOST, "was lost: it ended without a word"),
        ("os.kill(os.getpid(), signal.SIGKILL)", LOST, "was lost: it ended without a word"),
        ("os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)", LOST, "was lost: nothing was heard of it for 1 s"),
    ],
)
def test_one_that_ends_is_named_by_the_others(who: int, how: str, code: int, message: str) -> None:
    port = free_port()
    # Where a second of silence is too much, nobody is heard but the one that stops: a slow machine may starve any other.
    number = 2 if "STOP" in how and who else 3
    brief = "connections._BEAT_S, connections._LAST_WORDS_S = 0.05, 0.5" if "STOP" in how else ""
    patient = f"{brief}; connections._SILENT_BEATS = 10**9" if brief else ""
    children = [
        start(how if k == who else SLEEP, port, number, k, limits=patient if k == who else brief) for k in range(number)
    ]
    survivors = ends([child for k, child in enumerate(children) if k != who])
    assert survivors == [(code, f"jaxpipe: process {who} (host {HOST}) {message}\n")] * (number - 1)
    children[who].send_signal(signal.SIGCONT)
    ((exit_code, err),) = ends([children[who]])
    if ".end(" in how or "STOP" in how:
        assert (exit_code, err.splitlines()[-1] + "\n") == survivors[0]


def test_a_cause_is_waited_for() -> None:
    """The error of a device when another process is gone is not the cause."""
    port = free_port()
    end = "processes.barrier('ending'); processes.end('failed: connection reset', 5)"
    late = "processes.barrier('ending'); time.sleep(0.3); os._exit(1)"
    patience = "from jaxpipe.runtime import processes; processes._CAUSE_S = 600"
    children = [start(how, port, 2, k, limits=patience) for k, how in enumerate((end, late))]
    assert ends(children)[0] == (LOST, f"jaxpipe: process 1 (host {HOST}) was lost: it ended without a word\n")


LATE = """
processes.set_status(connections.ProcessStatus(lambda: (7, 3 - mine % 2, f"words of {mine}")))
processes.barrier("all told")
HOW
time.sleep(600)
"""


@pytest.mark.parametrize(("late", "stopped"), [((2,), None), ((0, 1, 2), None), ((0,), 1), ((1, 2), 0)])
def test_who_is_late_is_named(late: tuple[int, ...], stopped: int | None, tmp_path: Path) -> None:
    """The one that has come least far, or one that stands still."""
    port, stands = free_port(), tmp_path / "stands"
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    wait = f"while not os.path.exists({str(stands)!r}): time.sleep(0.01)"
    how = dict.fromkeys(late, f"{wait}\nprocesses.time_out('step 7')") | {stopped: stop}
    # Whoever can answer does, or another is named: only where one can't is there a time to wait for.
    limits = "connections._ANSWER_S, connections._LAST_WORDS_S, connections._SILENT_BEATS = {}, 0.5, 10**9"
    limits = limits.format(600 if stopped is None else 0.5)
    children = [start(LATE.replace("HOW", how.get(k, "")), port, 3, k, limits=limits) for k in range(3)]
    if stopped is not None:
        os.waitid(os.P_PID, children[stopped].pid, os.WSTOPPED | os.WNOWAIT)
    stands.touch()
    survivors = ends([child for k, child in enumerate(children) if k != stopped])
    for child in children:
        child.kill()
        child.communicate()
    outcome = (5, f"jaxpipe: process 1 (host {HOST}) failed: step 7: words of 1\n")
    if stopped is not None:
        outcome = (LOST, f"jaxpipe: process {stopped} (host {HOST}) was lost: step 7, and it does not answer\n")
    assert survivors == [outcome] * len(survivors)


WHOLE = """
connections._ANSWER_S = connections._SAVING_S = 600
saved = []
def save(step):
    processes.broadcast("checkpoint: saved", str(step))
    saved.append(step)
left = lambda: f"saved {saved}"
processes.set_status(connections.ProcessStatus(lambda: (7, mine, f"words of {mine}"), left, lambda: STEPS[mine], save))
processes._connections.report_strangers(lambda: "10.0.0.9:77" if mine == 2 else "")
processes.barrier("told")
if mine in (1, 2): processes.time_out("step 7")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("steps", "saved"), [([6, 6, 6], "[6]"), ([6, -1, 6], "[]"), ([6, 5, 6], "[]"), ([-1, -1, -1], "[]")]
)
def test_what_all_have_whole_is_saved(steps: list[int], saved: str) -> None:
    """And no part of it where one has not. The line names who is connected to any of them."""
    port = free_port()
    outcomes = ends([start(WHOLE.replace("STEPS", str(steps)), port, 3, k) for k in range(3)])
    strangers = f"connections that are none of the run's: 10.0.0.9:77 to process 2 (host {HOST})"
    line = f"jaxpipe: process 0 (host {HOST}) failed: step 7: words of 0; {strangers}; saved {saved}\n"
    assert outcomes == [(5, line)] * 3


def test_a_lost_process_is_told_with_what_to_do() -> None:
    port = free_port()
    tell = "processes.set_status(connections.ProcessStatus(advice=lambda: 'go on from step 6')); "
    tell += "processes.barrier('told'); "
    children = [start(tell + how, port, 2, k) for k, how in enumerate((SLEEP, "os._exit(1)"))]
    message = f"jaxpipe: process 1 (host {HOST}) was lost: it ended without a word; go on from step 6\n"
    assert ends(children)[0] == (LOST, message)


# -- before training ------------------------------------------------------------------------------------------------------


def test_directories_that_are_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(processes: Processes) -> None:
        out_dir = tmp_path / ("shared" if processes.mine < split else "other") / "run"
        agreement.agree_on_settings(processes, TrainConfig().override([f"run.out_dir={out_dir}"]))

    split = 2
    assert run_in_threads(2, settle) == [None, None]
    monkeypatch.setattr(agreement, "_SEEN_WITHIN_S", 0.2)
    split = 1
    first, second = run_in_threads(2, settle)
    assert str(first) == str(second)
    assert str(first).startswith(f"process 1 (host {HOST}): run.out_dir={tmp_path}/other/run is not the directory that")
    assert list(tmp_path.iterdir()) == []


def _train(tmp_path: Path, *overrides: Sequence[str], number: int = 2) -> list[tuple[int, str]]:
    """Run ``jaxpipe train`` in several processes, each with overrides of its own, and return how they end."""
    small = ["model.options.d_model=16", "model.options.num_layers=2", "model.options.num_heads=2", "data.seq_len=8"]
    shared = [*small, f"data.path={ROOT / 'LICENSE'}", f"run.out_dir={tmp_path / 'run'}", "pipeline.ranks=2"]
    environ = {**os.environ, "JAXPIPE_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXPIPE_PROCESSES": str(number)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxpipe", "train", *shared, "run.platform=cpu", *extra],
            cwd=ROOT,
            env={**environ, "JAXPIPE_PROCESS": str(process), "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, extra in enumerate(overrides)
    ]
    outcomes = ends(children)
    assert not (tmp_path / "run").exists()
    return outcomes


@pytest.fixture
def shared_error(tmp_path: Path) -> Iterator[Callable[..., str]]:
    def connections(*overrides: Sequence[str], number: int = 2) -> str:
        exits = _train(tmp_path, *overrides, number=number)
        assert [code for code, _ in exits] == [2] * len(overrides), exits
        (message,) = {text for _, text in exits}
        assert message.startswith("jaxpipe: ") and message.count("\n") == 1
        return message.removeprefix("jaxpipe: ").rstrip()

    yield connections


def test_settings_that_differ_are_refused_by_all(shared_error: Callable[..., str]) -> None:
    first, second = (f"process {k} (host {HOST})" for k in (0, 1))
    message = shared_error((), ("pipeline.microbatches=16",))
    assert message == f"{second} has pipeline.microbatches=16, {first} has 8: start all with one config"
    message = shared_error(("run.stepz=3",), ())
    assert message == f"{first} failed: override 'run.stepz=3': unknown key run.stepz: did you mean run.steps?"


@pytest.mark.soak
def test_data_that_differ_are_refused_by_all(shared_error: Callable[..., str]) -> None:
    message = shared_error((), (f"data.path={ROOT / 'README.md'}",))
    assert re.match(r"process 1 \(.*\) has data=\w+, process 0 \(.*\) has \w+: give all the same data.path", message)
    assert "; each needs one at least: start fewer, or raise --pp" in shared_error((), (), (), number=3)


# -- measuring ------------------------------------------------------------------------------------------------------------


def test_clocks_are_compared() -> None:
    """Threads of one process have one clock. Bounds widen no more than clocks drift from one comparison to the next."""
    for comparisons in run_in_threads(3, lambda processes: [processes.clock() for _ in range(3)]):
        assert all(abs(ahead) <= error for ahead, error in comparisons)
        assert comparisons[2][1] <= comparisons[0][1] + 1e-3


def test_a_clock_is_known_within_its_bounds() -> None:
    """Another clock, 5 s ahead, that gains 50 µs a second: messages that take 1 to 9 ms each, one round trip a minute."""
    rng = random.Random(0)
    offset, errors = ClockOffset(), []
    for minute in range(20):
        asked = 60.0 * minute
        ahead = 5 + 5e-5 * asked
        came, received = asked + rng.uniform(1e-3, 9e-3), asked + 1 + rng.uniform(1e-3, 9e-3)
        offset = offset.narrowed(asked, came + ahead, asked + 1 + ahead, received)
        middle, error = offset.middle()
        assert abs(middle - ahead) <= error + 5e-5 + 1e-9
        errors.append(error)
    assert 0 < max(errors) < 9e-3
    assert abs(offset.narrowed(2000, 7100, 7101, 2001.01).middle()[0] - 5100) < 0.01, "the other clock was set"


def test_the_first_process_times_layers_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxpipe.train import assemble
    from models.gpt import GPT

    times = [(1.0, 1e-3 / 3, 2e-3, 0.25, 0.25), (1.0,) * 5]
    monkeypatch.setattr(assemble, "measured_layer_costs", lambda *_: times.pop(0))
    model = GPT(vocab_size=8, d_model=8, num_layers=2, num_heads=1, seq_len=4)
    pipe = PipelineConfig(ranks=2, cut="measured")
    first, second = run_in_threads(2, lambda processes: assemble.stage_planner(pipe, model, 1, processes)(2))
    assert first == second
    assert [stage.layers for stage in first.stages] == [("embed",), ("block_00", "block_01", "head", "loss")]


def test_what_can_t_be_made_in_one_process_is_made_in_none() -> None:
    def make(processes: Processes) -> str:
        def one() -> str:
            if processes.mine == 1:
                raise ConfigError("there is no room")
            return "made"

        return processes.run_on_all("thing", one)

    for error in run_in_threads(2, make):
        assert isinstance(error, AgreedError)
        assert str(error) == f"process 1 (host {HOST}): there is no room"


# -- many -----------------------------------------------------------------------------------------------------------------

PLAYERS = """
import json, resource, socket, sys, time
port, number, *names = sys.argv[1:]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
ends = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(1, int(number))]
files = [end.makefile("rb") for end in ends]
def send(*message):
    for end in ends:
        end.sendall(json.dumps(message).encode() + b"\\n")
def receive(file):
    while (message := json.loads(file.readline())) == ["alive"]:
        pass
    return file.read(message[2]) if message[0] == "packed" else message[2]
for process, end in enumerate(ends, 1):
    end.sendall(json.dumps(["jaxpipe", process, int(number), f"node-{process}"]).encode() + b"\\n")
assert all(json.loads(file.readline())[0] == "welcome" for file in files)
for name in names:
    is_over = False
    while not is_over:
        send("value", name, time.perf_counter())
        answers = [receive(file) for file in files]
        is_over = name != "clock" or answers[0][2]
send("bye")
"""


@pytest.mark.soak
def test_a_thousand_processes_are_as_quick_as_a_few() -> None:
    """CPU seconds of process 0, which waits for nothing else where each process has a host. The others are played by another
    interpreter. A schedule of 64 ranks is broadcast, 1 MB."""
    number, port = 1024, free_port()
    schedule = to_schedule(generate("v-zb", ranks=64, microbatches=256))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = ["start", "clock", "barrier", "clock", "schedule"]
    players = subprocess.Popen([sys.executable, "-c", PLAYERS, str(port), str(number), *names])
    seconds = {}
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        began = time.process_time()
        processes = ProcessGroup(Peers("127.0.0.1", port, number, 0), LONG_S)
        processes.barrier("start")
        seconds["join"] = time.process_time() - began
        processes.clock()  # the first one takes several round trips
        for name, call in (
            ("barrier", lambda: processes.barrier("barrier")),
            ("clock", processes.clock),
            ("schedule", lambda: (processes.gather("schedule", ""), processes.broadcast("schedule", schedule))),
        ):
            began = time.process_time()
            call()
            seconds[name] = time.process_time() - began
        processes._connections.leave()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        players.kill()
        players.wait()
    most = {"join": 10, "barrier": 0.3, "clock": 0.1, "schedule": 1}
    assert {name: cpu_s for name, cpu_s in seconds.items() if cpu_s > most[name]} == {}, seconds
