"""Who connects to process 0 while processes are waited for is believed only where a hello is one in all its parts, keeps nobody
waiting, and is named; and the addresses by which processes of several hosts reach each other."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import AgreedError, ConfigError
from jaxpipe.runtime import connections, peers
from jaxpipe.runtime.connections import Hello, allow_files, connect, parse_hello
from jaxpipe.runtime.peers import Peers, foreign_peers, plain_address, printable, words_of
from jaxpipe.runtime.processes import SingleProcess, agree_on_interface
from tests.support.paths import ROOT
from tests.support.processes import LONG_S, free_port, run_in_threads

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def strangers() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    from torture_parts import strangers

    yield strangers
    sys.path.remove(str(ROOT / "scripts"))


# -- hellos ---------------------------------------------------------------------------------------------------------------


@given(
    process=st.integers(1, 5),
    later=st.integers(1, 5),
    host=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=255),
)
def test_a_hello_is_believed(process: int, later: int, host: str) -> None:
    for ascii_only in (False, True):
        line = json.dumps(["jaxpipe", process, process + later, host], ensure_ascii=ascii_only).encode()
        assert parse_hello(line) == Hello(process, process + later, host)


@pytest.mark.parametrize(
    "line",
    [
        b'["jaxpipe",true,2,"h"]',
        b'["jaxpipe",1,true,"h"]',
        b'["jaxpipe",1.0,2,"h"]',
        b'["jaxpipe",1,2.0,"h"]',
        b'["jaxpipe",-1,2,"h"]',
        b'["jaxpipe",0,2,"h"]',
        b'["jaxpipe",2,2,"h"]',
        b'["jaxpipe",1,NaN,"h"]',
        b'["jaxpipe",1,1e999,"h"]',
        b'["jaxpipe",1,2,"\\u001b[2J"]',
        b'["jaxpipe",1,2,"\\ud800"]',
        b'["jaxpipe",1,2,""]',
        b'["jaxpipe",1,2,7]',
        b'["jaxpipe",1,2,"' + b"h" * 256 + b'"]',
        b'["jaxpipe",1,2]',
        b'["jaxpipe",1,2,"h",3]',
        b'["jaxpipe/2",1,2,"h"]',
        b'{"jaxpipe":1}',
        b"[" * 4000,
        b"9" * 4000,
        b"\xff\xfe[\x00]\x00",
        b"",
    ],
)
def test_what_is_almost_a_hello_is_none(line: bytes) -> None:
    reason = parse_hello(line)
    assert isinstance(reason, str) and reason.isprintable()


def test_generated_lines_against_a_second_opinion(strangers: ModuleType) -> None:
    rng = Random(0)
    for _ in range(2000):
        for line in strangers.hellos(rng).split(b"\n"):
            assert isinstance(parse_hello(line), str), line


def test_generated_strangers_keep_nobody_from_meeting(strangers: ModuleType, tmp_path: Path) -> None:
    from torture_parts.trial import Trial

    for number in range(24):
        strangers._meet(Trial(Random(number), tmp_path), come=number % 4 != 0)


# -- joining --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what process 0 says; a hello may take as long as a slow machine needs."""
    lines: list[str] = []
    monkeypatch.setattr(connections, "say", lines.append)
    monkeypatch.setattr(connections, "_HELLO_S", LONG_S)
    return lines


def first_of(number: int, port: int, wait_s: float = LONG_S) -> tuple[threading.Thread, list[Any]]:
    """Start process 0 in a thread; return the thread and a list for what comes of it."""
    outcomes: list[Any] = []

    def wait() -> None:
        try:
            outcomes.append(connect(Peers("127.0.0.1", port, number, 0), wait_s))
        except ConfigError as error:
            outcomes.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, outcomes


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
        except ConnectionRefusedError:
            time.sleep(0.01)


@contextmanager
def speaking_slowly(connection: socket.socket, silent: bool) -> Iterator[None]:
    """Send a byte now and then, or nothing at all where ``silent``."""
    over = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            while not over.wait(0.05):
                connection.sendall(b"[")

    thread = threading.Thread(target=over.wait if silent else drip)
    thread.start()
    with connection:
        yield
        over.set()
        thread.join()


