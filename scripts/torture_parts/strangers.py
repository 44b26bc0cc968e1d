"""R24: strangers connect to process 0 while processes are waited for, and send what a hello is not, or almost is.

All in this process: threads play process 0, the other processes, and the strangers, on 127.0.0.1. Where the other processes
come, they meet, whatever the strangers do; where they don't, waiting ends in time, with one line. Strangers are named in few
lines without control characters, and what they say about themselves is never believed.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from unittest import mock

from torture_parts.trial import Bench, Case, FailedError, Trial

HELLO_S = 0.1
_SLACK_S = 60.0  # for a machine that is busy
_HOST = "127.0.0.1"
_MOST_LINES = 9


@dataclass(frozen=True, slots=True)
class Stranger:
    """A client outside the run: what it sends, how many bytes at a time, and the pause between them. It never closes."""

    sends: bytes
    at_once: int = 1 << 20
    pause_s: float = 0.0


def cases(bench: Bench) -> Iterator[Case]:
    for number in range(bench.count(500, 12)):
        kind = "nobody comes" if number % 5 == 0 else "all come"
        yield Case(kind, partial(_meet, come=number % 5 != 0))


def is_hello(line: bytes) -> bool:
    """Return whether a first line is one that a process of a run may send; a second opinion."""
    try:
        word, process, number, host = json.loads(line)
    except Exception:
        return False
    has_types = type(process) is int and type(number) is int and type(word) is str and type(host) is str
    return (
        has_types and word == "jaxpipe" and 1 <= process <= number - 1 and 1 <= len(host) <= 255 and host.isprintable()
    )


def hellos(rng: Random) -> bytes:
    """A first line, with its newline or without, that is no hello."""
    while True:
        message = rng.choice((_almost, _almost, _almost, _deep, _noise, _http, _long, _escapes))(rng)
        if not any(is_hello(line) for line in message.split(b"\n")):
            return message


def stranger(rng: Random) -> Stranger:
    """Anybody."""
    match rng.randrange(6):
        case 0:
            return Stranger(b"")
        case 1:
            return Stranger(hellos(rng), rng.choice((1, 2, 7)), HELLO_S * rng.choice((0.1, 0.5, 0.9)))
    return Stranger(hellos(rng))


_VALUES: Sequence[Any] = (
    *(
        True,
        False,
        None,
        0,
        1,
        2,
        3,
        -1,
        -7,
        1.0,
        1.5,
        2.0,
        float("nan"),
        float("inf"),
        10**30,
        "1",
        "",
        "h",
        "jaxpipe",
        [],
        [1],
    ),
    *({}, {"a": 1}, "\x1b[2J", "h\n", "\u202e", "\ud800", "x" * 256, "\x00"),
)
_WORDS = (
    "jaxpipe",
    "jaxpipe",
    "jaxpipe",
    "jaxpipe2",
    "jaxpipe/2",
    "JAXPIPE",
    "welcome",
    "end",
    "value",
    "alive",
    "bye",
    True,
    None,
)


def _almost(rng: Random) -> bytes:
    message: list[Any] = [
        rng.choice(_WORDS),
        rng.choice((1, 2, rng.choice(_VALUES))),
        rng.choice((2, 3, rng.choice(_VALUES))),
    ]
    message.append(rng.choice(("host", rng.choice(_VALUES))))
    if rng.random() < 0.3:
        message.insert(rng.randint(0, 4), rng.choice(_VALUES))
    if rng.random() < 0.2:
        del message[rng.randrange(len(message))]
    return json.dumps(message).encode() + rng.choice((b"\n", b"\n", b"\r\n", b"", b"\n[]\n"))


def _deep(rng: Random) -> bytes:
    return rng.choice((b"[", b'{"a":', b'["jaxpipe",1,2,[')) * rng.randint(1, 4000) + b"\n"


def _noise(rng: Random) -> bytes:
    return rng.randbytes(rng.choice((1, 4, 100, 4000, 5000))) + rng.choice((b"", b"\n"))


def _http(rng: Random) -> bytes:
    return rng.choice(
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"\x16\x03\x01\x02\x00",
            b"PRI * HTTP/2.0\r\n\r\n",
        )
    )


def _long(rng: Random) -> bytes:
    return b'["jaxpipe",1,2,"' + b"h" * rng.choice((4000, 4096, 100_000, 3_000_000)) + b'"]\n'


def _escapes(rng: Random) -> bytes:
    host = rng.choice(("\x1b]0;mine\x07", "\x1b[31mred", "a\x08b", "\u2028", "\x9b1m"))
    return json.dumps(["jaxpipe", 1, 2, host], ensure_ascii=rng.random() < 0.5).encode() + b"\n"


def _meet(trial: Trial, *, come: bool) -> None:
    from jaxpipe.errors import ConfigError
    from jaxpipe.runtime import connections
    from jaxpipe.runtime.connections import Connections
    from jaxpipe.runtime.peers import Peers

    rng, number = trial.rng, trial.rng.randint(2, 4)
    strangers = [stranger(rng) for _ in range(rng.randint(1, 8))]
    with socket.create_server((_HOST, 0)) as probe:
        port = probe.getsockname()[1]
    wait_s = 600.0 if come else HELLO_S * rng.choice((0.5, 2, 3))
    results: dict[int, Connections | Exception] = {}
    messages: list[str] = []
    over = threading.Event()

    def process(mine: int) -> None:
        try:
            results[mine] = connections.connect(Peers(_HOST, port, number, mine), wait_s)
        except Exception as error:  # what it is is looked at below
            results[mine] = error

    def play(one: Stranger) -> None:
        with suppress(OSError), _open_connection(port) as connection:
            for at in range(0, len(one.sends), one.at_once):
                if over.is_set():
                    break
                connection.sendall(one.sends[at : at + one.at_once])
                if one.pause_s:
                    over.wait(one.pause_s)
            over.wait(wait_s)

    # a machine that is busy must not make strangers of the processes
    hello_s = _SLACK_S if come else HELLO_S
    with mock.patch.multiple(connections, _HELLO_S=hello_s, say=messages.append):
        began = time.monotonic()
        first = threading.Thread(target=process, args=(0,))
        first.start()
        players = [threading.Thread(target=play, args=(one,), daemon=True) for one in strangers]
        processes = [threading.Thread(target=process, args=(k,)) for k in range(1, number)] if come else []
        for thread in rng.sample([*players, *processes], len(players) + len(processes)):
            thread.start()
        for thread in (first, *processes):
            thread.join(wait_s + _SLACK_S)
        took_s = time.monotonic() - began
        over.set()
    what = f"{[(one.sends[:80], len(one.sends), one.pause_s) for one in strangers]}, {number} processes"
    if any(thread.is_alive() for thread in (first, *processes)):
        raise FailedError(f"joining has not ended after {took_s:.1f} s of {wait_s}: {what}")
    for thread in players:
        thread.join()
    joined = [lines for lines in results.values() if isinstance(lines, Connections)]
    for leaving in [threading.Thread(target=lines.leave) for lines in joined]:
        leaving.start()
    trial.tried["hellos of strangers"] += len(strangers)
    if any(not line.isprintable() for line in messages) or len(messages) > _MOST_LINES:
        raise FailedError(f"said {messages}: {what}")
    if come and (len(joined) != number or any(set(lines.hosts) != {socket.gethostname()} for lines in joined)):
        raise FailedError(f"the processes did not meet: {results}: {what}")
    if not come and (not isinstance(results[0], ConfigError) or not str(results[0]).startswith("waited")):
        raise FailedError(f"process 0 did not say that it has waited: {results[0]!r}: {what}")
    if not come and took_s > wait_s + _SLACK_S:
        raise FailedError(f"waiting for {wait_s:.2f} s took {took_s:.2f} s: {what}")


def _open_connection(port: int) -> socket.socket:
    for _ in range(100):
        with suppress(ConnectionRefusedError):
            return socket.create_connection((_HOST, port), timeout=10)
        time.sleep(0.002)
    raise ConnectionRefusedError
