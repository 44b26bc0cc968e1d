"""Runs the programs of this process's ranks: one flat loop over instructions on one thread.

Linking turns programs into a list of small tuples: the compiled function, an ``itemgetter`` over the rank's slots, the slots to
fill and the slots to clear. The loop does nothing else. Programs are interleaved in the order of simulated time
(:mod:`jaxpipe.program.order`), so that no rank's in-flight limit blocks the others. Arrays are futures: the loop runs ahead of
the devices, and memory is freed by dropping references. Two things hold the loop up, and with it every rank of this process,
until an offload has left the device: a sync (S), and an action whose memory that offload gives back, by the predicted times.

A braid that runs as one function is one instruction, one token and one recorded event. So is a reduction, which runs in the
cool-down of the pipeline; a run for which no function reduces a stage leaves its reduction out. Where compute can go on beside
reductions, a thread of their own dispatches them, one after another, and the loop waits at its end until they are complete.
A step may begin *late*: a rank's accumulators are asked for before its first backward, and whoever is asked may drop the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe.errors import RunError, short_message
from jaxpipe.mesh import replicated
from jaxpipe.program.ir import (
    Free,
    Instruction,
    Offload,
    Program,
    Recv,
    Reduce,
    Reload,
    Run,
    Send,
    Sync,
    Value,
    drops,
    message_of,
    reads,
)
from jaxpipe.runtime.recorder import DeviceClock, Recorder
from jaxpipe.runtime.transfer import (
    Copy,
    LocalTransport,
    Transport,
    host_copies,
    message_homes,
    message_numbers,
    wait_for_copies,
)
from jaxpipe.schedule import Action, Event, Slot, op_spec
from jaxpipe.stage.functions import AnyFunction, Braids, Port, StageFunctions, function_of

Bank = list[Any]
Token = tuple[int, Slot, Any]
"""Rank, action, and a scalar that is ready when the action has run."""
Probe = Callable[[int, Sequence[jax.Array]], None]

Reductions = Mapping[tuple[int, int], Callable[[list[jax.Array]], Sequence[jax.Array]]]
"""Functions by (rank, stage), each called with the gradient accumulators, which it may donate. It must dispatch and not wait,
and what it returns begins with an array that no later call donates."""

Late = Callable[[int], Mapping[tuple[int, int], Sequence[jax.Array]]]
"""A function that returns the gradient accumulators of a rank by (rank, stage), called before its first backward is dispatched.
It may wait, and may raise :class:`StepDropped`."""


class StepDropped(Exception):  # noqa: N818
    """Tells that a step, as far as it has been dispatched, is dropped and begins anew."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays that a step starts from, on the devices of the ranks that need it.

    ``params`` and ``acc``: buffers by (rank, stage). ``data``: per (rank, stage), per microbatch, the arrays that the stage
    reads. ``keys``: per rank, per microbatch (empty if no stage draws random numbers).
    """

    params: Mapping[tuple[int, int], Sequence[jax.Array]]
    acc: Mapping[tuple[int, int], Sequence[jax.Array]]
    data: Mapping[tuple[int, int], Sequence[Sequence[jax.Array]]]
    keys: Mapping[int, Sequence[jax.Array]]


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The results of a step, as arrays that may not be ready yet.

    Attributes:
        acc: accumulators by (rank, stage), gradients added (the ones put in are donated).
        losses: per microbatch, the loss ports of all stages: loss sum, weight sum, those of metrics.
        tokens: per action (or braid that is one function), in order of dispatch, an array that is ready when it has run.
        events: what was measured, if the step was recorded.
        stamps: the host's clock before each instruction and after the last.
        step_s: seconds until all results were ready (recorded steps only).
        clock_error_s: by how much events of other processes may be off.
        process_seconds: mean seconds by (op, stage) of each process, in process 0 of several (recorded steps only).
        reduced: what the reductions returned, by (rank, stage).
        user: by name and (stage, microbatch), what custom instructions wrote and nothing read
            (:mod:`jaxpipe.stage.instructions`).
    """

    acc: Mapping[tuple[int, int], Sequence[jax.Array]]
    losses: Sequence[tuple[jax.Array, ...]]
    tokens: Sequence[Token]
    events: tuple[Event, ...]
    stamps: Sequence[float]
    step_s: float
    clock_error_s: float = 0.0
    process_seconds: Sequence[Mapping[tuple[str, int], float]] = ()
    reduced: Mapping[tuple[int, int], Sequence[jax.Array]] = field(default_factory=dict)
    user: Mapping[str, Mapping[tuple[int, int], jax.Array]] = field(default_factory=dict)

    @property
    def instruction_s(self) -> tuple[float, ...]:
        """Return the host seconds of each instruction, in order of dispatch."""
        return tuple(b - a for a, b in pairwise(self.stamps))

    def wait(self) -> None:
        """Wait until everything has run.

        Raises:
            RunError: an action failed on its device; names the first.
        """
        for rank, action, token in self.tokens:
            try:
                token.block_until_ready()
            except Exception as error:
                raise _run_error(rank, action, error) from error


