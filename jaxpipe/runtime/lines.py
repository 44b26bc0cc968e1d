"""One TCP connection from every other process of a run to process 0: texts, and the news that one has ended. Imports no JAX.

The kernel closes the connections of a process that dies, however it dies, so the others know at once and end with one line that
names it: before JAX's own service, which would end them by SIGABRT and a log, or would not notice for a while. A process that
stands still, or whose host is gone, is noticed by its silence. What a process tells goes to process 0, which tells the others.

Nothing is encrypted, and whoever reaches the port may speak, as with JAX's own service: it is for networks of one's own.
Process 0 listens at one interface alone where its address is the number of one.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, BinaryIO, NoReturn

from jaxpipe.errors import ConfigError, RunError
from jaxpipe.runtime.peers import Peers

LOST = 6
"""Exit code of processes that end because another one was lost. Of one that fails the others take over line and code."""
_BEAT_S = 2.0
_SILENT_BEATS = 15
_LAST_WORDS_S = 2.0
_ANSWER_S = 2.0
_LEAVING_S = 10.0
_HELLO_S = 5.0
_LONGEST_HELLO = 4096
_STDERR = 2

Place = tuple[int, int, str]
"""How far a process has come: step, position in it (of all ranks' actions in order), and what it waits for, in words."""


class _Line:
    """One end of a connection: messages are JSON lists, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._file: BinaryIO = connection.makefile("rb")
        self._lock = threading.Lock()
        self._inboxes: dict[str, SimpleQueue[tuple[str, Any]]] = {}
        self.silent = 0  # beats

    def fileno(self) -> int:
        return self._connection.fileno()

    def put(self, *message: object) -> None:
        """Raises OSError where the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._connection.sendall(data)

    def get(self, longest: int = -1) -> list[Any]:
        """The next message; empty at the end, or for what is no message."""
        try:
            message = json.loads(self._file.readline(longest))
        except (OSError, ValueError):
            return []
        return message if isinstance(message, list) else []

    def inbox(self, name: str) -> SimpleQueue[tuple[str, Any]]:
        """Where values of this name come to: those of one channel to one."""
        channel, colon, _ = name.partition(":")
        return self._inboxes.setdefault(channel if colon else "", SimpleQueue())

    def beat(self) -> None:
        """Show that this process lives, unless something is being sent."""
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

    def part(self, words: str) -> None:
        """Have the other end say so and end."""
        with suppress(OSError):
            self.put("end", words, ConfigError.exit_code)
        self.close()

    def close(self) -> None:
        self._file.close()
        self._connection.close()


class Lines:
    """The connections of one process, made by :func:`meet`. ``hosts``: names, by process.

    When another process ends badly, or is not heard of for 30 s, this one ends: with the same line and the same exit code.
    """

    def __init__(self, peers: Peers, hosts: Sequence[str], lines: Mapping[int, _Line]) -> None:
        self.hosts = tuple(hosts)
        self._mine, self._lines = peers.mine, lines
        self._ending, self._leaving = threading.Lock(), threading.Event()
        self._asking = threading.Lock()
        self._where: Callable[[], Place] = lambda: (-1, 0, "it has not come to its steps yet")
        self._places: dict[int, Place] = {}
        self._readers = [threading.Thread(target=self._read, args=(k,), daemon=True) for k in lines]
        for thread in (*self._readers, threading.Thread(target=self._beat, daemon=True)):
            thread.start()

    def who(self, process: int) -> str:
        return f"process {process} (host {self.hosts[process]})"

    def send(self, process: int, name: str, value: Any) -> None:
        """``value``, of JSON, to another process. ``name``: what the other must ask for; threads that talk beside each other
        have names that begin with a channel of their own, as ``channel: name``."""
        with suppress(OSError):  # the thread that reads ends this process
            self._lines[process].put("value", name, value)

    def receive(self, process: int, name: str) -> Any:
        """The next value of that process in the channel of ``name``; waits.

        Raises:
            RunError: it sent something else.
        """
        sent, value = self._lines[process].inbox(name).get()
        if sent != name:
            raise RunError(f"{self.who(self._mine)} waits for {name!r} and {self.who(process)} sent {sent!r}")
        return value

    def end(self, line: str, code: int) -> NoReturn:
        """Say ``line`` here, have all others end with it, and end this process. The first line of a process is its only one."""
        if not self._ending.acquire(blocking=False):
            time.sleep(10 * _LAST_WORDS_S)  # another thread ends it
        say(f"jaxpipe: {line}")
        for other in self._lines.values():
            with suppress(OSError):
                other.put("end", line, code)
            other.finish()
        until = time.monotonic() + _LAST_WORDS_S
        for thread in self._readers:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0))  # until the other has heard
        os._exit(code)

    def tell_place(self, where: Callable[[], Place]) -> None:
        """``where``: how far this process has come; called in another thread, when one of them has waited for too long."""
        self._where = where

    def end_late(self, late: str) -> NoReturn:
        """End all processes. The line names the one that has come least far, with what it waits for, or one that does not
        answer; ``late``: what took too long."""
        if self._mine == 0:
            self._find_last(late)
        with suppress(OSError):
            self._lines[0].put("late", late)
        time.sleep(1.5 * _ANSWER_S)
        self._lost(0, f"{late}, and it does not answer")

    def _find_last(self, late: str) -> NoReturn:
        """In process 0."""
        if not self._asking.acquire(blocking=False):
            time.sleep(10 * _ANSWER_S)  # another thread ends it
        for line in self._lines.values():
            with suppress(OSError):
                line.put("where")
        places = {0: self._place()}
        until = time.monotonic() + _ANSWER_S
        while len(self._places) < len(self._lines) and time.monotonic() < until:
            time.sleep(0.01)
        places |= self._places
        if silent := sorted(self._lines.keys() - places.keys()):
            self._lost(silent[0], f"{late}, and it does not answer")
        last = min(places, key=lambda k: places[k][:2])
        self.end(f"{self.who(last)} failed: {late}: {places[last][2]}", RunError.exit_code)

    def _place(self) -> Place:
        try:
            return self._where()
        except Exception as error:  # it is to say something
            return sys.maxsize, 0, f"what it waits for is not known ({type(error).__name__})"

    def _lost(self, process: int, how: str) -> NoReturn:
        self.end(f"{self.who(process)} was lost: {how}", LOST)

    def leave(self) -> None:
        """Take the connections down, when all processes do; process 0 returns last."""
        self._leaving.set()
        for line in self._lines.values():
            with suppress(OSError):
                line.put("bye")
            line.finish()
        for thread in self._readers:
            thread.join(_LEAVING_S)
        for line in self._lines.values():
            line.close()

    def _read(self, process: int) -> None:
        line = self._lines[process]
        while message := line.get():
            line.silent = 0
            if message[0] == "value":
                line.inbox(message[1]).put((message[1], message[2]))
            elif message[0] == "where":
                with suppress(OSError):
                    line.put("here", *self._place())
            elif message[0] == "here":
                self._places[process] = (message[1], message[2], message[3])
            elif message[0] == "late":
                threading.Thread(target=self._find_last, args=message[1:], daemon=True).start()
            elif message[0] == "end" and not self._ending.locked():
                self.end(message[1], message[2])
            elif message[0] in ("bye", "end"):
                return
        if not (self._ending.locked() or self._leaving.is_set()):
            self._lost(process, "it ended without a word")

    def _beat(self) -> None:
        while not self._leaving.wait(_BEAT_S):
            for process, line in self._lines.items():
                line.silent += 1
                if line.silent > _SILENT_BEATS and not self._ending.locked():
                    silence = f"nothing was heard of it for {_SILENT_BEATS * _BEAT_S:.0f} s"
                    self._lost(process, silence)
                line.beat()


