"""Moves arrays: from rank to rank, the seam between ranks in one process and ranks in several; and to host memory and back.

The executor talks to a :class:`Transport`. :class:`LocalTransport` serves ranks whose devices this process owns: a send is one
batched, asynchronous copy to the receiver's submesh. :class:`MixedTransport` serves those of several processes, over a
:class:`RemoteTransport`, of which there are two:

- :class:`TransferServer`, JAX's own, matches messages by number, over TCP and host memory, on GPUs too;
- :class:`DevicePutTransport` matches them by order: ``jax.device_put``, on GPUs from device memory to device memory, by NCCL.

:class:`Ownership` says which ranks are this process's, and moves arrays between ranks outside of programs. All processes of a
run do the same things in the same order; where a rank is another process's, nothing is done there. Between processes nobody
waits for ever, whatever the transport makes wait: programs end by themselves (:mod:`jaxpipe.program.order`), and a move
waits for the programs dispatched before it and for the moves before it alone, which are the same in all processes.

**Host memory.** A copy to ``pinned_host`` memory is asynchronous; dropping the source afterwards frees it once the copy is
done. (Donating across memory kinds is not implemented in XLA, and computing on a pinned array runs on the host: FACTS.md.) All
leaves of an action go in one call, each into a buffer of its own: packing them first measured slower (README). Where a backend
has no pinned host memory, copies go to NumPy arrays if the caller allows it: correct, but the dispatching thread waits for
each.

:func:`check_host_memory` runs before anything else. Per rank of the process it takes the most bytes that its program keeps on
the host (:mod:`jaxpipe.program.ir`), and allows a budget, or what is available. It does not model the fragmentation of
XLA's pool of pinned memory, nor a buffer that is being loaded back while the next offload already takes another.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._jax_compat import copier, puts_between_processes
from jaxpipe.errors import ProgramError
from jaxpipe.mesh import PINNED_HOST, memory_kinds, replicated, spec_of
from jaxpipe.program.ir import Free, Instruction, Message, Program, Recv, Send, host_bytes, message_of
from jaxpipe.program.order import NATIVE, TAGGED, Lanes
from jaxpipe.runtime.processes import Processes, SingleProcess


class Transport(Protocol):
    """Carries lists of arrays between ranks. A message has a number, unique in a step and equal on both sides, so messages
    may be received in another order than they were sent."""

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        """Start copying ``arrays`` to rank ``dst``; returns without waiting."""

    def recv(self, message: int) -> Sequence[jax.Array]:
        """Return the arrays of ``message``, on the receiver's devices; they may still be on their way."""

    def clear(self, begun: Sequence[int] = ()) -> None:
        """Forget what was not received (after a failed step). ``begun``: messages that were neither sent nor received here, and
        may have been by the other end; arrays of zeros go in their place."""


class LocalTransport:
    """Carries messages between ranks of this process. ``homes[message]``: where each of its arrays lives on the receiver. (An
    activation may be split over ``dp`` alone, or over ``tp`` too.)"""

    def __init__(self, homes: Mapping[int, Sequence[jax.sharding.Sharding]]) -> None:
        # A copier costs milliseconds to make and is the same for all messages that are placed alike, which are most.
        copier_of = {tuple(where): copier(where) for where in homes.values()}
        self._copy = {number: copier_of[tuple(where)] for number, where in homes.items()}
        self._received: dict[int, Sequence[jax.Array]] = {}

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        self._received[message] = self._copy[message](arrays)

    def recv(self, message: int) -> Sequence[jax.Array]:
        return self._received.pop(message)

    def clear(self, begun: Sequence[int] = ()) -> None:
        self._received.clear()


def message_numbers(programs: Sequence[Program]) -> dict[Message, int]:
    """Number the messages that ``programs`` send or receive."""
    # Sorted: all processes have the same programs, and give a message the same number without a word.
    messages = {message_of(p.rank, i) for p in programs for i in p.instructions if isinstance(i, Send | Recv)}
    return {message: n for n, message in enumerate(sorted(messages))}