@dataclass(frozen=True, slots=True)
class _Reducing:
    """The token of a reduction that its thread may not have dispatched yet."""

    future: Future[Sequence[jax.Array]]

    def is_ready(self) -> bool:
        return self.future.done() and bool(self.future.result()[0].is_ready())  # type: ignore[attr-defined]


class _Linked(NamedTuple):
    """One instruction, ready to run. ``run(*get(bank))`` fills the slots ``outs`` of the ``bank``; ``clear`` is emptied
    afterwards. A tuple, because the loop unpacks it: looking up attributes would take longer than dispatching a small
    function."""

    kind: int
    run: Callable[..., Any]
    get: Callable[[Bank], Any]
    bank: Bank
    outs: tuple[int, ...]
    clear: tuple[int, ...]
    rank: int
    action: Slot
    marker: int  # which result tells that the action is done
    lane: str


# The order matters: those of kinds below ``_SEND`` the loop records, and that of a reduction whoever dispatches it.
_RUN, _RECV, _COPY, _SYNC, _SEND, _REDUCE, _BIND = range(7)
_KINDS = ("run", "recv", "copy", "sync", "send", "reduce")

Copies = Callable[[int, int, int], tuple[Copy, Copy]]
"""How a part of the O and L of a stage copies, by rank, stage and part (one of many if they are issued whole)."""

Holds = Mapping[tuple[int, int], Sequence[tuple[Action, tuple[int, ...]]]]
"""Offloads, and their host slots, that must have ended before an instruction: by position in programs and instruction."""