def meet(peers: Peers, wait_s: float) -> Lines:
    """The connections of this process, once all processes have come.

    Raises:
        ConfigError: some did not within ``wait_s``, process 0 can't listen, or the processes don't fit together. All that came
            raise it, with the same words.
    """
    return (_meet_others if peers.mine == 0 else _meet_first)(peers, time.monotonic() + wait_s, wait_s)


def _meet_others(peers: Peers, until: float, wait_s: float) -> Lines:
    """In process 0."""
    here = socket.gethostname()
    joined: dict[int, _Line] = {}
    hosts = {0: here}

    def refuse(words: str, *more: _Line, late_s: float = _HELLO_S) -> NoReturn:
        """Tell all who have come, and those who come a little later."""
        told = [*joined.values(), *more]
        for line in told:
            line.part(words)
        until = time.monotonic() + late_s
        with suppress(TimeoutError):
            for _ in range(peers.number - 1 - len(told)):
                server.settimeout(max(until - time.monotonic(), 1e-3))
                late = _Line(server.accept()[0])
                late.wait_at_most(_HELLO_S)
                late.get(_LONGEST_HELLO)  # what is not read would take the answer with it
                late.part(words)
        raise ConfigError(words)

    with _listening(peers) as server, selectors.DefaultSelector() as watched:
        watched.register(server, selectors.EVENT_READ, 0)
        while len(joined) < peers.number - 1:
            ready = {key.data for key, _ in watched.select(max(until - time.monotonic(), 0))}
            if not ready:
                missing = [k for k in range(1, peers.number) if k not in joined]
                refuse(_waited(wait_s, missing, peers), late_s=0)
            for gone in ready - {0}:  # none of them has anything to say yet
                refuse(f"process {gone} (host {hosts[gone]}) was lost while others were waited for")
            line = _Line(server.accept()[0])
            line.wait_at_most(_HELLO_S)
            match line.get(_LONGEST_HELLO):
                case ["jaxpipe", int(process), int(number), str(host)] if 0 < process < number:
                    pass
                case _:
                    line.close()  # a stranger
                    continue
            came = f"process {process} (host {host})"
            if number != peers.number:
                refuse(f"{came} says that there are {number} processes, process 0 (host {here}) {peers.number}: start all "
                       "with one number", line)  # fmt: skip
            if process in hosts:
                refuse(f"two processes say that they are number {process}, on hosts {hosts[process]} and {host}: give each "
                       "a number of its own", line)  # fmt: skip
            line.wait_at_most(None)
            joined[process], hosts[process] = line, host
            watched.register(line, selectors.EVENT_READ, process)
    for line in joined.values():
        with suppress(OSError):
            line.put("welcome", *(hosts[k] for k in range(peers.number)))
    return Lines(peers, [hosts[k] for k in range(peers.number)], joined)


