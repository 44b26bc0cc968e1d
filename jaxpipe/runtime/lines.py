"""One TCP connection from every other process of a run to process 0: texts, and the news that one has ended. Imports no JAX.

The kernel closes the connections of a process that dies, however it dies, so the others know at once and end with one line that
names it: before JAX's own service, which would end them by SIGABRT and a log, or would not notice for a while. A process that
stands still, or whose host is gone, is noticed by its silence. What a process tells goes to process 0, which tells the others.

How they find each other is :mod:`jaxpipe.runtime.meeting`'s. Nothing is encrypted, and whoever reaches the port while processes
are waited for may speak, as with JAX's own service: it is for networks of one's own.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
_SAVING_S = 20.0
_LEAVING_S = 10.0
_STDERR = 2

Place = tuple[int, int, str]
"""How far a process has come: step, position in it (of all ranks' actions in order), and what it waits for, in words."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a process while it runs steps; all are called in other threads.

    Attributes:
        where: how far it has come.
        left: what to do after this end of the run, in words.
        whole: the last finished step, if this process has all of its arrays and no checkpoint does, or -1.
        save: brings that step to the disk, together with all other processes.
    """

    where: Callable[[], Place] = lambda: (-1, 0, "it has not come to its steps yet")
    left: Callable[[], str] = str
    whole: Callable[[], int] = lambda: -1
    save: Callable[[int], object] = lambda step: None


class Line:
    """One end of a connection: messages are JSON lists, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._file: BinaryIO = connection.makefile("rb")
        self._lock = threading.Lock()
        self._inboxes: dict[str, SimpleQueue[tuple[str, Any, float]]] = {}
        self.silent = 0  # beats

    def fileno(self) -> int:
        return self._connection.fileno()

    def put(self, *message: object) -> None:
        """Raises OSError where the other end is gone."""
        self.put_encoded(encoded(*message))

    def put_encoded(self, message: bytes) -> None:
        """As :meth:`put`, of what :func:`encoded` has made."""
        with self._lock:
            self._connection.sendall(message)

    def get(self, longest: int = -1) -> list[Any]:
        """The next message; empty at the end, or for what is no message."""
        try:
            message = json.loads(self._file.readline(longest))
        except (OSError, ValueError, RecursionError):
            return []
        return message if isinstance(message, list) else []

    def ends(self) -> tuple[str, str]:
        """The addresses of this end and of the other one."""
        with suppress(OSError):
            return plain_address(self._connection.getsockname()[0]), plain_address(self._connection.getpeername()[0])
        return "0.0.0.0", "0.0.0.0"  # the other end is gone, which the thread that reads says

    def inbox(self, name: str) -> SimpleQueue[tuple[str, Any, float]]:
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
        self.wait_at_most(_LAST_WORDS_S)
        with suppress(OSError):
            self.put("end", words, ConfigError.exit_code)
        self.close()

    def shut(self) -> None:
        """End the connection, also for a thread that reads from it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._file.close()
        self._connection.close()


def encoded(*message: object) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


class Lines:
    """The connections of one process, made by :func:`~jaxpipe.runtime.meeting.meet`. ``hosts``: names, by process.

    When another process ends badly, or is not heard of for 30 s, this one ends: with the same line and the same exit code.
    """

    def __init__(self, peers: Peers, hosts: Sequence[str], lines: Mapping[int, Line]) -> None:
        self.hosts = tuple(hosts)
        self._mine, self._lines = peers.mine, lines
        self._ending, self._leaving = threading.Lock(), threading.Event()
        self._asking = threading.Lock()
        self._standing = Standing()
        self._foreign: Callable[[], str] = str
        self._answers: dict[int, tuple[Place, str, int]] = {}
        self._saving = threading.Event()
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

    def send_all(self, name: str, value: Any) -> None:
        """As :meth:`send`, to all others of process 0: encoded once."""
        message = encoded("value", name, value)
        for line in self._lines.values():
            with suppress(OSError):
                line.put_encoded(message)

    def receive(self, process: int, name: str) -> Any:
        """The next value of that process in the channel of ``name``; waits.

        Raises:
            RunError: it sent something else.
        """
        return self.receive_timed(process, name)[0]

    def receive_timed(self, process: int, name: str) -> tuple[Any, float]:
        """As :meth:`receive`, and when the value came, by ``time.perf_counter``."""
        sent, value, came = self._lines[process].inbox(name).get()
        if sent != name:
            raise RunError(f"{self.who(self._mine)} waits for {name!r} and {self.who(process)} sent {sent!r}")
        return value, came

    def ends(self) -> dict[int, tuple[str, str]]:
        """The addresses of this end and of the other one, of the connection to each process."""
        return {process: line.ends() for process, line in self._lines.items()}

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

    def tell_standing(self, standing: Standing) -> None:
        """What is to be known of this process when a process is lost, or one of them has waited for too long."""
        self._standing = standing

    def tell_foreign(self, foreign: Callable[[], str]) -> None:
        """``foreign``: who is connected to this process and belongs to none of the run, in words."""
        self._foreign = foreign

    def end_late(self, late: str) -> NoReturn:
        """End all processes. The line names the one that has come least far, with what it waits for, or one that does not
        answer; ``late``: what took too long."""
        if self._mine == 0:
            self._find_last(late)
        with suppress(OSError):
            self._lines[0].put("late", late)
        time.sleep(1.5 * _ANSWER_S)
        if self._saving.is_set():
            time.sleep(_SAVING_S)
        self._lost(0, f"{late}, and it does not answer")

    def _find_last(self, late: str) -> NoReturn:
        """In process 0."""
        if not self._asking.acquire(blocking=False):
            time.sleep(10 * _ANSWER_S)  # another thread ends it
        for line in self._lines.values():
            with suppress(OSError):
                line.put("where")
        answers = {0: self._answer()}
        until = time.monotonic() + _ANSWER_S
        while len(self._answers) < len(self._lines) and time.monotonic() < until:
            time.sleep(0.01)
        answers |= self._answers
        if silent := sorted(self._lines.keys() - answers.keys()):
            self._lost(silent[0], f"{late}, and it does not answer")
        last = min(answers, key=lambda k: answers[k][0][:2])
        strangers = [f"{foreign} to {self.who(k)}" for k, (_, foreign, _) in sorted(answers.items()) if foreign]
        others = f"; connections that are none of the run's: {', '.join(strangers)}" if strangers else ""
        self._save_all({step for _, _, step in answers.values()})
        self.end(f"{self.who(last)} failed: {late}: {answers[last][0][2]}{others}{self._left()}", RunError.exit_code)

    def _save_all(self, steps: Collection[int]) -> None:
        """In process 0: have all processes save the step that each of them has whole, if it is the same one."""
        (step, *others) = steps
        if others or step < 0:
            return
        for line in self._lines.values():
            with suppress(OSError):
                line.put("save", step)
        saving = threading.Thread(target=self._save, args=(step,), daemon=True)
        saving.start()
        saving.join(_SAVING_S)

    def _save(self, step: int) -> None:
        self._saving.set()
        with suppress(Exception):  # what is left says from which step the run goes on
            self._standing.save(step)

    def _left(self) -> str:
        with suppress(Exception):
            return f"; {left}" if (left := self._standing.left()) else ""
        return ""

    def _answer(self) -> tuple[Place, str, int]:
        """Where this process is, who is connected to it, and the step that it has whole."""
        place, foreign, whole = self._place(), "", -1
        with suppress(Exception):
            foreign = self._foreign()
        with suppress(Exception):
            whole = self._standing.whole()
        return place, foreign, whole

    def _place(self) -> Place:
        try:
            return self._standing.where()
        except Exception as error:  # it is to say something
            return sys.maxsize, 0, f"what it waits for is not known ({type(error).__name__})"

    def _lost(self, process: int, how: str) -> NoReturn:
        self.end(f"{self.who(process)} was lost: {how}{self._left()}", LOST)

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
            match message:
                case ["alive"]:
                    pass
                case ["value", str(name), value]:
                    line.inbox(name).put((name, value, time.perf_counter()))
                case ["where"]:
                    with suppress(OSError):
                        line.put("here", *self._answer())
                case ["here", [int(step), int(position), str(words)], str(foreign), int(whole)]:
                    self._answers[process] = ((step, position, printable(words)), printable(foreign), whole)
                case ["save", int(step)]:
                    threading.Thread(target=self._save, args=(step,), daemon=True).start()
                case ["late", str(late)]:
                    threading.Thread(target=self._find_last, args=(late,), daemon=True).start()
                case ["end", str(words), int(code)]:
                    if not self._ending.locked():
                        self.end(printable(words), code)
                    return
                case ["bye"]:
                    return
                case _:
                    break
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


def plain_address(address: str) -> str:
    """An address as people write it: of an IPv4 one that IPv6 has wrapped, the IPv4 one."""
    number = ipaddress.ip_address(address)
    return str(getattr(number, "ipv4_mapped", None) or number)


def printable(text: str) -> str:
    """``text`` with a ? in place of what could move a terminal's cursor, or is no character."""
    return "".join(c if c.isprintable() else "?" for c in text)


def say(line: str) -> None:
    """On standard error; not by print, which may be in the midst of another one."""
    before = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(_STDERR, f"{before}{line}\n".encode(errors="replace"))
