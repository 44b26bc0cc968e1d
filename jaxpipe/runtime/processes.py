"""The processes of a run, as the rest of jaxpipe sees them: what they agree on, tell each other, and how they end together.

Texts go over :mod:`jaxpipe.runtime.lines`, not over JAX's key-value store: they are there before JAX is, and tell at once who
ended. JAX's distributed runtime is joined after that, for its devices and transfers (:meth:`Processes.start_jax`).
Importing this imports no JAX, and one process alone never calls it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from jaxpipe.errors import AgreedError, ConfigError, JaxpipeError, RunError
from jaxpipe.runtime import interfaces
from jaxpipe.runtime.foreign_peers import foreign_peers, words_of
from jaxpipe.runtime.lines import Lines, Standing
from jaxpipe.runtime.meeting import meet
from jaxpipe.runtime.peers import Peers

_JAX_JOIN_S = 60
_JAX_HEARTBEAT_S = 100  # ours is earlier
_JAX_SHUTDOWN_S = 10
_CAUSE_S = 1.0
_ROUND_TRIPS = 8

Made = TypeVar("Made")


class Processes:
    """``number`` processes, of which this is ``mine``. All of them call the same methods with the same names in the same order;
    where one ends, the others do. By itself this is one process; :class:`Joined` are several."""

    number, mine = 1, 0
    on_this_host = 1
    """How many of them."""

    def who(self, process: int) -> str:
        """What messages call a process."""
        return f"process {process}"

    def gather(self, name: str, value: Any) -> Sequence[Any]:
        """The values of all processes, by process, in process 0; empty elsewhere. Of JSON, as all that they tell each other."""
        return (value,)

    def broadcast(self, name: str, value: Any) -> Any:
        """The value of process 0, in all."""
        return value

    def clock(self) -> tuple[float, float]:
        """Wait until all have come here: how many seconds ``time.perf_counter`` of process 0 is ahead of this one's, and by
        how many that may be wrong: half of the shortest of some round trips."""
        return 0.0, 0.0

    def interface(self) -> str:
        """The address by which the others reach this process. All processes call it together.

        Raises:
            AgreedError: there is none, see :mod:`jaxpipe.runtime.interfaces`.
        """
        return "127.0.0.1"

    def start_jax(self) -> None:
        """Join JAX's distributed runtime, so that ``jax.devices()`` are those of all processes. Before JAX looks for devices.

        Raises:
            RunError: it could not be joined.
        """

    def end(self, how: str, code: int) -> None:
        """End this process with one line on standard error, and all others with the same line and exit code. ``how``: goes on
        after the name of the process, such as ``failed: …``. Alone it returns: a process ends as ever."""

    def tell_standing(self, standing: Standing) -> None:
        """What is to be known of this process when a process is lost, or one of them has waited for too long."""

    def end_late(self, late: str) -> None:
        """End all processes, as another thread has waited for too long: with a line that names the one that has come least far,
        or does not answer. ``late``: what took too long. Alone it returns."""

    def leave(self) -> None:
        """Wait until all have come here, and take everything down; process 0 returns last."""

    def barrier(self, name: str) -> None:
        """Wait until all have come here."""
        self.gather(name, "")
        self.broadcast(name, "")

    def judge(self, name: str, value: Any, wrong: Callable[[Sequence[Any]], str]) -> None:
        """Process 0 says what is ``wrong`` with the values of all, by process; empty: nothing.

        Raises:
            AgreedError: anything is; in all processes.
        """
        values = self.gather(name, value)
        if found := self.broadcast(name, wrong(values) if self.mine == 0 else ""):
            raise AgreedError(found)

    def agree(self, name: str, values: Mapping[str, str], advice: str) -> None:
        """Check that all say the same. ``advice``: what to do where they don't.

        Raises:
            AgreedError: two differ; names the process and what it differs in.
        """

        def wrong(values: Sequence[Mapping[str, str]]) -> str:
            first, *others = values
            for process, other in enumerate(others, 1):
                for key in sorted(first.keys() | other.keys()):
                    have, want = other.get(key, "none"), first.get(key, "none")
                    if have != want:
                        return f"{self.who(process)} has {key}={have}, {self.who(0)} has {want}: {advice}"
            return ""

        self.judge(name, dict(values), wrong)

    def check(self, name: str, wrong: str) -> None:
        """``wrong``: what is wrong in this process; empty: nothing.

        Raises:
            AgreedError: anything is wrong in any process; in all of them.
        """

        def first(texts: Sequence[str]) -> str:
            if self.number > 1 and len(set(texts)) == 1:
                return texts[0]
            return next((f"{self.who(k)}: {text}" for k, text in enumerate(texts) if text), "")

        self.judge(name, wrong, first)

    def together(self, name: str, make: Callable[[], Made]) -> Made:
        """What ``make`` makes, if it fails nowhere.

        Raises:
            AgreedError: it failed in one of several processes; in all of them.
        """
        if self.number == 1:
            return make()
        made: list[Made] = []
        wrong = ""
        try:
            made.append(make())
        except JaxpipeError as error:
            wrong = str(error)
        self.check(name, wrong)
        return made[0]

    def ranks(self, count: int) -> tuple[range, ...]:
        """The ranks of each process: see :func:`divided`."""
        return divided(count, self.number)


def divided(count: int, number: int) -> tuple[range, ...]:
    """The ranks of each of ``number`` processes: consecutive ones of ``count``, as evenly as can be.

    Raises:
        AgreedError: there are fewer ranks than processes.
    """
    if count < number:
        raise AgreedError(
            f"{number} processes for {count} pipeline ranks; each needs one at least: start fewer, or raise --pp"
        )
    return tuple(range(k * count // number, (k + 1) * count // number) for k in range(number))


def agree_on_interface(
    processes: Processes,
    hosts: Sequence[str],
    ends: Mapping[int, tuple[str, str]],
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The address by which the others reach this process. All processes call it together.

    Args:
        hosts: their names, by process.
        ends: the addresses of this and of the other end of the connection to each process that this one has.

    Raises:
        AgreedError: JAXPIPE_INTERFACE names no interface of a host, or the others can't reach an address.
    """
    said, wrong = interfaces.said_address(environ)
    processes.check("interface", wrong)
    own = said or (interfaces.address_of_first(ends.values()) if processes.mine == 0 else "")
    first = processes.broadcast("address of process 0", own)
    own = own or (first if interfaces.same_host(*ends[0]) else ends[0][0])

    def wrong_address(addresses: Sequence[str]) -> str:
        several = len(set(hosts)) > 1
        problems = [(k, interfaces.unreachable(address, several)) for k, address in enumerate(addresses)]
        return next((f"{processes.who(k)} {problem}" for k, problem in problems if problem), "")

    processes.judge("addresses", own, wrong_address)
    return own