def _listening(peers: Peers) -> socket.socket:
    """At the interface whose number the address is. At all of them where it is a name, which may be 127.0.0.1 on the host
    itself, or the number of another's, as behind a router.

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
                (host, peers.port), family=family, backlog=peers.number, dualstack_ipv6=all_of_both
            )
        except OSError as error:
            failed = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
    why = os.strerror(failed.errno) if failed.errno and failed.errno > 0 else str(failed)
    raise ConfigError(f"process 0 can't listen at {peers.address} ({why}): choose another port or address")


def _meet_first(peers: Peers, until: float, wait_s: float) -> Lines:
    """In the others."""
    line = _connected(peers, until, wait_s)
    line.wait_at_most(max(until - time.monotonic(), 0) + _HELLO_S + _LAST_WORDS_S)
    with suppress(OSError):
        line.put("jaxpipe", peers.mine, peers.number, socket.gethostname())
    match line.get():
        case ["welcome", *hosts] if len(hosts) == peers.number:
            line.wait_at_most(None)
            return Lines(peers, hosts, {0: line})
        case ["end", str(words), int()]:
            line.close()
            raise ConfigError(words)
    line.close()
    raise ConfigError(
        f"process 0 at {peers.address} did not answer, or ended: look at its output, or correct the address"
    )


def _connected(peers: Peers, until: float, wait_s: float) -> _Line:
    why = ""
    while time.monotonic() < until:
        try:
            connection = socket.create_connection((peers.host, peers.port), timeout=_HELLO_S)
            if (
                connection.getsockname() != connection.getpeername()
            ):  # else nobody listens, and Linux gave us that very port
                return _Line(connection)
            connection.close()
        except OSError as error:
            why = f" ({error.strerror or error})"
        time.sleep(0.1)
    raise ConfigError(_waited(wait_s, [0], peers) + why)


def _waited(wait_s: float, missing: Sequence[int], peers: Peers) -> str:
    few = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    which, them = ("processes", "them") if len(missing) > 1 else ("process", "it")
    start = f"start {them}, or correct the address and the number of processes"
    return f"waited {wait_s:.0f} s at {peers.address} for {which} {few} of {peers.number}: {start}"


def say(line: str) -> None:
    """On standard error; not by print, which may be in the midst of another one."""
    before = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(_STDERR, f"{before}{line}\n".encode(errors="replace"))
