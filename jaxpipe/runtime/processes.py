"""The processes of a run, as the rest of jaxpipe sees them: what they agree on, tell each other, and how they end together.

Messages go over :mod:`jaxpipe.runtime.connections`, not over JAX's key-value store: the connections are there before JAX is,
and tell at once who ended. JAX's distributed runtime is joined after that, for its devices and transfers
(:meth:`Processes.start_jax`). Importing this imports no JAX, and a single process never calls it.

Four collectives keep processes in step; each is called by all of them with the same name, and raises in all or in none:
:meth:`~Processes.run_on_all` (a function that may fail anywhere), :meth:`~Processes.raise_if_any` (a problem of any process),
:meth:`~Processes.require_equal` (values that must not differ), :meth:`~Processes.validate_on_leader` (a rule over all values).
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from jaxpipe.axes import ONE_SHARD, RankMesh
from jaxpipe.errors import AgreedError, ConfigError, JaxpipeError, RunError
from jaxpipe.runtime import peers
from jaxpipe.runtime.connections import Connections, ProcessStatus, connect
from jaxpipe.runtime.peers import Peers, foreign_peers, words_of

_JAX_JOIN_S = 60.0
"""The least seconds in which all join JAX's service; ``--join-wait`` where that is more, for a cold start may read JAX and CUDA
from a file system that all processes share."""
# Longer than our own silence limit (30 s), so that a lost process is reported by our line, not by JAX's SIGABRT.
_JAX_HEARTBEAT_S = 100
_JAX_SHUTDOWN_S = 10
_REACH_S = 5.0
_CAUSE_S = 1.0
"""Seconds that a process whose instruction failed waits for the line of another, whose end may be the cause."""
_ROUND_TRIPS = 8
_MEASURING_S = 300.0
"""Seconds after which clocks are measured anew, by several messages to and fro; in between by one, and what is known."""
_DRIFT = 1e-4
"""The share of passing time by which two clocks may part: up to 1e-4 where no time service keeps those of the hosts."""

Result = TypeVar("Result")


class Processes:
    """The ``number`` processes of a run, of which this is ``mine``. All of them call the same methods with the same names in
    the same order; where one ends, the others do. This class is a single process; :class:`ProcessGroup` are several.

    They form a grid of rows and ``columns`` (:meth:`arrange`): a row has consecutive pipeline ranks, a column one part of the
    devices of every rank. Process ``row · columns + column``."""

    number, mine = 1, 0
    columns = 1
    on_this_host = 1
    """The number of processes that share this host."""

    def who(self, process: int) -> str:
        """Return what messages call a process."""
        return f"process {process}"

    def gather(self, name: str, value: Any) -> Sequence[Any]:
        """Return the values of all processes, by process, in process 0; nothing elsewhere. Values are JSON, as in all
        messages."""
        return (value,)

    def broadcast(self, name: str, value: Any) -> Any:
        """Return the value of process 0 in all processes."""
        return value

    def clock(self) -> tuple[float, float]:
        """Wait until all have come here, and compare clocks.

        Returns:
            The seconds that ``time.perf_counter`` of process 0 is ahead of this one's, and by how many that may be wrong: half
            of the shortest of some round trips, or of one and what the clocks may have parted since the last comparison.
        """
        return 0.0, 0.0

    def interface(self) -> str:
        """Return the address by which the others reach this process. All processes call it together.

        Raises:
            AgreedError: there is none, see :func:`agree_on_interface`.
        """
        return "127.0.0.1"

    def start_jax(self) -> None:
        """Join JAX's distributed runtime, so that ``jax.devices()`` are those of all processes. Call it before JAX looks for
        devices.

        Raises:
            RunError: it could not be joined.
        """

    def end(self, how: str, code: int) -> None:
        """End this process with one line on standard error, and all others with the same line and exit code. ``how``: goes on
        after the name of the process, such as ``failed: …``. A single process returns, and ends as ever."""

    def set_status(self, standing: ProcessStatus) -> None:
        """Set what others may ask of this process when a process is lost, or one of them has waited for too long."""

    def time_out(self, late: str) -> None:
        """End all processes, as another thread has waited for too long: with a line that names the one that has come least far,
        or does not answer. ``late``: what took too long. A single process returns."""

    def leave(self) -> None:
        """Wait until all have come here, and take everything down; process 0 returns last."""

    def barrier(self, name: str) -> None:
        """Wait until all have come here."""
        self.gather(name, "")
        self.broadcast(name, "")

    def validate_on_leader(self, name: str, value: Any, problem_of: Callable[[Sequence[Any]], str]) -> None:
        """Have process 0 judge the values of all. ``problem_of``: values by process to what is wrong with them, or "".

        Raises:
            AgreedError: anything is wrong; in all processes, with the same words.
        """
        values = self.gather(name, value)
        # The verdict is broadcast even when there is none: the others wait for it.
        if problem := self.broadcast(name, problem_of(values) if self.mine == 0 else ""):
            raise AgreedError(problem)

    def require_equal(self, name: str, values: Mapping[str, str], advice: str) -> None:
        """Check that all processes have the same values. ``advice``: what to do where they don't.

        Raises:
            AgreedError: two differ; names the process and what it differs in.
        """

        def first_difference(values: Sequence[Mapping[str, str]]) -> str:
            leader, *followers = values
            for process, follower in enumerate(followers, 1):
                for key in sorted(leader.keys() | follower.keys()):
                    actual, expected = follower.get(key, "none"), leader.get(key, "none")
                    if actual != expected:
                        return f"{self.who(process)} has {key}={actual}, {self.who(0)} has {expected}: {advice}"
            return ""

        self.validate_on_leader(name, dict(values), first_difference)

    def require_equal_in_rows(self, name: str, count: int, value: Any) -> None:
        """Check that processes with the same of ``count`` ranks have the same JSON ``value``, which messages call ``name``.

        Raises:
            AgreedError: two differ.
        """
        ranks = self.ranks(count)

        def first_difference(values: Sequence[Any]) -> str:
            firsts = [ranks.index(own) for own in ranks]
            return next(
                (
                    f"{self.who(k)} has other {name} than {self.who(first)}, with the same ranks: start all with one config"
                    for k, first in enumerate(firsts)
                    if values[k] != values[first]
                ),
                "",
            )

        self.validate_on_leader(name, value, first_difference)

    def raise_if_any(self, name: str, problem: str) -> None:
        """Raise in all processes if one has a problem. ``problem``: this process's, in words, or "".

        Raises:
            AgreedError: there is a problem in any process; in all of them.
        """

        def first_problem(problems: Sequence[str]) -> str:
            # What all say alike is no one process's problem, and named none.
            if self.number > 1 and len(set(problems)) == 1:
                return problems[0]
            return next((f"{self.who(k)}: {text}" for k, text in enumerate(problems) if text), "")

        self.validate_on_leader(name, problem, first_problem)

    def run_on_all(self, name: str, make: Callable[[], Result]) -> Result:
        """Return what ``make`` returns, if it fails in no process.

        Raises:
            AgreedError: it failed in one of several processes; in all of them.
        """
        if self.number == 1:
            return make()
        results: list[Result] = []
        problem = ""
        # The error is held back until all have come here: raised at once, it would leave the others waiting in their next
        # collective. Anything but an error of ours is a bug; it ends this process, and the lost connection ends the others.
        try:
            results.append(make())
        except JaxpipeError as error:
            problem = str(error)
        self.raise_if_any(name, problem)
        return results[0]

    @property
    def column(self) -> int:
        """The column of this process."""
        return self.mine % self.columns

    def arrange(self, ranks: int, mesh: RankMesh | None, columns: int = 0) -> None:
        """Lay the processes out for a pipeline of ``ranks`` ranks with such devices each (None: not known yet), in so many
        columns; with 0 in one, or in as many as there are processes for each rank.

        Raises:
            AgreedError: they make no grid, or the columns do not divide a rank's devices.
        """
        self.columns = grid_columns(self.number, ranks, mesh, columns)

    def ranks(self, count: int) -> tuple[range, ...]:
        """Return the ranks of each process: those of its row (:func:`divided`)."""
        rows = divided(count, self.number // self.columns)
        return tuple(rows[process // self.columns] for process in range(self.number))


def grid_columns(number: int, ranks: int, mesh: RankMesh | None, columns: int = 0) -> int:
    """Return the columns of a grid of ``number`` processes: see :meth:`Processes.arrange`. One process is one column."""
    if number == 1:
        return 1
    if number % (columns or 1):
        raise AgreedError(f"{number} processes are no multiple of the {columns} columns of run.machine.columns")
    chosen = columns or max(1, number // ranks)
    if number % chosen == 0 and number // chosen <= ranks and (mesh is None or _cuts(mesh, chosen)):
        return chosen
    mesh = mesh or ONE_SHARD
    more = [ranks * parts for parts in range(2, mesh.num_devices + 1) if _cuts(mesh, parts)]
    fitting = [*range(1, ranks + 1), *more]
    below = max(n for n in fitting if n < number)
    above = min((n for n in fitting if n > number), default=0)
    processes = f"{number} processes{f' in {columns} columns' if columns else ''}"
    start = f"start {below}{f' or {above}' if above else ''}, or change --pp, --dp, --cp or --tp"
    raise AgreedError(
        f"{processes} for {mesh.after(f'{ranks} pipeline ranks')}: each has whole ranks, or an equal part of a rank's devices; "
        f"{start}"
    )


def _cuts(mesh: RankMesh, parts: int) -> bool:
    with suppress(ConfigError):
        return bool(mesh.cut(parts))
    return False


def divided(count: int, number: int) -> tuple[range, ...]:
    """Divide ``count`` ranks among ``number`` processes: consecutive ones each, as evenly as can be.

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
    """Return the address by which the others reach this process. All processes call it together.

    Args:
        hosts: their names, by process.
        ends: the addresses of this and of the other end of the connection to each process that this one has.

    Raises:
        AgreedError: JAXPIPE_INTERFACE names no interface of a host, or the others can't reach an address.
    """
    setting, problem = peers.address_from_setting(environ)
    processes.raise_if_any("interface", problem)
    address = setting or (peers.address_of_first(ends.values()) if processes.mine == 0 else "")
    first = processes.broadcast("address of process 0", address)
    # The connection of a process on process 0's host may have loopback ends; process 0 has seen the address that others use.
    address = address or (first if peers.same_host(*ends[0]) else ends[0][0])

    def unreachable_address(addresses: Sequence[str]) -> str:
        several = len(set(hosts)) > 1
        problems = [(k, peers.unreachable(address, several)) for k, address in enumerate(addresses)]
        return next((f"{processes.who(k)} {problem}" for k, problem in problems if problem), "")

    processes.validate_on_leader("addresses", address, unreachable_address)
    return address


