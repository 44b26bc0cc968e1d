"""One TCP connection from every other process of a run to process 0: messages, and the news that one has ended. Imports no JAX.

The kernel closes the connections of a process that dies, however it dies, so the others know at once and end with one line that
names it: before JAX's own service, which would end them by SIGABRT and a log, or would not notice for a while. A process that
stands still, or whose host is gone, is noticed by its silence. Messages to all go to process 0, which forwards them.

:func:`connect` makes the connections: process 0 listens, each other process connects and says who it is in one line, its hello.
Whoever reaches the port may send anything: nothing at all, a byte now and then, megabytes, JSON that is almost a hello. So
process 0 reads first lines side by side, each with a deadline of its own, believes only what is a hello in all its parts, and
names whom it turns away by address. Connecting takes at most as long as its caller says, whatever comes.

Nothing is encrypted, and whoever reaches the port while processes are waited for may speak, as with JAX's own service: it is
for private networks.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import resource
import selectors
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, NoReturn

from jaxpipe.errors import LOST, ConfigError, RunError
from jaxpipe.runtime.peers import Peers, is_host, own_host, plain_address, printable

# No beat is sent while a long call holds the interpreter's lock, so 30 s of silence are allowed; JAX's own service would abort
# all processes after 100 s.
_BEAT_S = 2.0
_SILENT_BEATS = 15
_LAST_WORDS_S = 2.0
_ANSWER_S = 2.0
_SAVING_S = 20.0
_LEAVING_S = 10.0
_PATIENCE_S = 60.0
"""Seconds that a process waits for a value of another before it says for whom; then twice as long, and so on."""
_STDERR = 2
_MOST_PLAIN_BYTES = 16_384
"""A longer value is compressed before it is sent: process 0 sends that of a broadcast once to each other process."""

Position = tuple[int, int, str]
"""How far a process has come: its step, the position in it (among all ranks' actions in order), and what it waits for, in
words."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Answers what others may ask of a process while it runs steps; all fields are called in other threads.

    Attributes:
        position: returns how far it has come.
        advice: returns what to do after this end of the run, in words.
        unsaved_step: returns the last finished step, if this process has all of its arrays and no checkpoint does, or -1.
        save: brings that step to the disk, together with all other processes.
    """

    position: Callable[[], Position] = lambda: (-1, 0, "it has not come to its steps yet")
    advice: Callable[[], str] = str
    unsaved_step: Callable[[], int] = lambda: -1
    save: Callable[[int], object] = lambda step: None


class Connection:
    """One end of a connection: messages are JSON lists, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        # Messages are short and waited for: Nagle's algorithm would hold each one up to 40 ms for the acknowledgement of the
        # last.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._file: BinaryIO = connection.makefile("rb")
        self._lock = threading.Lock()
        self._inboxes: dict[str, SimpleQueue[tuple[str, Any, float]]] = {}
        self.silent = 0  # beats

    def fileno(self) -> int:
        return self._connection.fileno()

    def put(self, *message: object) -> None:
        """Send a message. Raises OSError where the other end is gone."""
        self.put_encoded(encoded(*message))

    def put_encoded(self, message: bytes) -> None:
        """Send a message that :func:`encoded` has made, as :meth:`put` does."""
        # Several threads send (steps, checkpoints, the beat); a message torn by another would end the run as one of a stranger.
        with self._lock:
            self._connection.sendall(message)

    def get(self, longest: int = -1) -> list[Any]:
        """Return the next message; empty at the end, or for what is no message."""
        try:
            message = json.loads(self._file.readline(longest))
            match message:
                # No stranger's first line: what it may unpack to has no limit.
                case ["packed", str(name), int(size)] if longest < 0:
                    message = ["value", name, json.loads(zlib.decompress(self._file.read(size)))]
        except (OSError, ValueError, RecursionError, zlib.error):
            return []
        return message if isinstance(message, list) else []

    def ends(self) -> tuple[str, str]:
        """Return the addresses of this end and of the other one."""
        with suppress(OSError):
            return plain_address(self._connection.getsockname()[0]), plain_address(self._connection.getpeername()[0])
        return "0.0.0.0", "0.0.0.0"  # the other end is gone, which the thread that reads says

    def inbox(self, name: str) -> SimpleQueue[tuple[str, Any, float]]:
        """Return the queue of values of this name: one for each channel."""
        channel, colon, _ = name.partition(":")
        # ``setdefault`` is atomic: the reading thread and the one that waits may both be the first to ask.
        return self._inboxes.setdefault(channel if colon else "", SimpleQueue())

    def beat(self) -> None:
        """Show that this process lives, unless something is being sent."""
        # Never wait for the lock: whoever holds it shows the same, and a full buffer of one connection must not silence the
        # rest.
        if self._lock.acquire(blocking=False):
            with suppress(OSError):
                self._connection.sendall(b'["alive"]\n')
            self._lock.release()

    def wait_at_most(self, seconds: float | None) -> None:
        self._connection.settimeout(seconds)

    def finish(self) -> None:
        """Send nothing more; the other end sees that after what was sent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def shut_down_peer(self, message: str) -> None:
        """Have the process at the other end print ``message`` and end."""
        self.wait_at_most(_LAST_WORDS_S)
        with suppress(OSError):
            self.put("end", message, ConfigError.exit_code)
        self.close()

    def shut(self) -> None:
        """End the connection, also for a thread that reads from it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._file.close()
        self._connection.close()


def encoded(*message: object) -> bytes:
    """Encode a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def encoded_value(name: str, value: Any) -> bytes:
    """Encode the message of a value, compressed where it is long: a line, and then so many bytes as the line says."""
    text = json.dumps(value).encode()
    if len(text) <= _MOST_PLAIN_BYTES:
        return encoded("value", name, value)
    # The schedule of 64 ranks and 512 microbatches, 0.7 MB, becomes 0.17 MB in 3 ms; a higher level saves a tenth more.
    packed = zlib.compress(text, 1)
    return encoded("packed", name, len(packed)) + packed


class Connections:
    """The connections of one process, made by :func:`~jaxpipe.runtime.connections.connect`. ``hosts``: names, by process.

    When another process ends badly, or is not heard of for 30 s, this one ends: with the same line and the same exit code.
    """

    def __init__(self, peers: Peers, hosts: Sequence[str], connections: Mapping[int, Connection]) -> None:
        self.hosts = tuple(hosts)
        self._mine, self._connections = peers.mine, connections
        self._ending, self._leaving = threading.Lock(), threading.Event()
        self._asking = threading.Lock()
        self._status = ProcessStatus()
        self._foreign: Callable[[], str] = str
        self._answers: dict[int, tuple[Position, str, int]] = {}
        self._saving = threading.Event()
        self._readers = [threading.Thread(target=self._read, args=(k,), daemon=True) for k in connections]
        for thread in (*self._readers, threading.Thread(target=self._beat, daemon=True)):
            thread.start()

    def who(self, process: int) -> str:
        return f"process {process} (host {self.hosts[process]})"

    def send(self, process: int, name: str, value: Any) -> None:
        """Send ``value``, of JSON, to another process. ``name``: what the other must ask for; threads that talk beside each
        other have names that begin with a channel of their own, as ``channel: name``."""
        # A connection that is gone is the reading thread's business: it ends this process with the line that says why.
        with suppress(OSError):
            self._connections[process].put_encoded(encoded_value(name, value))

    def send_all(self, name: str, value: Any) -> None:
        """Send ``value`` from process 0 to all others, encoded once."""
        message = encoded_value(name, value)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.put_encoded(message)

    def receive(self, process: int, name: str) -> Any:
        """Wait for the next value of that process in the channel of ``name``, and return it.

        Raises:
            RunError: it sent something else.
        """
        return self.receive_timed(process, name)[0]

    def receive_timed(self, process: int, name: str) -> tuple[Any, float]:
        """Receive as :meth:`receive` does, and return when the value came, too, by ``time.perf_counter``."""
        began, patience_s = time.monotonic(), _PATIENCE_S
        while True:
            with suppress(Empty):
                name_sent, value, received_at = self._connections[process].inbox(name).get(timeout=patience_s)
                break
            patience_s *= 2
            # All wait for process 0 alike, so one of them says it.
            if self._mine <= 1:
                self._say_awaited(f"{time.monotonic() - began:.0f} s", name, process)
        # Both sides call the same collectives in the same order; a name that differs means that one of them took another
        # branch.
        if name_sent != name:
            raise RunError(f"{self.who(self._mine)} waits for {name!r} and {self.who(process)} sent {name_sent!r}")
        return value, received_at

    def _say_awaited(self, waited: str, name: str, first: int) -> None:
        """Say which processes, from the ``first`` on, have sent no value of this name yet, and where they are."""
        missing = [k for k in sorted(self._connections) if k >= first and self._connections[k].inbox(name).empty()]
        with self._asking:
            answers = self._ask(missing[:_MOST_NAMED])
        unknown: tuple[Position, str, int] = ((-1, 0, "it does not answer"), "", -1)
        places = [f"{self.who(k)}: {answers.get(k, unknown)[0][2]}" for k in missing[:_MOST_NAMED]]
        more = [f"and {len(missing) - _MOST_NAMED} more"] if len(missing) > _MOST_NAMED else []
        if missing:
            say(f"jaxpipe: {self.who(self._mine)} has waited {waited} at {name!r} for {'; '.join([*places, *more])}")

    def ends(self) -> dict[int, tuple[str, str]]:
        """Return the addresses of this end and of the other one, of the connection to each process."""
        return {process: connection.ends() for process, connection in self._connections.items()}

    def end(self, line: str, code: int) -> NoReturn:
        """Print ``line`` here, have all others end with it, and end this process. The first line of a process is its only
        one."""
        # The lock is never released: a second thread sleeps until ``os._exit`` of the first takes it along.
        if not self._ending.acquire(blocking=False):
            time.sleep(10 * _LAST_WORDS_S)
        say(f"jaxpipe: {line}")
        for connection in self._connections.values():
            with suppress(OSError):
                connection.put("end", line, code)
            connection.finish()
        # A reader ends when the other end has closed, so it has the line. Exiting earlier may reset the connection with the
        # line still in it, and the other would report this process as lost.
        until = time.monotonic() + _LAST_WORDS_S
        for thread in self._readers:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0))
        # ``sys.exit`` would end this thread alone, and others may be inside XLA, waiting for a process that is gone.
        os._exit(code)

    def set_status(self, standing: ProcessStatus) -> None:
        """Set what others may ask of this process when a process is lost, or one of them has waited for too long."""
        self._status = standing

    def report_strangers(self, foreign: Callable[[], str]) -> None:
        """Set how to find out who is connected to this process and belongs to none of the run: ``foreign`` returns words."""
        self._foreign = foreign

    def time_out(self, late: str) -> NoReturn:
        """End all processes. The line names the one that has come least far, with what it waits for, or one that does not
        answer; ``late``: what took too long."""
        if self._mine == 0:
            self._end_with_slowest(late)
        with suppress(OSError):
            self._connections[0].put("late", late)
        # Process 0 has answered by then, and ended this process, unless it stands still itself or saves a step first.
        time.sleep(1.5 * _ANSWER_S)
        if self._saving.is_set():
            time.sleep(_SAVING_S)
        self._end_as_lost(0, f"{late}, and it does not answer")

    def _end_with_slowest(self, late: str) -> NoReturn:
        """Ask all processes where they are, in process 0, and end the run with a line about the one that has come least far."""
        # Several processes may run out of time at once; the first question is the only one.
        self._asking.acquire(timeout=10 * _ANSWER_S)
        answers = {0: self._answer()} | self._ask(self._connections)
        if silent := sorted(self._connections.keys() - answers.keys()):
            self._end_as_lost(silent[0], f"{late}, and it does not answer")
        # The least far is the cause: the others wait for it, directly or through one another.
        slowest = min(answers, key=lambda k: answers[k][0][:2])
        strangers = [f"{foreign} to {self.who(k)}" for k, (_, foreign, _) in sorted(answers.items()) if foreign]
        note = f"; connections that are none of the run's: {', '.join(strangers)}" if strangers else ""
        self._save_all({step for _, _, step in answers.values()})
        reason = f"{late}: {answers[slowest][0][2]}{note}{self._advice()}"
        self.end(f"{self.who(slowest)} failed: {reason}", RunError.exit_code)

    def _ask(self, processes: Collection[int]) -> dict[int, tuple[Position, str, int]]:
        """Ask processes where they are, and return the answers that come in time."""
        self._answers.clear()
        for process in processes:
            with suppress(OSError):
                self._connections[process].put("where")
        until = time.monotonic() + _ANSWER_S
        while len(self._answers) < len(processes) and time.monotonic() < until:
            time.sleep(0.01)
        return dict(self._answers)

    def _save_all(self, steps: Collection[int]) -> None:
        """Have all processes save their unsaved step, in process 0, if it is the same one: a checkpoint of two steps is
        none."""
        if len(steps) > 1 or min(steps) < 0:
            return
        (step,) = steps
        for connection in self._connections.values():
            with suppress(OSError):
                connection.put("save", step)
        saving = threading.Thread(target=self._save, args=(step,), daemon=True)
        saving.start()
        saving.join(_SAVING_S)

    def _save(self, step: int) -> None:
        self._saving.set()
        # A save that fails changes nothing: the advice names the step from which the run goes on, whichever it is.
        with suppress(Exception):
            self._status.save(step)

    def _advice(self) -> str:
        with suppress(Exception):
            return f"; {advice}" if (advice := self._status.advice()) else ""
        return ""

    def _answer(self) -> tuple[Position, str, int]:
        """Return where this process is, who is connected to it, and its unsaved step."""
        position, foreign, step = self._position(), "", -1
        with suppress(Exception):
            foreign = self._foreign()
        with suppress(Exception):
            step = self._status.unsaved_step()
        return position, foreign, step

    def _position(self) -> Position:
        # No answer would count as a process that stands still, so a failing one still answers, as the last to be blamed.
        try:
            return self._status.position()
        except Exception as error:
            return sys.maxsize, 0, f"what it waits for is not known ({type(error).__name__})"

    def _end_as_lost(self, process: int, how: str) -> NoReturn:
        self.end(f"{self.who(process)} was lost: {how}{self._advice()}", LOST)

    def leave(self) -> None:
        """Take the connections down, when all processes do; process 0 returns last."""
        self._leaving.set()
        for connection in self._connections.values():
            with suppress(OSError):
                connection.put("bye")
            connection.finish()
        until = time.monotonic() + _LEAVING_S
        for thread in self._readers:
            thread.join(max(until - time.monotonic(), 0))
        for connection in self._connections.values():
            connection.close()

    def _read(self, process: int) -> None:
        connection = self._connections[process]
        while message := connection.get():
            connection.silent = 0
            match message:
                case ["alive"]:
                    pass
                case ["value", str(name), value]:
                    connection.inbox(name).put((name, value, time.perf_counter()))
                case ["where"]:
                    with suppress(OSError):
                        connection.put("here", *self._answer())
                case ["here", [int(step), int(at), str(words)], str(foreign), int(unsaved_step)]:
                    self._answers[process] = ((step, at, printable(words)), printable(foreign), unsaved_step)
                # Saving and asking run in threads of their own: this one must go on reading, as the answers come through it.
                case ["save", int(step)]:
                    threading.Thread(target=self._save, args=(step,), daemon=True).start()
                case ["late", str(late)]:
                    threading.Thread(target=self._end_with_slowest, args=(late,), daemon=True).start()
                case ["end", str(words), int(code)]:
                    if not self._ending.locked():
                        self.end(printable(words), code)
                    return
                case ["bye"]:
                    return
                case _:
                    break
        # The end of the stream, or what no version of ours sends. While this process ends or leaves, others close first.
        if not (self._ending.locked() or self._leaving.is_set()):
            self._end_as_lost(process, "it ended without a word")

    def _beat(self) -> None:
        while not self._leaving.wait(_BEAT_S):
            for process, connection in self._connections.items():
                connection.silent += 1
                if connection.silent > _SILENT_BEATS and not self._ending.locked():
                    silence = f"nothing was heard of it for {_SILENT_BEATS * _BEAT_S:.0f} s"
                    self._end_as_lost(process, silence)
                connection.beat()


def say(line: str) -> None:
    """On standard error; not by print, which may be in the midst of another one."""
    before = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(_STDERR, f"{before}{line}\n".encode(errors="replace"))


_HELLO_S = 5.0
_WELCOME_S = 2.0
"""How much longer than process 0 the others wait, so that its words reach them."""
_LONGEST_HELLO = 4096
_MOST_NAMED = 8
_OTHER_FILES = 128
"""Descriptors that a process needs beside those of the connections to the others; connections that wait to be accepted."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Which process has connected, of how many, on which host."""

    process: int
    number: int
    host: str


def parse_hello(line: bytes) -> Hello | str:
    """Read the hello of a first line, or say why it is none, in words for people."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return "its first line is no message of jaxpipe's"
    match message:
        # ``type(…) is int``: JSON's true and false would pass as numbers of processes.
        case ["jaxpipe", process, number, host] if type(process) is int and type(number) is int:
            if not 0 < process < number:
                return "it says that it is a process of a number that there is not"
            return Hello(process, number, host) if is_host(host) else "the name of its host is none"
        case [str(name), *_] if name.startswith("jaxpipe"):
            return "its first line is no hello of this version of jaxpipe"
    return "its first line is no message of jaxpipe's"


def connect(peers: Peers, wait_s: float) -> Connections:
    """Return the connections of this process, once all processes have come.

    Raises:
        ConfigError: some did not within ``wait_s``, process 0 can't listen, or the processes don't fit together. All that came
            raise it, with the same words.
    """
    until = time.monotonic() + wait_s
    if peers.mine:
        return _connect_to_leader(peers, until, wait_s)
    with _listen(peers) as server, selectors.DefaultSelector() as watched:
        return _Acceptor(peers, until, wait_s, server, watched).run()


@dataclass(slots=True, eq=False)
class _Arrival:
    """A connection whose first line is not whole yet."""

    connection: socket.socket
    address: str
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class _Acceptor:
    """Process 0, until all have come. ``until``: when waiting ends."""

    def __init__(
        self, peers: Peers, until: float, wait_s: float, server: socket.socket, watched: selectors.BaseSelector
    ) -> None:
        self._peers, self._until, self._wait_s, self._server, self._watched = peers, until, wait_s, server, watched
        self._hosts = {0: own_host()}
        self._joined: dict[int, Connection] = {}
        self._arrivals: list[_Arrival] = []
        self._named: set[str] = set()
        server.setblocking(False)
        watched.register(server, selectors.EVENT_READ, None)

    def run(self) -> Connections:
        """Wait for all. Raises ConfigError as :func:`connect`."""
        try:
            if too_few := allow_files(self._peers.number):
                self._refuse(f"process 0 (host {self._hosts[0]}): {too_few}")
            hellos = self._hellos(self._until)
            while len(self._joined) < self._peers.number - 1:
                if (arrival_and_hello := next(hellos, None)) is None:
                    missing = [k for k in range(1, self._peers.number) if k not in self._joined]
                    self._refuse(_waited(self._wait_s, missing, self._peers), is_over=True)
                self._admit(*arrival_and_hello)
        finally:
            for arrival in self._arrivals:
                arrival.connection.close()
        hosts = [self._hosts[k] for k in range(self._peers.number)]
        for connection in self._joined.values():
            connection.wait_at_most(_HELLO_S)
            with suppress(OSError):  # the thread that reads says that it is gone
                connection.put("welcome", *hosts)
            connection.wait_at_most(None)
        return Connections(self._peers, hosts, self._joined)

    def _admit(self, arrival: _Arrival, hello: Hello) -> None:
        came = f"process {hello.process} (host {hello.host})"
        number, hosts = self._peers.number, self._hosts
        connection = Connection(arrival.connection)
        if hello.number != number:
            self._refuse(f"{came} says that there are {hello.number} processes, process 0 (host {hosts[0]}) {number}: start "
                         "all with one number", connection)  # fmt: skip
        if hello.process in hosts:
            self._refuse(f"two processes say that they are number {hello.process}, on hosts {hosts[hello.process]} and "
                         f"{hello.host}: give each a number of its own", connection)  # fmt: skip
        self._joined[hello.process], hosts[hello.process] = connection, hello.host
        self._watched.register(connection, selectors.EVENT_READ, hello.process)

    def _refuse(self, words: str, *rejected: Connection, is_over: bool = False) -> NoReturn:
        """Send ``words`` to all who have come, and soon come unless waiting ``is_over``, and raise them here."""
        for connection in self._joined.values():
            self._watched.unregister(connection)
        recipients = [*self._joined.values(), *rejected]
        for connection in recipients:
            connection.shut_down_peer(words)
        # Those that are still starting would wait for process 0 until their own time is up, and then say something less useful.
        missing = self._peers.number - 1 - len(recipients)
        if missing > 0 and not is_over:
            for arrival, _ in self._hellos(min(self._until, time.monotonic() + _HELLO_S)):
                Connection(arrival.connection).shut_down_peer(words)
                missing -= 1
                if not missing:
                    break
        raise ConfigError(words)

    def _hellos(self, until: float) -> Iterator[tuple[_Arrival, Hello]]:
        """Yield every hello as soon as it is complete; end at ``until``."""
        while (now := time.monotonic()) < until:
            next_deadline = min((arrival.deadline for arrival in self._arrivals), default=until)
            for key, _ in self._watched.select(max(min(next_deadline, until) - now, 0)):
                if key.data is None:
                    self._accept()
                # Who has joined has nothing to say before the welcome, so what is readable is its end.
                elif isinstance(key.data, int):
                    self._refuse(
                        f"process {key.data} (host {self._hosts[key.data]}) was lost while others were waited for"
                    )
                elif key.data in self._arrivals and (hello := self._read(key.data)):
                    yield key.data, hello
            for late in [arrival for arrival in self._arrivals if arrival.deadline <= time.monotonic()]:
                self._turn_away(late, f"it sent no line within {_HELLO_S:.0f} s")

    def _accept(self) -> None:
        try:
            connection, address = self._server.accept()
        # Out of descriptors: make room by turning the oldest arrival away, or strangers that say nothing would keep the run's
        # own processes out. Any other error means that who came has gone again.
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if not self._arrivals:
                    self._refuse(f"process 0 (host {self._hosts[0]}) can't open another connection ({error.strerror}): "
                                 "raise the limit on open files (ulimit -n)")  # fmt: skip
                self._turn_away(self._arrivals[0], "too many connections said nothing")
            return
        connection.setblocking(False)
        self._arrivals.append(_Arrival(connection, plain_address(address[0]), time.monotonic() + _HELLO_S))
        self._watched.register(connection, selectors.EVENT_READ, self._arrivals[-1])

    def _read(self, arrival: _Arrival) -> Hello | None:
        """Read what has come, and return the hello if that completes it."""
        try:
            part = arrival.connection.recv(_LONGEST_HELLO)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        arrival.received += part
        # Nothing may follow the hello before the welcome: ``rest`` would be lost when the socket goes to a buffered reader.
        line, newline, rest = bytes(arrival.received).partition(b"\n")
        if not newline and part and len(line) < _LONGEST_HELLO:
            return None
        hello = parse_hello(line if newline and not rest else b"")
        if isinstance(hello, str):
            self._turn_away(arrival, hello if arrival.received else "it sent nothing")
            return None
        self._forget(arrival)
        arrival.connection.setblocking(True)
        return hello

    def _forget(self, arrival: _Arrival) -> None:
        self._watched.unregister(arrival.connection)
        self._arrivals.remove(arrival)

    def _turn_away(self, arrival: _Arrival, why: str) -> None:
        """Close a connection, and name it: each address once, and few of them."""
        self._forget(arrival)
        with suppress(OSError):
            arrival.connection.send(json.dumps(["end", f"process 0 turned this one away: {why}", 2]).encode() + b"\n")
        arrival.connection.close()
        if arrival.address in self._named or len(self._named) > _MOST_NAMED:
            return
        self._named.add(arrival.address)
        shown = arrival.address if len(self._named) <= _MOST_NAMED else "further addresses, which are not named"
        say(f"process 0 turned away a connection from {shown}: {why}")


def allow_files(connections: int) -> str:
    """Raise the limit on open files as far as this process may. Return what to say if it does not suffice for so many
    ``connections``, or ""."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= connections + _OTHER_FILES:
        return ""
    num_files = connections + _OTHER_FILES
    return f"{connections} processes need {num_files} open files and the limit is {soft}: raise it (ulimit -n)"


def _listen(peers: Peers) -> socket.socket:
    """Listen at the interface whose number the address is; at all of them where it is a name, which may be 127.0.0.1 on the
    host itself, or the number of another host, as behind a router.

    Raises:
        ConfigError: another program listens there, or nobody may.
    """
    hosts, dual = [""], socket.has_dualstack_ipv6()
    with suppress(ValueError):
        hosts.insert(0, str(ipaddress.ip_address({"localhost": "127.0.0.1"}.get(peers.host, peers.host))))
    for host in hosts:
        all_of_both = dual and not host
        family = socket.AF_INET6 if all_of_both or ":" in host else socket.AF_INET
        try:
            return socket.create_server(
                (host, peers.port), family=family, backlog=max(_OTHER_FILES, peers.number), dualstack_ipv6=all_of_both
            )
        except OSError as error:
            failed = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
    why = os.strerror(failed.errno) if failed.errno and failed.errno > 0 else str(failed)
    raise ConfigError(f"process 0 can't listen at {peers.address} ({why}): choose another port or address")


def _connect_to_leader(peers: Peers, until: float, wait_s: float) -> Connections:
    """Connect a process other than 0, and wait for the welcome or the refusal of process 0."""
    allow_files(0)
    connection = _open_connection(peers, until, wait_s)
    out_of_time = threading.Timer(max(until - time.monotonic(), 0) + _WELCOME_S, connection.shut)
    out_of_time.daemon = True
    out_of_time.start()
    with suppress(OSError):
        connection.put("jaxpipe", peers.mine, peers.number, own_host())
    message = connection.get(_LONGEST_HELLO * peers.number)  # each name in it was in a hello
    out_of_time.cancel()
    match message:
        case ["welcome", *hosts] if len(hosts) == peers.number and all(map(is_host, hosts)):
            return Connections(peers, hosts, {0: connection})
        case ["end", str(words), int()]:
            connection.close()
            raise ConfigError(printable(words))
    connection.close()
    if time.monotonic() >= until:
        raise ConfigError(
            f"waited {wait_s:.3g} s at {peers.address}: process 0 answers, but not all of {peers.number} processes came: "
            "look at its output"
        )
    raise ConfigError(
        f"process 0 at {peers.address} did not answer, or ended: look at its output, or correct the address"
    )


def _open_connection(peers: Peers, until: float, wait_s: float) -> Connection:
    why = ""
    while (left_s := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((peers.host, peers.port), timeout=min(_HELLO_S, left_s))
            # Where nobody listens on this host, Linux may choose the very port we connect to as our own: a connection to
            # ourselves.
            if connection.getsockname() != connection.getpeername():
                connection.settimeout(None)
                return Connection(connection)
            connection.close()
        except OSError as error:
            why = f" ({error.strerror or error})"
        time.sleep(min(0.1, left_s))
    raise ConfigError(_waited(wait_s, [0], peers) + why)


def _waited(wait_s: float, missing: Sequence[int], peers: Peers) -> str:
    few = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    which, them = ("processes", "them") if len(missing) > 1 else ("process", "it")
    start = f"start {them}, or correct the address and the number of processes"
    return f"waited {wait_s:.3g} s at {peers.address} for {which} {few} of {peers.number}: {start}"
