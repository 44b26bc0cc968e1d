"""Moves arrays from rank to rank: the seam between ranks in one process and ranks in several.

The executor talks to a :class:`Transport`. :class:`LocalTransport` serves ranks whose devices this process owns: a send is one
batched, asynchronous copy to the receiver's submesh. :class:`MixedTransport` serves those of several processes, over a
:class:`RemoteTransport`, of which there are two:

- :class:`TransferServer`, JAX's own, matches messages by number, over TCP and host memory, on GPUs too;
- :class:`DevicePutTransport` matches them by order: ``jax.device_put``, on GPUs from device memory to device memory, by NCCL.

:class:`Ownership` says which ranks are this process's, and moves arrays between ranks outside of programs. All processes of a
run do the same things in the same order; where a rank is another process's, nothing is done there. Between processes nobody
waits for ever, whatever the transport makes wait: programs end by themselves (:mod:`jaxpipe.program.order`), and a move
waits for the programs dispatched before it and for the moves before it alone, which are the same in all processes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxpipe._jax_compat import copier, puts_between_processes
from jaxpipe.errors import ProgramError
from jaxpipe.mesh import replicated, spec_of
from jaxpipe.program.ir import Message, Program, Recv, Send, message_of
from jaxpipe.program.order import NATIVE, TAGGED, Lanes
from jaxpipe.runtime.processes import Processes, SingleProcess


class Transport(Protocol):
    """Carries lists of arrays between ranks. A message has a number, unique in a step and equal on both sides, so messages
    may be received in another order than they were sent."""

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        """Start copying ``arrays`` to rank ``dst``; returns without waiting."""

    def recv(self, message: int) -> Sequence[jax.Array]:
        """Return the arrays of ``message``, on the receiver's devices; they may still be on their way."""

    def clear(self) -> None:
        """Forget what was not received (after a failed step)."""


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

    def clear(self) -> None:
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
    return {
        numbers[message_of(p.rank, i)]: [NamedSharding(meshes[i.dst], a.sharding.spec) for a in i.avals]
        for p in programs
        for i in p.instructions
        if isinstance(i, Send)
    }


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
    the receiver."""

    src: int
    avals: Sequence[jax.ShapeDtypeStruct]


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

    def clear(self) -> None:
        self._local.clear()

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


class Ownership:
    """Which process owns which ranks, and moves of arrays between them outside of programs.

    Args:
        meshes: of all ranks.
        processes: of the run, which make this together.
        transport: between them, ``tagged`` (:class:`TransferServer`) or ``nccl`` (:class:`DevicePutTransport`).

    ``process_of``: by rank. ``ranks``: those of this process.

    Raises:
        AgreedError: the devices of several processes can't exchange arrays by NCCL.
    """

    def __init__(self, meshes: Sequence[Mesh], processes: Processes | None = None, transport: str = "tagged") -> None:
        self.processes = SingleProcess() if processes is None else processes
        ranks = self.processes.ranks(len(meshes))
        self.process_of = tuple(process for process, process_ranks in enumerate(ranks) for _ in process_ranks)
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
                    remote_messages[number] = RemoteMessage(program.rank, avals)
        return MixedTransport(local, self.remote_transport(), remote_messages, len(numbers))

    def agree_on_programs(self, programs: Sequence[Program]) -> None:
        """Check that all processes have the same ``programs``, those of all ranks, and link the devices between which they
        send. Call it before the first message.

        Raises:
            AgreedError: the programs differ; a message would not be what its receiver waits for.
        """
        if self.divided:
            sends = [i for p in programs for i in p.instructions if isinstance(i, Send)]
            sent = [[(a.shape, str(a.dtype)) for a in i.avals] for i in sends]
            text = "\n".join(map(str, (*programs, sent)))
            digest = {"programs": hashlib.sha256(text.encode()).hexdigest()}
            self.processes.require_equal("programs", digest, "start all with one config, on equal hosts")
            if self._native is not None:
                pairs = {(p.rank, i.dst) for p in programs for i in p.instructions if isinstance(i, Send)}
                # Loss sums and norms go between rank 0 and every other, outside of programs.
                pairs |= {(0, rank) for rank in range(len(self.process_of))}
                self._native.link(pair for pair in pairs if self.in_different_processes(*pair))

    def shared(self, name: str, values: Mapping[int, Any]) -> dict[int, Any]:
        """Merge JSON values that the processes hold by number; each number is one process's."""
        if not self.divided:
            return dict(values)
        parts = self.processes.gather(name, list(values.items()))
        return dict(self.processes.broadcast(name, [pair for part in parts for pair in part]))

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