SingleProcess = Processes


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Bounds of the seconds by which process 0's clock is ahead of this one's; they held ``at_s`` by this one."""

    low_s: float = -math.inf
    high_s: float = math.inf
    at_s: float = 0.0

    def narrowed(self, asked_at: float, came_at: float, sent_at: float, received_at: float) -> ClockOffset:
        """Return the bounds after a question and its answer: asked and received by this clock, came and sent by process 0's.
        Neither took less than no time, so ``came_at - asked_at`` is too high and ``sent_at - received_at`` too low."""
        drift_s = _DRIFT * (received_at - self.at_s)
        low_s, high_s = sent_at - received_at, came_at - asked_at
        narrow = ClockOffset(max(low_s, self.low_s - drift_s), min(high_s, self.high_s + drift_s), received_at)
        # A clock that was set, or drifts more than we think: what was known of it holds no longer.
        return narrow if narrow.low_s <= narrow.high_s else ClockOffset(low_s, high_s, received_at)

    def middle(self) -> tuple[float, float]:
        """Return the middle of the bounds, and by how much it may be wrong."""
        return (self.low_s + self.high_s) / 2, (self.high_s - self.low_s) / 2


class ProcessGroup(Processes):
    """Several processes, connected to process 0.

    Args:
        wait_s: how long to wait for the others.

    Raises:
        ConfigError: they did not come, or do not fit together (:func:`~jaxpipe.runtime.connections.connect`).
    """

    def __init__(self, peers: Peers, wait_s: float) -> None:
        self.number, self.mine = peers.number, peers.mine
        self._peers, self._jax, self._address = peers, False, ""
        self._offset, self._measured_at = ClockOffset(), -math.inf
        self._join_s = max(_JAX_JOIN_S, wait_s)
        self._connections: Connections = connect(peers, wait_s)
        self.on_this_host = self._connections.hosts.count(self._connections.hosts[self.mine])

    def who(self, process: int) -> str:
        return self._connections.who(process)

    def gather(self, name: str, value: Any) -> Sequence[Any]:
        if self.mine:
            self._connections.send(0, name, value)
            return ()
        return (value, *(self._connections.receive(k, name) for k in range(1, self.number)))

    def broadcast(self, name: str, value: Any) -> Any:
        if self.mine:
            return self._connections.receive(0, name)
        self._connections.send_all(name, value)
        return value

    def clock(self) -> tuple[float, float]:
        now = time.perf_counter
        if self.mine:
            is_answered_for_good = False
            while not is_answered_for_good:
                asked_at = now()
                self._connections.send(0, "clock", asked_at)
                (came_at, sent_at, is_answered_for_good), received_at = self._connections.receive_timed(0, "clock")
                self._offset = self._offset.narrowed(asked_at, came_at, sent_at, received_at)
            return self._offset.middle()
        is_old = now() - self._measured_at > _MEASURING_S
        for trips_left in reversed(range(_ROUND_TRIPS if is_old else 1)):
            # Nobody is answered before all have asked, so that all go on together; how long one waits is not in its trip.
            came_at_of = [self._connections.receive_timed(k, "clock")[1] for k in range(1, self.number)]
            for process, came_at in enumerate(came_at_of, 1):
                self._connections.send(process, "clock", (came_at, now(), trips_left == 0))
        if is_old:
            self._measured_at = now()
        return 0.0, 0.0

    def interface(self) -> str:
        if not self._address:
            self._address = agree_on_interface(self, self._connections.hosts, self._connections.ends())
            identity = (self._address, self._connections.hosts[self.mine], os.getpid())
            everybody = self.broadcast("everybody", self.gather("everybody", identity))
            addresses = {address for address, _, _ in everybody}
            local_pids = [pid for _, host, pid in everybody if host == self._connections.hosts[self.mine]]
            self._connections.report_strangers(lambda: words_of(foreign_peers(addresses, local_pids)))
        return self._address

    def start_jax(self) -> None:
        import jax

        from jaxpipe._jax_compat import set_cpu_address

        peers = self._peers
        # First, so that a wrong interface is reported before anything is compiled.
        set_cpu_address(self.interface())
        port = self.broadcast("port of JAX", _free_port(peers) if self.mine == 0 else 0)
        # It fires before JAX's own timeout, names the port, and ends all processes with that line.
        timer = threading.Timer(self._join_s, self._end_without_jax, (port,))
        timer.daemon = True
        timer.start()
        # Through a proxy that the environment names, gRPC may wait for ever.
        os.environ.setdefault("no_grpc_proxy", peers.host)
        jax.config.update("jax_check_proxy_envs", False)
        # It would take SIGTERM away, with which a scheduler asks for a last checkpoint.
        jax.config.update("jax_enable_preemption_service", False)
        own_machine = peers.host in ("127.0.0.1", "localhost")
        try:
            jax.distributed.initialize(
                peers.at(port),
                peers.number,
                peers.mine,
                local_device_ids=peers.device_ids(),
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(2 * self._join_s),
                heartbeat_timeout_seconds=_JAX_HEARTBEAT_S,
                shutdown_timeout_seconds=_JAX_SHUTDOWN_S,
                coordinator_bind_address=peers.at(port) if own_machine else None,
            )
        except RuntimeError as error:
            raise RunError(f"JAX's distributed runtime can't be joined: {error}") from None
        timer.cancel()
        self._jax = True

    def _end_without_jax(self, port: int) -> NoReturn:
        """End all processes, as some have not joined JAX's service in time: with the line of one that can't reach it."""
        address, code = self._peers.at(port), ConfigError.exit_code
        try:
            socket.create_connection((self._peers.host, port), timeout=_REACH_S).close()
        except OSError:
            self.end(f"did not reach JAX's service at {address} within {self._join_s:.0f} s: open that port", code)
        # Who reaches it only waits for another, whose line is on its way.
        time.sleep(2 * _REACH_S)
        self.end(f"waited {self._join_s:.0f} s at JAX's service at {address} for another process, which reaches it and "
                 "does not join: look at the processes that say nothing", code)  # fmt: skip

    def end(self, how: str, code: int) -> NoReturn:
        # A failed instruction may only be the sign that another process ended: then that one's line arrives and ends this one.
        if code == RunError.exit_code:
            time.sleep(_CAUSE_S)
        self._connections.end(f"{self.who(self.mine)} {how}", code)

    def set_status(self, standing: ProcessStatus) -> None:
        self._connections.set_status(standing)

    def time_out(self, late: str) -> NoReturn:
        self._connections.time_out(late)

    def leave(self) -> None:
        self.barrier("leave")
        if self._jax:
            import jax

            jax.distributed.shutdown()
        self._connections.leave()


def _free_port(peers: Peers) -> int:
    """Return the port after that of the run, or any other that is free, for JAX's service."""
    for port in (peers.port + 1, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except (OSError, OverflowError):
                continue
            return int(probe.getsockname()[1])
    raise ConfigError("no port is free for JAX's service")


Joined = ProcessGroup
"""The earlier name of :class:`ProcessGroup`."""