@pytest.mark.parametrize("silent", [True, False])
def test_waiting_ends_however_slowly_a_stranger_speaks(
    messages: list[str], monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Who has connected before waiting begins is no reason to wait longer than the caller says."""
    listen, slow = connections._listen, list[socket.socket]()

    def listen_to_a_stranger(peers: Peers) -> socket.socket:
        server = listen(peers)
        slow.append(socket.create_connection(("127.0.0.1", peers.port)))
        return server

    monkeypatch.setattr(connections, "_listen", listen_to_a_stranger)
    port = free_port()
    thread, outcomes = first_of(2, port, 0.5)
    while not slow:
        time.sleep(0.01)
    with speaking_slowly(slow[0], silent):
        thread.join()
    assert str(outcomes[0]).startswith(f"waited 0.5 s at 127.0.0.1:{port} for process 1 of 2")
    assert messages == []


@pytest.mark.parametrize("silent", [True, False])
def test_a_stranger_that_speaks_slowly_is_turned_away(
    messages: list[str], monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """A byte now and then is no reason to wait longer than a hello may take; nor is nothing at all."""
    monkeypatch.setattr(connections, "_HELLO_S", 0.2)
    port = free_port()
    thread, outcomes = first_of(2, port)
    with speaking_slowly(connected(port), silent):
        while not messages:
            time.sleep(0.01)
    assert "it sent no line within" in messages[0]
    monkeypatch.setattr(connections, "_HELLO_S", LONG_S)
    other = connect(Peers("127.0.0.1", port, 2, 1), LONG_S)
    thread.join()
    leave(outcomes[0], other)


def test_a_long_line_is_not_waited_for(messages: list[str]) -> None:
    """Nor kept: its sender is turned away once it is longer than a hello may be."""
    port = free_port()
    thread, outcomes = first_of(2, port)
    with connected(port) as endless, suppress(ConnectionError):
        endless.sendall(b'["jaxpipe",1,2,"' + b"h" * 20_000)
        assert endless.recv(4096).startswith(b'["end"')
    other = connect(Peers("127.0.0.1", port, 2, 1), LONG_S)
    thread.join()
    leave(outcomes[0], other)
    assert len(messages) == 1 and "it sent no line within" not in messages[0]


def test_silent_strangers_do_not_hold_up_processes(messages: list[str]) -> None:
    """Side by side: ten that say nothing cost nothing."""
    port = free_port()
    thread, outcomes = first_of(2, port)
    silent = [connected(port) for _ in range(10)]
    other = connect(Peers("127.0.0.1", port, 2, 1), LONG_S)
    thread.join()
    assert messages == []  # nobody's time was over
    for connection in silent:
        connection.close()
    leave(outcomes[0], other)


def leave(*both: connections.Connections) -> None:
    threads = [threading.Thread(target=one.leave) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_strangers_are_named_once_and_few_of_them(messages: list[str]) -> None:
    port = free_port()
    thread, outcomes = first_of(2, port)
    for k in range(12):
        for _ in range(2):
            with connected(port, f"127.0.0.{k + 2}") as stranger:
                stranger.sendall(b'["jaxpipe", true, 2, "\\u001b[2J"]\n')
                assert json.loads(stranger.recv(4096))[0] == "end"
    other = connect(Peers("127.0.0.1", port, 2, 1), LONG_S)
    thread.join()
    leave(outcomes[0], other)
    assert [line.split()[7].rstrip(":") for line in messages[:8]] == [f"127.0.0.{k + 2}" for k in range(8)]
    assert len(messages) == 9 and "further" in messages[8] and all(line.isprintable() for line in messages)


def test_mistakes_are_told_within_the_time_for_joining(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those who come later hear of it, but not after the time that the caller gives."""
    port, now = free_port(), [0.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]}))
    monkeypatch.setattr(connections, "_HELLO_S", 2 * LONG_S)
    thread, outcomes = first_of(3, port)
    with connected(port) as wrong, connected(port):
        wrong.sendall(b'["jaxpipe", 1, 9, "h"]\n')
        assert "says that there are 9 processes" in json.loads(wrong.recv(4096))[1]
        now[0] = LONG_S + 1.0
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()  # it looks at the clock when somebody comes
        thread.join()
        assert "says that there are 9 processes" in str(outcomes[0])


