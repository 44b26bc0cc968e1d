"""How the processes of a run meet: process 0 listens, each other process connects and says who it is in one line, its hello.

Whoever reaches the port may send anything: nothing at all, a byte now and then, megabytes, JSON that is almost a hello. So
process 0 reads first lines side by side, each with a deadline of its own, believes only what is a hello in all its parts, and
names whom it turns away by address. Joining takes at most as long as its caller says, whatever comes. Imports no JAX.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from jaxpipe.errors import ConfigError
from jaxpipe.runtime.lines import Line, Lines, plain_address, printable, say
from jaxpipe.runtime.peers import Peers

_HELLO_S = 5.0
_WELCOME_S = 2.0
"""How much longer than process 0 the others wait, so that its words reach them."""
_LONGEST_HELLO = 4096
_LONGEST_HOST = 255
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
    """The hello of a first line, or why it is none, in words for people."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return "its first line is no message of jaxpipe's"
    match message:
        case ["jaxpipe", process, number, host] if type(process) is int and type(number) is int:
            if not 0 < process < number:
                return "it says that it is a process of a number that there is not"
            return Hello(process, number, host) if _is_host(host) else "the name of its host is none"
        case [str(name), *_] if name.startswith("jaxpipe"):
            return "its first line is no hello of this version of jaxpipe"
    return "its first line is no message of jaxpipe's"


def meet(peers: Peers, wait_s: float) -> Lines:
    """The connections of this process, once all processes have come.

    Raises:
        ConfigError: some did not within ``wait_s``, process 0 can't listen, or the processes don't fit together. All that came
            raise it, with the same words.
    """
    until = time.monotonic() + wait_s
    if peers.mine:
        return _meet_first(peers, until, wait_s)
    with _listening(peers) as server, selectors.DefaultSelector() as watched:
        return _Meeting(peers, until, wait_s, server, watched).run()