class Executor:
    """Runs steps of one schedule. Build once; :meth:`run` any number of times.

    Args:
        programs: of the ranks whose devices this process owns, all of them or a subset.
        order: from :func:`jaxpipe.program.order.issue_order` over the same programs.
        functions: by (rank, stage).
        meshes: per rank (all of them), its devices.
        transport: how arrays reach other ranks; in-process by default.
        all_programs: of all ranks, if ``programs`` is a subset: messages are numbered over all of them.
        offload_fallback: offload to NumPy arrays where devices have no pinned host memory.
        holds: from :func:`jaxpipe.program.order.holds`; without them the host may run ahead of all offloads but those with S.
        braids: those that ``programs`` run as one function.
        reductions: of some of ``functions``.
        beside_compute: whether a thread of their own dispatches these.
        copies: how O and L of (rank, stage, part) copy; by default to and from pinned host memory.
        clock: what recorded steps are timed by.

    ``order``: as given. ``sequence``: (rank, index in its program) of each instruction that the loop visits, in that order.
    ``dispatched``: the tokens of the last step, or of the one that another thread is running, so far.

    Raises:
        ProgramError: the programs offload, and devices have no pinned host memory.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        order: Sequence[tuple[int, int]],
        functions: Mapping[tuple[int, int], StageFunctions],
        meshes: Sequence[Mesh],
        transport: Transport | None = None,
        all_programs: Sequence[Program] | None = None,
        offload_fallback: bool = False,
        holds: Holds | None = None,
        braids: Braids = MappingProxyType({}),
        reductions: Reductions = MappingProxyType({}),
        beside_compute: bool = False,
        copies: Copies | None = None,
        clock: DeviceClock | None = None,
    ) -> None:
        self._programs = tuple(programs)
        self._all_programs = self._programs if all_programs is None else tuple(all_programs)
        on_gpu = any(device.platform == "gpu" for mesh in meshes[:1] for device in mesh.devices.flat)
        self._clock = DeviceClock(loads_follow_compute=on_gpu) if clock is None else clock
        self._numbers = message_numbers(self._all_programs)
        if transport is None:
            transport = LocalTransport(message_homes(programs, meshes, self._numbers))
        self._transport = transport
        # One slot more than the program has: results that nothing reads go to it, so the loop needs no case for them.
        self._banks: list[Bank] = [[None] * (p.num_slots + 1) for p in programs]
        self._states = [_states(p, functions) for p in self._programs]
        self._num_ranks = len(meshes)
        self._reducer = ThreadPoolExecutor(1, "jaxpipe-reduce") if reductions and beside_compute else None
        self.order = tuple(order)
        self.dispatched: Sequence[Token] = ()
        linker = _Linker(self._programs, functions, braids, reductions, self._banks)
        if copies is None:
            copies = cache(lambda rank, *_: host_copies(replicated(meshes[rank]), fallback=offload_fallback))
        linker.link(order, copies, transport, self._numbers, holds or {})
        self._code = linker.code
        self.sequence = tuple(linker.sequence)

    @cached_property
    def _received_for(self) -> Mapping[int, Sequence[int]]:
        """Return, by instruction, the receives whose arrays it is the first to read: those of other processes are posted
        early."""
        programs = {p.rank: p for p in self._programs}
        unread: dict[tuple[int, int], int] = {}
        receives: dict[int, list[int]] = {}
        for n, (rank, at) in enumerate(self.sequence):
            instruction, kind = programs[rank].instructions[at], self._code[n].kind
            # A receive is recorded when its first reader is dispatched, not when it is posted: its lane is the reader's, and
            # would wait for a message while actions before the reader already run.
            arrived = {unread[rank, slot] for slot in reads(instruction) if (rank, slot) in unread}
            if kind < _SEND and arrived:
                receives[n] = sorted(arrived)
                unread = {place: k for place, k in unread.items() if k not in arrived}
            if isinstance(instruction, Recv):
                unread |= {(rank, slot): n for slot in instruction.outputs}
        return receives

    @property
    def num_instructions(self) -> int:
        """Count the instructions of one step that the loop visits (frees are folded into the instruction before them)."""
        return len(self._code)

    @property
    def instruction_kinds(self) -> tuple[str, ...]:
        """Return the kind of each instruction, in order of dispatch: ``run``, ``send``, ``recv``, ``copy``, ``sync`` or
        ``reduce``."""
        return tuple(_KINDS[i.kind] for i in self._code)

    def unfinished(self, tokens: Sequence[Token]) -> tuple[int, Slot] | None:
        """Return rank and slot of the first action of a step that has not run; None if all have.

        ``tokens``: of that step, as far as it has been dispatched. Waits for nothing, and may be called from any thread.
        """
        actions = [(i.rank, i.action) for i in self._code if i.kind in (_RUN, _REDUCE)]
        token_list = list(tokens)
        done = next((n for n, (_, _, token) in enumerate(token_list) if not token.is_ready()), len(token_list))
        return None if done == len(actions) else actions[done]

    def run(
        self, inputs: StepInputs, *, record: bool = False, probe: Probe | None = None, late: Late | None = None
    ) -> StepOutputs:
        """Run one step, and return without waiting for the devices unless ``record``.

        Args:
            record: measure when each action runs; waits for all results.
            probe: ``probe(n, results)`` is called after the ``n``-th instruction of :attr:`sequence` has put its results into
                slots, before it drops anything.
            late: gives the accumulators, in place of those of ``inputs``; not with the other two.

        Raises:
            RunError: an instruction failed; names rank, action and stage.
            StepDropped: ``late`` says so.
        """
        acc = {} if late else dict(inputs.acc)
        inputs = replace(inputs, acc=acc)
        self._bind(inputs)
        try:
            if record:
                return self._run_recorded(inputs, probe)
            code = self._late_code(late, acc) if late else self._code
            tokens, stamps = self._dispatch(code, None, probe)
            return self._collect(inputs, tokens, (), stamps, 0.0)
        # Whatever ends a step, the next one starts clean: no message that nobody received, and no array that a slot keeps alive
        # between steps, when the optimizer needs the memory.
        except BaseException:
            self._transport.clear()
            raise
        finally:
            for bank in self._banks:
                bank[:] = [None] * len(bank)

    def _run_recorded(self, inputs: StepInputs, probe: Probe | None) -> StepOutputs:
        start = self._clock.now()
        with Recorder(self._num_ranks, self._clock, net_overlaps=self._reducer is not None) as recorder:
            tokens, stamps = self._dispatch(self._code, recorder, probe)
        if recorder.failure is not None:
            f = recorder.failure
            raise _run_error(f.rank, f.action, f.error) from f.error
        step_s = self._clock.when_ready([token for *_, token in tokens]) - start
        return self._collect(inputs, tokens, recorder.events(), stamps, step_s)

    @cached_property
    def _first_backwards(self) -> Mapping[int, tuple[Program, int]]:
        """Return, by rank, its program and the place in :attr:`sequence` of its first backward, if it has one."""
        firsts = {p.rank: (p, _first_backward(p)) for p in self._programs}
        return {
            rank: (program, self.sequence.index((rank, at)))
            for rank, (program, at) in firsts.items()
            if at < len(program.instructions)
        }

    @cached_property
    def _begun_messages(self) -> Sequence[tuple[int, int]]:
        """Return messages by their place in :attr:`sequence`: those that the sender sends, or the receiver asks for, before its
        own first backward."""
        begun = {
            message_of(p.rank, i)
            for p in self._all_programs
            for i in p.instructions[: _first_backward(p)]
            if isinstance(i, Send | Recv)
        }
        programs = {p.rank: p for p in self._programs}
        messages = []
        for n, (rank, at) in enumerate(self.sequence):
            instruction = programs[rank].instructions[at]
            if isinstance(instruction, Send | Recv) and self._code[n].kind in (_SEND, _RECV):
                message = message_of(rank, instruction)
                messages += [(n, self._numbers[message])] if message in begun else []
        return messages

    def _late_code(self, late: Late, acc: dict[tuple[int, int], Sequence[jax.Array]]) -> list[_Linked]:
        """Return the list that the loop visits, with instructions that bind what ``late`` gives, and put it into ``acc``."""

        def bind(rank: int, n: int, places: Sequence[Value], _: Any) -> list[jax.Array]:
            try:
                acc.update(late(rank))
            except StepDropped:
                # Another process drops the step at another place of the order: what it has sent by then must be received, and
                # what its devices wait for must come, or they do nothing else any more.
                self._transport.clear([number for at, number in self._begun_messages if at >= n])
                raise
            return [acc[rank, v.stage][v.index] for v in places]

        code = list(self._code)
        # From the back, so that each insertion leaves the positions before it as they are.
        for rank, (program, n) in sorted(self._first_backwards.items(), key=lambda item: -item[1][1]):
            bound = [(v, slot) for v, slot in program.bound if v.kind == "acc"]
            run, outs = partial(bind, rank, n, [v for v, _ in bound]), tuple(slot for _, slot in bound)
            code.insert(n, code[n]._replace(kind=_BIND, run=run, get=_getter(()), outs=outs, clear=()))
        return code

    def _dispatch(
        self, code: Sequence[_Linked], recorder: Recorder | None, probe: Probe | None
    ) -> tuple[list[Token], list[float]]:
        """Run the flat loop: hand every instruction of ``code`` to its device, in order, and wait for none.

        The order of ``code`` may be changed as far as :mod:`jaxpipe.program.order` proves it; the order of the four parts of
        an iteration may not: results go into slots, the probe sees them, slots are cleared, the recorder is told.

        Returns:
            A token per action, and the host's clock before each instruction and after the last.
        """
        at = 0
        tokens: list[Token] = []
        stamps: list[float] = []
        arguments: Sequence[Any] = ()
        arriving: dict[int, Sequence[Any]] = {}  # what is received, until something reads it: recorded steps only
        # The same list, not a copy: a watchdog's thread reads how far the step has come while this one fills it.
        self.dispatched = tokens
        clock = self._clock.now
        try:
            # Every microsecond here is one that devices of small stages may wait for: no attribute lookups, no function that
            # does not dispatch, and nothing that is the same every step (it is done when linking).
            for at, (kind, run, get, bank, outs, clear, rank, action, marker, lane) in enumerate(code):
                stamps.append(clock())
                if kind == _RUN:
                    arguments = get(bank)
                    results = run(*arguments)
                    # A reference that outlived ``clear`` would keep the memory of a whole action until the next one.
                    if recorder is None:
                        arguments = ()
                    tokens.append((rank, action, results[marker]))
                elif kind == _REDUCE:
                    sums = self._reduced(run, list(get(bank)), recorder, tokens, rank, action)
                    results = (sums,)
                    tokens.append((rank, action, _Reducing(sums) if isinstance(sums, Future) else sums[0]))
                elif kind == _SEND:
                    run(get(bank))
                    results = ()
                elif kind == _RECV:
                    results = run()
                else:
                    results = run(get(bank))
                for slot, array in zip(outs, results):  # noqa: B905  strict= costs time; lengths are checked at linking
                    bank[slot] = array
                if probe is not None:
                    probe(at, results)
                # Dropping the last reference is how memory is freed: the runtime keeps the buffer until what was dispatched
                # with it has run. Donated slots are among these, too; reading one again would raise.
                for slot in clear:
                    bank[slot] = None
                if recorder is not None and kind < _SEND:
                    # A copy, and who waits for it, is done when its last array has arrived: they travel on several streams.
                    done = results if kind >= _COPY else (results[marker],) if results else ()
                    if kind == _RECV:
                        arriving[at] = done
                        continue
                    for n in self._received_for.get(at, ()):
                        recorder.dispatched(rank, "recv", self._code[n].action, arriving.pop(n), stamps[-1])
                    recorder.dispatched(rank, lane, action, done, stamps[-1], arguments)
                    arguments = ()
        except StepDropped:
            raise
        # Only errors that dispatching raises; those of devices come later, and are found by their tokens.
        except Exception as error:
            failed = code[at]
            raise _run_error(failed.rank, failed.action, error) from error
        stamps.append(clock())
        if self._reducer is not None:
            self._await_reductions(tokens)
        return tokens, stamps

    def _reduced(
        self,
        reduce: Callable[..., Sequence[jax.Array]],
        accumulators: list[jax.Array],
        recorder: Recorder | None,
        tokens: Sequence[Token],
        rank: int,
        action: Slot,
    ) -> Sequence[jax.Array] | Future[Sequence[jax.Array]]:
        """Dispatch a reduction, here or in its thread, and return what it returns."""
        before = [next(token for r, _, token in reversed(tokens) if r == rank)] if recorder else []
        # JAX keeps this choice by thread.
        wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined,unused-ignore]

        def dispatch(beside: bool) -> Sequence[jax.Array]:
            began = self._clock.now()
            if beside and before:
                # No other thread sees when it can start. Whose failure it is, tokens tell.
                with suppress(Exception):
                    began = self._clock.when_ready(before)
            with jax.enable_x64(wide) if beside else nullcontext():
                sums = reduce(accumulators)
            if recorder is not None:
                recorder.dispatched(rank, "net", action, sums, began)
            return sums

        return dispatch(beside=False) if self._reducer is None else self._reducer.submit(dispatch, beside=True)

    def _await_reductions(self, tokens: list[Token]) -> None:
        """Put into slots what reductions have returned, and wait until they are complete: their collectives and those of the
        update, which this thread dispatches, would otherwise be in no order."""
        for n, (rank, action, token) in enumerate(tokens):
            if isinstance(token, _Reducing):
                try:
                    sums = token.future.result()
                except Exception as error:
                    raise _run_error(rank, action, error) from error
                tokens[n] = (rank, action, sums[0])
                with suppress(Exception):
                    sums[0].block_until_ready()
        for bank in self._banks:
            bank[:] = [x.result() if isinstance(x, Future) else x for x in bank]

    def _bind(self, inputs: StepInputs) -> None:
        for program, bank, (slots, zeros) in zip(self._programs, self._banks, self._states, strict=True):
            r = program.rank
            for slot, array in zip(slots, zeros(), strict=True):
                bank[slot] = array
            for value, slot in program.bound:
                match value.kind:
                    case "param":
                        bank[slot] = inputs.params[(r, value.stage)][value.index]
                    case "acc" if inputs.acc:
                        bank[slot] = inputs.acc[(r, value.stage)][value.index]
                    case "data":
                        bank[slot] = inputs.data[(r, value.stage)][value.microbatch][value.index]
                    case "key":
                        bank[slot] = inputs.keys[r][value.microbatch]

    def _collect(
        self,
        inputs: StepInputs,
        tokens: Sequence[Token],
        events: tuple[Event, ...],
        stamps: Sequence[float],
        step_s: float,
    ) -> StepOutputs:
        acc: dict[tuple[int, int], list[jax.Array]] = {at: list(buffers) for at, buffers in inputs.acc.items()}
        losses: dict[int, dict[tuple[int, int], jax.Array]] = {}
        user: dict[str, dict[tuple[int, int], jax.Array]] = {}
        reduced: dict[tuple[int, int], Sequence[jax.Array]] = {}
        for program, bank in zip(self._programs, self._banks, strict=True):
            for value, slot in program.results:
                if value.kind == "acc":
                    acc[(program.rank, value.stage)][value.index] = bank[slot]
                elif value.kind == "sums":
                    reduced |= {(program.rank, value.stage): bank[slot]} if bank[slot] is not None else {}
                elif value.kind == "user":
                    user.setdefault(value.name, {})[(value.stage, value.microbatch)] = bank[slot]
                else:
                    losses.setdefault(value.microbatch, {})[(value.stage, value.index)] = bank[slot]
        return StepOutputs(
            acc=acc,
            losses=[tuple(losses[i][k] for k in sorted(losses[i])) for i in sorted(losses)],
            tokens=tokens,
            events=events,
            stamps=stamps,
            step_s=step_s,
            reduced=reduced,
            user=user,
        )


def _run_error(rank: int, slot: Slot, error: Exception) -> RunError:
    return RunError(f"{place_of(rank, slot)} failed: {short_message(error)}", str(slot))


def place_of(rank: int, slot: Slot) -> str:
    """Return how messages name an action of a rank."""
    if isinstance(slot, Action):
        spec = op_spec(slot.op)
        of = spec.description if spec.per_step else f"microbatch {slot.microbatch}"
        return f"rank {rank}, action {slot} (stage {slot.stage}, {of})"
    places = ", ".join(f"stage {a.stage} microbatch {a.microbatch}" for a in slot.actions)
    return f"rank {rank}, braid {slot} ({places})"


def _first_backward(program: Program) -> int:
    """Return the place of the first instruction that computes a gradient or reads an accumulator; the number of all, if none
    does."""
    accumulators = {slot for v, slot in program.bound if v.kind == "acc"}
    for at, instruction in enumerate(program.instructions):
        ops = [op for op, _ in instruction.parts] if isinstance(instruction, Run) else []
        if any(op_spec(op).sends == "pred" for op in ops) or not accumulators.isdisjoint(reads(instruction)):
            return at
    return len(program.instructions)


@dataclass
class _Linker:
    """Makes the list that the loop visits, ``code``, and for each entry of it (rank, index in its program): ``sequence``."""

    programs: Sequence[Program]
    functions: Mapping[tuple[int, int], StageFunctions]
    braids: Braids
    reductions: Reductions
    banks: Sequence[Bank]
    code: list[_Linked] = field(default_factory=list)
    sequence: list[tuple[int, int]] = field(default_factory=list)

    def link(
        self,
        order: Sequence[tuple[int, int]],
        copies: Copies,
        transport: Transport,
        numbers: Mapping[tuple[int, int, Action], int],
        holds: Holds,
    ) -> None:
        last_of: dict[int, int] = {}
        parts: Counter[tuple[int, type[Instruction], Action]] = Counter()
        for k, at in order:
            program, bank = self.programs[k], self.banks[k]
            rank, instruction = program.rank, program.instructions[at]
            # A free costs no iteration: the instruction before it in its program clears the slots as well.
            if isinstance(instruction, Reduce) and (rank, instruction.action.stage) not in self.reductions:
                continue
            if isinstance(instruction, Free):
                before = last_of[k]
                self.code[before] = self.code[before]._replace(clear=(*self.code[before].clear, *instruction.slots))
                continue
            run: Callable[..., Any]
            marker = 0
            match instruction:
                case Run():
                    function = function_of(rank, instruction.parts, self.functions, self.braids)
                    assert len(instruction.outputs) == len(function.outputs), f"{instruction}, of {function.outputs}"
                    kind, run, lane, marker = _RUN, function.call, "compute", _marker(function)
                case Send(action, dst=dst):
                    kind, run, lane = _SEND, partial(transport.send, numbers[(rank, dst, action)], dst), "send"
                # A message is named by its sender's action, so a receive looks up (src, rank) where a send has (rank, dst).
                case Recv(action, src=src):
                    kind, run, lane = _RECV, partial(transport.recv, numbers[(src, rank, action)]), "recv"
                case Offload(action) | Reload(action):
                    back = isinstance(instruction, Reload)
                    run = copies(rank, action.stage, parts[rank, type(instruction), action])[back]
                    parts[rank, type(instruction), action] += 1
                    kind, lane = _COPY, "h2d" if back else "d2h"
                case Sync():
                    kind, run, lane = _SYNC, wait_for_copies, "compute"
                case Reduce(action):
                    kind, run, lane = _REDUCE, self.reductions[rank, action.stage], "net"
            get, outs = _getter(instruction.inputs), instruction.outputs
            linked = _Linked(kind, run, get, bank, outs, drops(instruction), rank, instruction.action, marker, lane)
            if (k, at) in holds:
                copies_to_end = tuple(slot for _, slots in holds[(k, at)] for slot in slots)
                linked = linked._replace(get=_holding(linked.get, _getter(copies_to_end)))
            last_of[k] = len(self.code)
            self.code.append(linked)
            self.sequence.append((rank, at))


def _states(
    program: Program, functions: Mapping[tuple[int, int], StageFunctions]
) -> tuple[Sequence[int], Callable[[], Sequence[jax.Array]]]:
    """Return the slots of what instructions keep from microbatch to microbatch, and a function that makes it anew for a step:
    zeros."""
    bound = {Port("state", v.index, v.name, v.stage): slot for v, slot in program.bound if v.kind == "state"}
    avals = {
        replace(port, stage=s): aval
        for (r, s), stage in functions.items()
        for f in (stage.functions.values() if r == program.rank and bound else ())
        for port, aval in zip(f.inputs, f.avals_in, strict=True)
        if port.kind == "state"
    }
    if not bound:
        return (), lambda: ()
    state_avals = [avals[port] for port in bound]
    homes = [aval.sharding for aval in state_avals]
    return tuple(bound.values()), jax.jit(
        lambda: [jnp.zeros(a.shape, a.dtype) for a in state_avals], out_shardings=homes
    )


def _getter(slots: tuple[int, ...]) -> Callable[[Bank], Any]:
    # ``itemgetter`` runs in C, but returns a bare item for one slot, and takes no empty list.
    if not slots:
        return lambda bank: ()
    if len(slots) == 1:
        (slot,) = slots
        return lambda bank: (bank[slot],)
    return itemgetter(*slots)


def _holding(get: Callable[[Bank], Any], copies: Callable[[Bank], Any]) -> Callable[[Bank], Any]:
    """Return ``get`` preceded by a wait until the arrays of ``copies`` are complete: their device memory is free then, and what
    is dispatched next may take it."""

    def held(bank: Bank) -> Any:
        wait_for_copies(copies(bank))
        return get(bank)

    return held


def _marker(function: AnyFunction) -> int:
    """Return which result tells that the function has run: the token, which no later call donates."""
    return next(k for k, port in enumerate(function.outputs) if port.kind == "token")