def message_homes(
    programs: Sequence[Program], meshes: Sequence[Mesh], numbers: Mapping[Message, int]
) -> dict[int, list[NamedSharding]]:
    """Return, by message number, where the arrays of the message live on the receiver, split as they are on the sender."""
    sends = {numbers[message_of(p.rank, i)]: i for p in programs for i in p.instructions if isinstance(i, Send)}
    return {n: [NamedSharding(meshes[i.dst], a.sharding.spec) for a in i.avals] for n, i in sends.items()}


class RemoteTransport(Protocol):
    """Carries lists of arrays from process to process. Both sides give the same number, used once, and the same ``avals``:
    shapes, dtypes and, as shardings, where the arrays go."""

    def put(self, number: int, arrays: Sequence[jax.Array], avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Start sending ``arrays``, at least one."""

    def get(self, number: int, src: int, avals: Sequence[jax.ShapeDtypeStruct]) -> Sequence[jax.Array]:
        """Return what rank ``src`` has sent or will send; it may still be on its way."""


@dataclass(frozen=True, slots=True)
class RemoteMessage:
    """A message between this process and another: the rank that sends it, and the arrays that arrive, with where they live on
    the receiver. ``source_homes``: where they live on the sender, if that is in this process."""

    src: int
    avals: Sequence[jax.ShapeDtypeStruct]
    source_homes: Sequence[NamedSharding] | None


class MixedTransport:
    """Carries messages between ranks of several processes: those within this one by ``local``, the others by ``remote``.

    ``remote_messages``: by number, what is sent to or received from another process. ``count``: of all messages of all ranks.
    """

    def __init__(
        self, local: LocalTransport, remote: RemoteTransport, remote_messages: Mapping[int, RemoteMessage], count: int
    ) -> None:
        self._local, self._remote, self._remote_messages, self._count = local, remote, remote_messages, count
        # The steps so far, by message: each is sent once and received once a step, so both sides count alike.
        self._steps: Counter[int] = Counter()

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        if message in self._remote_messages:
            self._remote.put(self._number(message), arrays, self._remote_messages[message].avals)
        else:
            self._local.send(message, dst, arrays)

    def recv(self, message: int) -> Sequence[jax.Array]:
        if message not in self._remote_messages:
            return self._local.recv(message)
        expected = self._remote_messages[message]
        return self._remote.get(self._number(message), expected.src, expected.avals)

    def clear(self, begun: Sequence[int] = ()) -> None:
        self._local.clear()
        for message in begun:
            if (expected := self._remote_messages.get(message)) is None:
                continue
            if expected.source_homes is None:
                self.recv(message)
            else:
                placed_avals = zip(expected.avals, expected.source_homes, strict=True)
                zeros = [jnp.zeros(a.shape, a.dtype, device=home) for a, home in placed_avals]
                self._remote.put(self._number(message), zeros, expected.avals)

    def _number(self, message: int) -> int:
        # A number may be used only once: a step that runs ahead must not take what belongs to the step before.
        number = self._steps[message] * self._count + message
        self._steps[message] += 1
        return number


_CHANNEL_BITS = 12
_SOCKETS = 2


class TransferServer:
    """Sends arrays by JAX's transfer server: that of this process, and connections to those of the others.

    The sender lays arrays out under a number and goes on; the receiver asks for that number, gets arrays that may still be on
    their way, and goes on. Nothing is ordered, so nothing waits for its turn. There is no authentication: whoever reaches the
    port of a server may take what lies there, so it is bound to the interface by which the processes reach each other.

    What JAX does not check is not checked here either: a number used twice, or other shapes on the two sides. Numbers are made
    by rule (:meth:`channel`), and processes agree on their programs before the first message.

    All processes make it together. ``process_of``: by rank.
    """

    def __init__(self, processes: Processes, process_of: Sequence[int]) -> None:
        from jax.experimental import transfer

        address = processes.interface()
        any_port = f"[{address}]:0" if ":" in address else f"{address}:0"
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, any_port, [any_port] * _SOCKETS)
        addresses = processes.gather("transfer servers", self._server.address())
        self._addresses: Sequence[str] = processes.broadcast("transfer servers", addresses)
        self._process_of = process_of
        self._connections: dict[int, Any] = {}
        self._channel, self._channels = 0, count(1)

    def channel(self) -> TransferServer:
        """Return the same server with a range of numbers that nothing has used yet. All processes make the same channels in the
        same order."""
        other = copy(self)
        other._channel = next(self._channels)
        assert other._channel < 1 << _CHANNEL_BITS, "too many channels for their bits in a number"
        return other

    def put(self, number: int, arrays: Sequence[jax.Array], avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        self._server.await_pull(number << _CHANNEL_BITS | self._channel, list(arrays))

    def get(self, number: int, src: int, avals: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        process = self._process_of[src]
        # Made when first needed: most processes exchange arrays with two neighbours, not with all.
        if process not in self._connections:
            self._connections[process] = self._server.connect(self._addresses[process])
        arrays: list[jax.Array] = self._connections[process].pull(number << _CHANNEL_BITS | self._channel, list(avals))
        return arrays


class DevicePutTransport:
    """Sends arrays by ``jax.device_put``, which both sides call: the sender with its arrays, the receiver with arrays of the
    same shapes that lie on the sender's devices, of which it holds nothing.

    There are no numbers: between two devices the nth call of one side meets the nth of the other's. So all processes start
    messages in one order, which is proved to end whatever NCCL makes wait (:data:`jaxpipe.program.order.NATIVE`), with
    receives posted early; what goes from rank to rank outside of programs goes in one order, too.

    Nobody has run this on GPUs. Two processes on CPUs, where JAX's flags for transfers between data centres have
    ``device_put`` match calls by their order as well, get the bits of one.

    ``meshes``: of all ranks; ``ranks``: those of this process.
    """

    def __init__(self, meshes: Sequence[Mesh], ranks: Sequence[int]) -> None:
        self._meshes, self._ranks = meshes, ranks
        self._linked: set[tuple[int, int]] = set()

    def put(self, number: int, arrays: Sequence[jax.Array], avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        assert all(a.committed for a in arrays), "arrays that lie nowhere for good are copied within the process"
        jax.device_put(list(arrays), [a.sharding for a in avals])

    def get(self, number: int, src: int, avals: Sequence[jax.ShapeDtypeStruct]) -> Sequence[jax.Array]:
        homes = [NamedSharding(self._meshes[src], spec_of(a)) for a in avals]
        absent = [
            jax.make_array_from_single_device_arrays(a.shape, home, [], dtype=a.dtype)
            for a, home in zip(avals, homes, strict=True)
        ]
        arrays: Sequence[jax.Array] = jax.device_put(absent, [a.sharding for a in avals])
        return arrays

    def link(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Send something both ways between the ranks of each pair, of two processes, for the first time. All processes call
        this with the same pairs: one after another in their order, nobody waits for ever."""
        # The first message between two devices makes their communicator, and blocks both threads until it is there. In the
        # middle of a step, a receive that is posted early would so hold up what its sender waits for.
        for pair in sorted({(min(pair), max(pair)) for pair in pairs} - self._linked):
            self._linked.add(pair)
            for src, dst in (pair, pair[::-1]):
                source_home, target_home = (replicated(self._meshes[rank]) for rank in (src, dst))
                aval = jax.ShapeDtypeStruct((), jnp.float32, sharding=target_home)
                if src in self._ranks:
                    self.put(0, [jnp.zeros((), jnp.float32, device=source_home)], [aval])
                elif dst in self._ranks:
                    jax.block_until_ready(self.get(0, src, [aval]))


Dispatch = Callable[[Sequence[Program]], Any]
"""Return what decides in which order a thread issues programs and what it waits for; equal orders print alike."""


def agree_on_programs(
    processes: Processes, programs: Sequence[Program], dispatch: Dispatch, shapes: Any = None
) -> None:
    """Check that all processes have the same ``programs``, those of all ranks, and that each dispatches those of its ranks as
    process 0 would: members of a collective that dispatch it in another order pair it up with another one of equal shapes.

    Args:
        programs: those of this process's ranks; of others perhaps outlines, so what these hold is compared.
        shapes: of what messages carry; equal ones print alike.

    Raises:
        AgreedError: a message would not be what its receiver waits for, or an order of dispatch is another one.
    """
    outlines = [[_outline(p.rank, i) for i in p.instructions if not isinstance(i, Free)] for p in programs]
    processes.require_equal("programs", {"programs": _digest(f"{outlines} {shapes}")}, _START_ALIKE)
    ranks = processes.ranks(len(programs))
    own = "\n".join(str(programs[rank]) for rank in ranks[processes.mine])
    processes.require_equal_in_rows("programs", len(programs), _digest(own))

    @cache
    def digest_of(local_ranks: range) -> str:
        return _digest(str(dispatch([programs[rank] for rank in local_ranks])))

    def first_difference(digests: Sequence[str]) -> str:
        for process, digest in enumerate(digests):
            if digest != digest_of(ranks[process]):
                last = f" to {ranks[process][-1]}" if len(ranks[process]) > 1 else ""
                return (
                    f"{processes.who(process)} issues what rank {ranks[process][0]}{last} runs in another order than process 0 "
                    f"would: its costs or its timeline are others; {_START_ALIKE}"
                )
        return ""

    processes.validate_on_leader("issue order", digest_of(ranks[processes.mine]), first_difference)


_START_ALIKE = "start all with one config, on equal hosts"


def _outline(rank: int, instruction: Instruction) -> tuple[Any, ...]:
    assert not isinstance(instruction, Free)
    message = (*message_of(rank, instruction), instruction.place) if isinstance(instruction, Send | Recv) else ()
    return type(instruction).__name__, str(instruction.action), *map(str, message)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Ownership:
    """Which process owns which ranks, and moves of arrays between them outside of programs.

    Args:
        meshes: of all ranks, with the devices of this process's column.
        processes: of the run, which make this together.
        transport: between them, ``tagged`` (:class:`TransferServer`) or ``nccl`` (:class:`DevicePutTransport`).

    ``process_of``: by rank, of the column. ``ranks``: those of this process.

    Raises:
        AgreedError: the devices of several processes can't exchange arrays by NCCL.
    """

    def __init__(self, meshes: Sequence[Mesh], processes: Processes | None = None, transport: str = "tagged") -> None:
        self.processes = SingleProcess() if processes is None else processes
        ranks = self.processes.ranks(len(meshes))
        columns, column = self.processes.columns, self.processes.column
        in_column = [(k, own) for k, own in enumerate(ranks) if k % columns == column]
        self.process_of = tuple(process for process, process_ranks in in_column for _ in process_ranks)
        self.ranks = ranks[self.processes.mine]
        self.lanes: Lanes = NATIVE if transport == "nccl" else TAGGED
        self._meshes, self._moves = meshes, 0
        if not self.divided:
            return
        self._native = DevicePutTransport(meshes, self.ranks) if transport == "nccl" else None
        if self._native is None:
            self._mail = TransferServer(self.processes, self.process_of)
        else:
            device = meshes[self.ranks[0]].devices.flat[0]
            refusal = f"run.transport=nccl sends from GPU to GPU, and {device} is none (or its JAX can't); use tagged"
            self.processes.raise_if_any("transport", "" if puts_between_processes(device) else refusal)
        self._remote = self.remote_transport()

    @property
    def divided(self) -> bool:
        """Return whether there is more than one process."""
        return self.processes.number > 1

    @property
    def first(self) -> bool:
        """Return whether rank 0 is here."""
        return 0 in self.ranks

    def refuse_divided(self, what: str) -> None:
        """Refuse ``what``, which needs all ranks in one process.

        Raises:
            ProgramError: there is more than one process.
        """
        if self.divided:
            raise ProgramError(
                f"{what} reads all {len(self.process_of)} ranks; {self.processes.number} processes have them"
            )

    def in_different_processes(self, one: int, other: int) -> bool:
        """Return whether two ranks are in two processes."""
        return self.process_of[one] != self.process_of[other]

    def remote_transport(self) -> RemoteTransport:
        """Return a transport between processes that nothing has gone over yet. All processes ask for the same ones in the same
        order."""
        return self._native or self._mail.channel()

    def transport(self, programs: Sequence[Program]) -> Transport:
        """Return the transport of the messages of ``programs``, those of all ranks."""
        numbers = message_numbers(programs)
        homes = message_homes(programs, self._meshes, numbers)
        local_messages = {n for (src, dst, _), n in numbers.items() if src in self.ranks and dst in self.ranks}
        local = LocalTransport({number: where for number, where in homes.items() if number in local_messages})
        if not self.divided:
            return local
        remote_messages = {}
        for program in programs:
            for i in program.instructions:
                if isinstance(i, Send) and (program.rank in self.ranks) != (i.dst in self.ranks):
                    number = numbers[message_of(program.rank, i)]
                    placed_avals = zip(i.avals, homes[number], strict=True)
                    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=home) for a, home in placed_avals]
                    mesh = self._meshes[program.rank]
                    source_homes = (
                        [NamedSharding(mesh, a.sharding.spec) for a in i.avals] if program.rank in self.ranks else None
                    )
                    remote_messages[number] = RemoteMessage(program.rank, avals, source_homes)
        return MixedTransport(local, self.remote_transport(), remote_messages, len(numbers))

    def agree_on_programs(self, programs: Sequence[Program], dispatch: Dispatch, shapes: Any) -> None:
        """Check that all processes have the same ``programs``, those of all ranks, and issue them alike; link the devices
        between which they send. Call it before the first message.

        Raises:
            AgreedError: as :func:`agree_on_programs`.
        """
        if self.divided:
            agree_on_programs(self.processes, programs, dispatch, shapes)
            self.link({(p.rank, i.dst) for p in programs for i in p.instructions if isinstance(i, Send)})

    def link(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make ready what carries arrays between the ranks of each pair. All processes call it with the same pairs, whoever
        moves arrays does before its first :meth:`move`."""
        if self.divided and self._native is not None:
            self._native.link(pair for pair in pairs if self.in_different_processes(*pair))

    def shared(self, name: str, values: Mapping[int, Any]) -> dict[int, Any]:
        """Merge JSON values that the processes hold by number; of what every column has, that of the first is taken."""
        return {number: columns[0] for number, columns in self.shared_by_column(name, values).items()}

    def shared_by_column(self, name: str, values: Mapping[int, Any]) -> dict[int, list[Any]]:
        """Return all JSON values that the processes hold by number: those of each column."""
        if not self.divided:
            return {number: [value] for number, value in values.items()}
        parts = self.processes.gather(name, list(values.items()))
        merged: dict[int, list[Any]] = {}
        # In the order of the processes, so that of a number the columns are in theirs.
        for number, value in (pair for part in parts for pair in part):
            merged.setdefault(number, []).append(value)
        everywhere: list[tuple[int, list[Any]]] = self.processes.broadcast(name, sorted(merged.items()))
        return dict(everywhere)

    def move(
        self, arrays: Sequence[jax.Array], src: int, dst: int, avals: Sequence[jax.ShapeDtypeStruct]
    ) -> Sequence[jax.Array]:
        """Move arrays from rank to rank. All processes call this, in the same order, and between the same programs.

        Args:
            arrays: of rank ``src``; read only in its process.
            avals: the arrays on the devices of rank ``dst``: shapes, dtypes and shardings.

        Returns:
            The arrays in the process of ``dst``, which may still be on their way; nothing in others.
        """
        # Counted in every process, also where neither rank is: the number of a message must be the same on both sides.
        number = self._moves = self._moves + 1
        if src in self.ranks and dst in self.ranks:
            moved: Sequence[jax.Array] = jax.device_put(list(arrays), [a.sharding for a in avals])
            return moved
        if not avals or not self.in_different_processes(src, dst):
            return []
        if src in self.ranks:
            self._remote.put(number, arrays, avals)
        return self._remote.get(number, src, avals) if dst in self.ranks else []

    @property
    def leaders(self) -> list[int]:
        """The first rank of each process of this column."""
        return [self.process_of.index(k) for k in dict.fromkeys(self.process_of)]

    def spread(
        self, arrays: Sequence[jax.Array], src: int, avals: Sequence[jax.ShapeDtypeStruct]
    ) -> Sequence[jax.Array]:
        """Return arrays of rank ``src`` on the first rank of each other process; in its own as they are. All processes call
        this, as :meth:`move`. ``avals``: shapes and dtypes, split as the arrays are; without a sharding each device has all."""
        spread_arrays = arrays
        for rank in self.leaders:
            if not self.in_different_processes(src, rank):
                continue
            homes = [NamedSharding(self._meshes[rank], P() if a.sharding is None else spec_of(a)) for a in avals]
            placed = [
                jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=home) for a, home in zip(avals, homes, strict=True)
            ]
            moved = self.move(arrays, src, rank, placed)
            spread_arrays = moved if rank in self.ranks else spread_arrays
        return spread_arrays


Copy = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """``fraction``: of the residual bytes that may leave, what O and L move (:mod:`jaxpipe.stage.functions`).
    ``host_memory_bytes``: what the offloads of one process may hold (None: what the machine has available).
    ``fallback``: offload to NumPy arrays where the backend has no pinned host memory. ``in_parts``: whether O and L are
    issued in parts (:func:`jaxpipe.program.order.copies_in_parts`; None: on GPUs)."""

    fraction: float = 1.0
    host_memory_bytes: float | None = None
    fallback: bool = False
    in_parts: bool | None = None


OFFLOAD_ALL = OffloadOptions()
"""All that may leave, to pinned host memory, as much as there is available."""


def has_pinned_host(sharding: jax.sharding.Sharding) -> bool:
    """Return whether all devices of ``sharding`` have pinned host memory."""
    return all(PINNED_HOST in memory_kinds(d) for d in sharding.addressable_devices)


def host_copies(sharding: jax.sharding.Sharding, *, fallback: bool) -> tuple[Copy, Copy]:
    """Return two functions that start copying arrays to the host, and back to where they were.

    Each is for one list of leaves on the devices of ``sharding``, always placed alike: how they are placed is found out at the
    first call. (A function that gets its arguments back elsewhere, if only by another name, would be compiled again.)

    Raises:
        ProgramError: the devices have no pinned host memory, and ``fallback`` is not allowed.
    """
    if has_pinned_host(sharding):
        return _copy_both_ways(lambda homes: copier([s.with_memory_kind(PINNED_HOST) for s in homes]), copier)
    if not fallback:
        device: jax.Device = min(sharding.addressable_devices, key=str)
        raise ProgramError(
            f"the schedule offloads, but {device.platform} devices have no {PINNED_HOST!r} memory (they have "
            f"{', '.join(sorted(memory_kinds(device)))}); choose a schedule without O and L actions, or allow slow copies to "
            "host arrays with --offload-fallback (offload.fallback=true)"
        )
    return _copy_both_ways(lambda homes: _to_numpy, lambda homes: lambda arrays: jax.device_put(list(arrays), homes))


Homes = list[jax.sharding.Sharding]


def _copy_both_ways(out: Callable[[Homes], Copy], back: Callable[[Homes], Copy]) -> tuple[Copy, Copy]:
    copies: list[Copy] = []

    def to_host(arrays: Sequence[Any]) -> Sequence[Any]:
        # The shardings of the first arrays are those of all. Back on the device they must be the same objects by value and by
        # name, or XLA compiles the function that reads them once more.
        if not copies:
            homes = [a.sharding for a in arrays]
            copies.extend((out(homes), back(homes)))
        return copies[0](arrays)

    def to_device(arrays: Sequence[Any]) -> Sequence[Any]:
        return copies[1](arrays)

    return to_host, to_device


def _to_numpy(arrays: Sequence[jax.Array]) -> Sequence[Any]:
    # Not np.asarray: on CPU that is a view, which keeps the device buffer alive.
    return [np.array(a) for a in arrays]


def wait_for_copies(arrays: Sequence[Any]) -> Sequence[Any]:
    """Block the calling thread until ``arrays`` are complete; the memory that they were copied from is then free."""
    for array in arrays:
        if not isinstance(array, np.ndarray):
            array.block_until_ready()
    return arrays


GPU_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
GPU_POOL_GB = 64.0
"""XLA's pool of pinned memory per process with GPUs, unless the environment variable says otherwise (FACTS.md)."""


def check_host_memory(programs: Sequence[Program], options: OffloadOptions, platform: str, processes: int = 1) -> None:
    """Check that what ``programs`` (of one process) offload fits into host memory. ``processes``: how many share this host.

    Raises:
        ProgramError: it does not; names what is needed at least, and what would help.
    """
    needed_bytes = host_bytes(programs)
    if not needed_bytes:
        return
    if options.host_memory_bytes is not None:
        room, what = options.host_memory_bytes, f"offload.host_memory_gb={options.host_memory_bytes / 1e9:g}"
        advice = f"raise it to at least {_rounded_up(needed_bytes)}"
    else:
        room, what = available_host_bytes(platform, processes)
        advice = "set offload.host_memory_gb to override this check"
        if what.startswith(GPU_POOL_VARIABLE):
            advice = f"set the environment variable to at least {_rounded_up(needed_bytes)}"
    if needed_bytes <= room:
        return
    fraction = options.fraction * room / needed_bytes
    raise ProgramError(
        f"the schedule offloads up to {needed_bytes / 1e9:.4g} GB to host memory at a time, but {what} allows "
        f"{room / 1e9:.4g} GB: {advice}, offload less (offload.fraction below {fraction:.2g}), or choose another schedule"
    )


def _rounded_up(num_bytes: float) -> str:
    """Format gigabytes, not below ``num_bytes``: a reader who sets exactly this must not be refused again."""
    text = f"{num_bytes / 1e9:.3g}"
    return text if float(text) * 1e9 >= num_bytes else f"{num_bytes / 1e9 * 1.01:.3g}"


def available_host_bytes(platform: str, processes: int = 1) -> tuple[float, str]:
    """Return the bytes of host memory that a process may still take, and what says so; infinite where nothing is known.

    The least of the machine's available memory, the limit of the control group, both divided by the ``processes`` that share
    them, and on GPUs XLA's pool of pinned memory.
    """
    share = f", shared by {processes} processes" * (processes > 1)
    # Both versions of control groups, as a container shows the one its host has. Files that are not there read as no limit.
    rooms = [(_available_memory() / processes, f"the memory available on this machine{share}")]
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        left = _number(limit) - _number(usage, 0.0)
        rooms.append((left / processes, f"the memory limit of this container{share}"))
    if platform in ("gpu", "cuda", "rocm"):
        pool = os.environ.get(GPU_POOL_VARIABLE, "")
        gb = float(pool) if pool.replace(".", "", 1).isdigit() else GPU_POOL_GB
        rooms.append((gb * 1e9, f"{GPU_POOL_VARIABLE} ({gb:g})"))
    return min(rooms)


def _available_memory() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    sizes = [float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else float("inf")


def _number(name: str, otherwise: float = float("inf")) -> float:
    """Read a number in a file of the control group; ``otherwise`` if there is none."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return otherwise
    return float(text) if text.isdigit() else otherwise