def test_the_other_side_waits_no_longer_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else listens at the address, and speaks slowly."""
    open_connection = connections._open_connection
    monkeypatch.setattr(
        connections, "_open_connection", lambda peers, until, _: open_connection(peers, until + LONG_S, LONG_S)
    )
    monkeypatch.setattr(connections, "_WELCOME_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def drip() -> None:
            with server.accept()[0] as connection:
                try:
                    while not over.wait(0.05):
                        connection.sendall(b" ")
                except OSError:
                    pass

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(ConfigError, match=r"^waited.*0.5.*0 answers.*2 processes"):
            connect(Peers("127.0.0.1", server.getsockname()[1], 2, 1), 0.5)
        over.set()
        thread.join()


@pytest.mark.parametrize(
    "answer", [b'["welcome","a"]', b'["welcome","a","\\u001b[2J"]', b'["welcome","a",1]', b"[" * 5000]
)
def test_a_welcome_that_is_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer + b"\n")

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(ConfigError, match="did not answer, or ended: look at its output"):
            connect(Peers("127.0.0.1", server.getsockname()[1], 2, 1), LONG_S)
        thread.join()


def test_the_limit_on_open_files() -> None:
    """It is raised as far as may be; where that does not suffice, one line says so in all processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        assert allow_files(2) == ""
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert f"the limit is {hard}" in allow_files(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    port = free_port()
    code = f"""
import resource, sys, time
from types import SimpleNamespace
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
from jaxpipe.errors import ConfigError
from jaxpipe.runtime import connections
from jaxpipe.runtime.connections import Connection, connect
from jaxpipe.runtime.peers import Peers
now, tell = [0.0], Connection.shut_down_peer
def tell_last(*message):  # time is over for process 0 when the other has heard it
    tell(*message)
    now[0] = {LONG_S} + 1.0
Connection.shut_down_peer = tell_last
connections.time = SimpleNamespace(**{{**vars(time), "monotonic": lambda: now[0]}})
try:
    connect(Peers("127.0.0.1", {port}, 100, int(sys.argv[1])), {LONG_S})
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(k)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for k in (0, 1)
    ]
    ends = [(child.communicate()[1], child.returncode) for child in children]
    line = f"process 0 (host {HOST}): 100 processes need 228 open files and the limit is 200: raise it (ulimit -n)\n"
    assert ends == [(line, 2)] * 2


def test_what_a_process_says_reaches_no_terminal_as_it_is() -> None:
    assert printable("a\x1b[2J\u202eb\n") == "a?[2J?b?"
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"


# -- addresses ------------------------------------------------------------------------------------------------------------

A, B = "10.77.0.1", "10.77.0.2"


def addresses(
    hosts: list[str], ends: dict[int, tuple[str, str]], setting: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return the address that each of several processes takes. ``ends`` holds, by process but the first, the two
    addresses of its connection to the first."""
    monkeypatch.setattr(peers, "address_of", lambda setting: {"ib0": "10.9.0.1"}.get(setting, setting))

    def agree(processes: Any) -> str:
        k = processes.mine
        connection_ends = {j: (far, near) for j, (near, far) in ends.items()} if k == 0 else {0: ends[k]}
        environ = {peers.SETTING: setting[k]} if k in setting else {}
        return agree_on_interface(processes, hosts, connection_ends, environ)

    return run_in_threads(len(hosts), agree)


LOOP = ("127.0.0.1", "127.0.1.1")


@pytest.mark.parametrize(
    ("hosts", "ends", "setting", "expected"),
    [
        (["a", "a"], {1: ("127.0.0.1", "127.0.0.1")}, {}, ["127.0.0.1"] * 2),
        (["a", "a"], {1: LOOP}, {}, ["127.0.1.1"] * 2),
        (["a", "b"], {1: (B, A)}, {}, [A, B]),
        (["a", "a", "b", "b"], {1: LOOP, 2: (B, A), 3: (B, A)}, {}, [A, A, B, B]),
        (["a", "a", "b"], {1: (A, A), 2: (B, A)}, {}, [A, A, B]),
        (["same", "same"], {1: (B, A)}, {}, [A, B]),  # two hosts of one name
        (["a", "a", "b"], {1: ("::1", "::1"), 2: ("fd00::2", "fd00::1")}, {}, ["fd00::1", "fd00::1", "fd00::2"]),
        (["a", "b"], {1: (B, A)}, {0: "ib0"}, ["10.9.0.1", B]),
        (["a", "a", "b"], {1: LOOP, 2: (B, A)}, {0: "ib0", 2: "10.9.0.2"}, ["10.9.0.1", "10.9.0.1", "10.9.0.2"]),
    ],
)  # fmt: skip
def test_by_which_address_a_process_is_reached(
    hosts: list[str],
    ends: dict[int, tuple[str, str]],
    setting: dict[int, str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert addresses(hosts, ends, setting, monkeypatch) == expected


@pytest.mark.parametrize(
    ("ends", "setting", "at"),
    [
        ({1: LOOP}, {}, "process 0 .* at 127.0.1.1"),
        ({1: (B, A)}, {1: "127.0.0.1"}, "process 1 .* at 127.0.0.1"),
        ({1: ("::1", "::1")}, {}, "process 0 .* at ::1"),
        ({1: ("fe80::2%eth0", "fe80::1%eth0")}, {}, "process 0 .* at fe80::1%eth0"),
    ],
)
def test_an_address_within_a_host_is_refused_for_several(
    ends: dict[int, tuple[str, str]], setting: dict[int, str], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = addresses(["a", "b"], ends, setting, monkeypatch)
    assert type(first) is AgreedError and str(first) == str(second)
    with pytest.raises(AgreedError, match=f"{at}.*JAXPIPE_INTERFACE"):
        raise first


def test_the_setting_names_an_interface_or_an_address() -> None:
    assert peers.address_of("lo") == peers.address_of("127.0.0.1") == "127.0.0.1"
    for setting in ("ib7", "192.0.2.77", "2001:db8::77", "0.0.0.0", "::", "eth0/24", ""):
        with pytest.raises(ValueError, match=r"interface|address"):
            peers.address_of(setting)
    with pytest.raises(AgreedError, match=r"JAXPIPE_INTERFACE.*'ib7'.*lo"):
        agree_on_interface(SingleProcess(), ["a"], {}, {peers.SETTING: "ib7"})


TWO_HOSTS = """
ip link set lo up || exit 77
for h in 0 1; do
  own=$([ $1 = debian ] && echo 127.0.1.1 || echo $2$((h + 1)))
  printf "127.0.0.1 localhost\\n$own node-$h\\n$2$((2 - h)) node-$((1 - h))\\n" > $W/hosts.$h
  unshare -n -u -m --propagation private bash -c '
    mount --bind $W/hosts.'$h' /etc/hosts && hostname node-'$h' && ip link set lo up || exit 77
    echo $$ > $W/pid.'$h'
    for i in $(seq 30000); do [ -e $W/joined ] && break; sleep 0.02; done
    ip addr add '$2$((h + 1))/$3' dev eth0 nodad 2> $W/err || ip addr add '$2$((h + 1))/$3' dev eth0 || exit 77
    ip link set eth0 up || exit 77
    exec '"$PYTHON"' -c "$CODE" '$h > $W/out.$h &
done
for i in $(seq 30000); do [ -s $W/pid.0 ] && [ -s $W/pid.1 ] && break; sleep 0.02; done
ip link add v0 type veth peer name v1 && ip link set v0 netns $(cat $W/pid.0) name eth0 || exit 77
ip link set v1 netns $(cat $W/pid.1) name eth0 || exit 77
touch $W/joined
wait
"""
"""Two hosts on this machine, with a network, a name and an /etc/hosts of their own each. Arguments: how a host's own name is
written there; the network; its bits."""
WHERE = """
import json, sys
from jaxpipe.runtime.peers import Peers
from jaxpipe.runtime.processes import ProcessGroup
processes = ProcessGroup(Peers("node-0", 61500, 2, int(sys.argv[1])), 600)
print(json.dumps([processes.who(0), processes.interface()]))
processes.leave()
"""


@pytest.mark.parametrize("style", ["plain", "debian"])
@pytest.mark.parametrize(("network", "bits"), [("10.77.0.", 24), ("fd77::", 64)])
def test_two_hosts(style: str, network: str, bits: int, tmp_path: Path) -> None:
    """Really, where this machine can make networks: a host's own name may be 127.0.1.1."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip, to make networks")
    environ = {**os.environ, "W": str(tmp_path), "CODE": WHERE, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["unshare", "-n", "bash", "-c", TWO_HOSTS, "bash", style, network, str(bits)],
        capture_output=True,
        text=True,
        env=environ,
    )
    if result.returncode or "not" in result.stderr:
        pytest.skip(f"networks can't be made here: {result.stderr.strip()[-200:]}")
    reports = [json.loads((tmp_path / f"out.{k}").read_text()) for k in (0, 1)]
    assert reports == [["process 0 (host node-0)", f"{network}{k + 1}"] for k in (0, 1)]


# -- who is connected -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_foreign_peers_are_found(family: socket.AddressFamily, address: str) -> None:
    """A connection from a process that is none of the run's; not those of its own, nor those that this process has made."""
    if not Path("/proc/net/tcp").exists() or (family == socket.AF_INET6 and not socket.has_ipv6):
        pytest.skip("needs /proc/net/tcp and IPv6")
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        code = f"import socket, sys; c = socket.create_connection(({address!r}, {port})); sys.stdin.read()"
        other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        with server.accept()[0] as theirs, socket.create_connection((address, port)) as mine, server.accept()[0]:
            name = "{}:{}".format(*theirs.getpeername()[:2])
            assert mine.getsockname()[1] != theirs.getpeername()[1]
            assert foreign_peers([address], [os.getpid()]) == [name]
            assert foreign_peers([address], [os.getpid(), other.pid]) == []
        other.communicate(b"")


def test_foreign_peers_of_other_hosts(tmp_path: Path) -> None:
    """The tables of an invented process show it listening, with connections of a host of the run and of others."""
    row = "   {}: {}:{:04X} {}:{:04X} {} 00000000:00000000 00:00000000 00000000     0        0 {} 1\n"
    local, peer, stranger = "0100000A", "0200000A", "0900000A"  # 10.0.0.1, .2, .9
    rows = [
        (local, 7000, "00000000", 0, "0A", 1),
        (local, 7000, peer, 41000, "01", 2),
        (local, 7000, stranger, 41001, "01", 3),
        (local, 7000, stranger, 41002, "06", 4),  # closing
        (local, 41003, stranger, 443, "01", 5),  # a tracker's
        (local, 7001, stranger, 41004, "01", 99),  # another process's
    ]
    (tmp_path / "net").mkdir()
    table = "".join(row.format(k, *values) for k, values in enumerate(rows))
    (tmp_path / "net/tcp").write_text(f"  sl  local_address …\n{table}")
    wrapped = "0000000000000000FFFF0000" + stranger
    (tmp_path / "net/tcp6").write_text("  sl\n" + row.format(0, "0" * 24 + local, 7000, wrapped, 41005, "01", 6))
    (tmp_path / "self/fd").mkdir(parents=True)
    for number in range(1, 7):
        (tmp_path / f"self/fd/{number}").symlink_to(f"socket:[{number}]")
    assert foreign_peers(["10.0.0.1", "10.0.0.2"], [], tmp_path) == ["10.0.0.9:41001", "10.0.0.9:41005"]
    assert words_of([str(k) for k in range(6)]) == "0, 1, 2, 3 and 2 more"
    assert foreign_peers([], [], tmp_path / "none") == []