Alone = Processes
"""One process."""


class Joined(Processes):
    """Several processes, which have met.

    Args:
        wait_s: how long to wait for the others.

    Raises:
        ConfigError: they did not come, or do not fit together (:func:`~jaxpipe.runtime.meeting.meet`).
    """

    def __init__(self, peers: Peers, wait_s: float) -> None:
        self.number, self.mine = peers.number, peers.mine
        self._peers, self._jax, self._address = peers, False, ""
        self._lines: Lines = meet(peers, wait_s)
        self.on_this_host = self._lines.hosts.count(self._lines.hosts[self.mine])

    def who(self, process: int) -> str:
        return self._lines.who(process)

    def gather(self, name: str, value: Any) -> Sequence[Any]:
        if self.mine:
            self._lines.send(0, name, value)
            return ()
        return (value, *(self._lines.receive(k, name) for k in range(1, self.number)))

    def broadcast(self, name: str, value: Any) -> Any:
        if self.mine:
            return self._lines.receive(0, name)
        self._lines.send_all(name, value)
        return value

    def clock(self) -> tuple[float, float]:
        lines, now = self._lines, time.perf_counter
        if self.mine:
            for _ in range(_ROUND_TRIPS):
                lines.receive(0, "clock")
                lines.send(0, "clock", now())
            ahead, error = lines.receive(0, "clock")
            return ahead, error
        others = range(1, self.number)
        trips: dict[int, list[tuple[float, float]]] = {process: [] for process in others}
        for _ in range(_ROUND_TRIPS):
            asked = {}
            for process in others:
                asked[process] = now()
                lines.send(process, "clock", "")
            for process in others:
                there, came = lines.receive_timed(process, "clock")
                half = (came - asked[process]) / 2
                trips[process].append((half, asked[process] + half - there))
        for process in others:  # all go on together
            half, ahead = min(trips[process])
            lines.send(process, "clock", (ahead, half))
        return 0.0, 0.0

    def interface(self) -> str:
        if not self._address:
            self._address = agree_on_interface(self, self._lines.hosts, self._lines.ends())
            who = (self._address, self._lines.hosts[self.mine], os.getpid())
            everybody = self.broadcast("everybody", self.gather("everybody", who))
            addresses = {address for address, _, _ in everybody}
            here = [pid for _, host, pid in everybody if host == self._lines.hosts[self.mine]]
            self._lines.tell_foreign(lambda: words_of(foreign_peers(addresses, here)))
        return self._address

    def start_jax(self) -> None:
        import jax

        peers = self._peers
        self.interface()  # what is wrong with it is said before anything is compiled
        port = self.broadcast("port of JAX", _free_port(peers) if self.mine == 0 else 0)
        late = threading.Timer(
            _JAX_JOIN_S,
            self.end,
            (f"did not reach JAX's service at {peers.at(port)} within {_JAX_JOIN_S} s: open that port", 2),
        )
        late.daemon = True
        late.start()
        os.environ.setdefault("no_grpc_proxy", peers.host)  # or it may wait for ever
        jax.config.update("jax_check_proxy_envs", False)
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away
        own_machine = peers.host in ("127.0.0.1", "localhost")
        try:
            jax.distributed.initialize(
                peers.at(port),
                peers.number,
                peers.mine,
                local_device_ids=peers.device_ids(),
                cluster_detection_method="deactivate",
                initialization_timeout=2 * _JAX_JOIN_S,
                heartbeat_timeout_seconds=_JAX_HEARTBEAT_S,
                shutdown_timeout_seconds=_JAX_SHUTDOWN_S,
                coordinator_bind_address=peers.at(port) if own_machine else None,
            )
        except RuntimeError as error:
            raise RunError(f"JAX's distributed runtime can't be joined: {error}") from None
        late.cancel()
        self._jax = True

    def end(self, how: str, code: int) -> NoReturn:
        if code == RunError.exit_code:
            time.sleep(_CAUSE_S)  # the cause may be that another ended: then its line ends this process
        self._lines.end(f"{self.who(self.mine)} {how}", code)

    def tell_standing(self, standing: Standing) -> None:
        self._lines.tell_standing(standing)

    def end_late(self, late: str) -> NoReturn:
        self._lines.end_late(late)

    def leave(self) -> None:
        self.barrier("leave")
        if self._jax:
            import jax

            jax.distributed.shutdown()
        self._lines.leave()


def _free_port(peers: Peers) -> int:
    """The one after that of the run, or any other, for JAX's service."""
    for port in (peers.port + 1, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except (OSError, OverflowError):
                continue
            return int(probe.getsockname()[1])
    raise ConfigError("no port is free for JAX's service")