@dataclass(slots=True, eq=False)
class _Arrival:
    """A connection whose first line is not whole yet."""

    connection: socket.socket
    address: str
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class _Meeting:
    """Process 0, until all have come. ``until``: when waiting ends."""

    def __init__(
        self, peers: Peers, until: float, wait_s: float, server: socket.socket, watched: selectors.BaseSelector
    ) -> None:
        self._peers, self._until, self._wait_s, self._server, self._watched = peers, until, wait_s, server, watched
        self._hosts = {0: own_host()}
        self._joined: dict[int, Line] = {}
        self._arrivals: list[_Arrival] = []
        self._named: set[str] = set()
        server.setblocking(False)
        watched.register(server, selectors.EVENT_READ, None)

    def run(self) -> Lines:
        """Wait for all. Raises ConfigError as :func:`meet`."""
        try:
            if too_few := allow_files(self._peers.number):
                self._refuse(f"process 0 (host {self._hosts[0]}): {too_few}")
            hellos = self._hellos(self._until)
            while len(self._joined) < self._peers.number - 1:
                if (arrived := next(hellos, None)) is None:
                    missing = [k for k in range(1, self._peers.number) if k not in self._joined]
                    self._refuse(_waited(self._wait_s, missing, self._peers), late_s=0)
                self._let_in(*arrived)
        finally:
            for arrival in self._arrivals:
                arrival.connection.close()
        hosts = [self._hosts[k] for k in range(self._peers.number)]
        for line in self._joined.values():
            line.wait_at_most(_HELLO_S)
            with suppress(OSError):  # the thread that reads says that it is gone
                line.put("welcome", *hosts)
            line.wait_at_most(None)
        return Lines(self._peers, hosts, self._joined)

    def _let_in(self, arrival: _Arrival, hello: Hello) -> None:
        came = f"process {hello.process} (host {hello.host})"
        number, hosts = self._peers.number, self._hosts
        line = Line(arrival.connection)
        if hello.number != number:
            self._refuse(f"{came} says that there are {hello.number} processes, process 0 (host {hosts[0]}) {number}: start "
                         "all with one number", line)  # fmt: skip
        if hello.process in hosts:
            self._refuse(f"two processes say that they are number {hello.process}, on hosts {hosts[hello.process]} and "
                         f"{hello.host}: give each a number of its own", line)  # fmt: skip
        self._joined[hello.process], hosts[hello.process] = line, hello.host
        self._watched.register(line, selectors.EVENT_READ, hello.process)

    def _refuse(self, words: str, *more: Line, late_s: float = _HELLO_S) -> NoReturn:
        """Tell all who have come, and those who come within ``late_s`` seconds."""
        for line in self._joined.values():
            self._watched.unregister(line)
        told = [*self._joined.values(), *more]
        for line in told:
            line.part(words)
        missing = self._peers.number - 1 - len(told)
        if missing > 0:
            for arrival, _ in self._hellos(min(self._until, time.monotonic() + late_s)):
                Line(arrival.connection).part(words)
                missing -= 1
                if not missing:
                    break
        raise ConfigError(words)

    def _hellos(self, until: float) -> Iterator[tuple[_Arrival, Hello]]:
        """Every hello as soon as it is whole; ends ``until`` then."""
        while (now := time.monotonic()) < until:
            next_deadline = min((arrival.deadline for arrival in self._arrivals), default=until)
            for key, _ in self._watched.select(max(min(next_deadline, until) - now, 0)):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, int):  # who has joined has nothing to say yet
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
        except OSError as error:  # others: it was closed already
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
        """Read what has come; the hello, if that completes it."""
        try:
            part = arrival.connection.recv(_LONGEST_HELLO)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        arrival.received += part
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
    """Raise the limit on open files as far as this process may; what to say if it does not suffice for so many
    ``connections``, or nothing."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= connections + _OTHER_FILES:
        return ""
    needed = connections + _OTHER_FILES
    return f"{connections} processes need {needed} open files and the limit is {soft}: raise it (ulimit -n)"


def own_host() -> str:
    """The name of this host, as messages show it."""
    return printable(socket.gethostname())[:_LONGEST_HOST] or "without a name"


def _is_host(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _LONGEST_HOST and name.isprintable()


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
                (host, peers.port), family=family, backlog=max(_OTHER_FILES, peers.number), dualstack_ipv6=all_of_both
            )
        except OSError as error:
            failed = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
    why = os.strerror(failed.errno) if failed.errno and failed.errno > 0 else str(failed)
    raise ConfigError(f"process 0 can't listen at {peers.address} ({why}): choose another port or address")


def _meet_first(peers: Peers, until: float, wait_s: float) -> Lines:
    """In the others."""
    allow_files(0)
    line = _connected(peers, until, wait_s)
    out_of_time = threading.Timer(max(until - time.monotonic(), 0) + _WELCOME_S, line.shut)
    out_of_time.daemon = True
    out_of_time.start()
    with suppress(OSError):
        line.put("jaxpipe", peers.mine, peers.number, own_host())
    message = line.get(_LONGEST_HELLO * peers.number)  # each name in it was in a hello
    out_of_time.cancel()
    match message:
        case ["welcome", *hosts] if len(hosts) == peers.number and all(map(_is_host, hosts)):
            return Lines(peers, hosts, {0: line})
        case ["end", str(words), int()]:
            line.close()
            raise ConfigError(printable(words))
    line.close()
    if time.monotonic() >= until:
        raise ConfigError(
            f"waited {wait_s:.3g} s at {peers.address}: process 0 answers, but not all of {peers.number} processes came: "
            "look at its output"
        )
    raise ConfigError(
        f"process 0 at {peers.address} did not answer, or ended: look at its output, or correct the address"
    )


def _connected(peers: Peers, until: float, wait_s: float) -> Line:
    why = ""
    while (left_s := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((peers.host, peers.port), timeout=min(_HELLO_S, left_s))
            # else nobody listens, and Linux gave us that very port
            if connection.getsockname() != connection.getpeername():
                connection.settimeout(None)
                return Line(connection)
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
