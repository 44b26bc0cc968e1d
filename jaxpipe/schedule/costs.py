"""Hold what a schedule costs: seconds and bytes per stage, links between ranks, the link to the host.

A :class:`CostProfile` is measured (:mod:`jaxpipe.cost`), computed from shapes, or made of unit costs. Units: seconds and
bytes; a profile made by :meth:`CostProfile.uniform` uses whatever unit its caller means, with activations in units of one
rank's share of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.placement import Placement

HostMode = Literal["duplex", "shared"]


def _check_rates(what: str, link: Link | HostLink) -> None:
    if not 0 <= link.latency_s < float("inf"):
        raise ScheduleError(f"{what}: latency_s is {link.latency_s}; want a finite number >= 0")
    for name in (f.name for f in fields(link) if f.name.endswith("bytes_per_s")):
        if not (rate := getattr(link, name)) > 0:
            raise ScheduleError(f"{what}: {name} is {rate}; want a positive number, or inf for no limit")


@dataclass(frozen=True, slots=True)
class Link:
    """A directed rank-to-rank link: a transfer of n bytes occupies it for ``n / bytes_per_s`` seconds and has arrived
    ``latency_s`` seconds after that. So a latency delays, and never holds up the next transfer."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        _check_rates("link", self)

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds from the start of a transfer until it has arrived."""
        return self.latency_s + self.occupied_s(num_bytes)

    def occupied_s(self, num_bytes: float) -> float:
        """Return the seconds from the start of a transfer until the next one may start."""
        return num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link between device and host memory.

    ``mode``: ``duplex`` has one lane per direction, ``shared`` one lane for both. ``groups``: PCIe groups, each a tuple of
    ranks that share their lanes; ranks in no group have their own.
    """

    d2h_bytes_per_s: float = float("inf")
    h2d_bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    mode: HostMode = "duplex"
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _check_rates("host link", self)
        if self.mode not in ("duplex", "shared"):
            raise ScheduleError(f"host link: mode is {self.mode!r}; want 'duplex' or 'shared'")


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds and bytes of each stage, one tuple entry a stage.

    ``residual_bytes``: live from F's start. ``w_residual_bytes``: live from B's end to W's end. ``cotangent_bytes``: what B
    adds for W, counted from B's start (included in ``w_residual_bytes``). ``offloadable_bytes``: the part of
    ``residual_bytes`` that O may move. ``boundary_bytes``: the activation sent to the next stage (and the cotangent sent
    back). ``temp_bytes``: pairs of op name and bytes of workspace per stage while that op runs: XLA's temporaries, and what the
    action reads or makes that ``residual_bytes`` and ``cotangent_bytes`` leave out (a dy, a y until it is sent).
    ``param_bytes``: parameters; ``optimizer_bytes``: all else that stays through the step: gradient accumulators, masters,
    optimizer state. ``boundary_buffers``: whether ``boundary_bytes`` count as memory from the start of the action that sends
    them (on the rank that receives them; from its end where both are one rank) to the start of the action that reads them.
    ``f_comm_s``, ``b_comm_s``: seconds of the collectives between the devices of a rank (over tp, cp or ep) in one F and in one
    B (T_AR of `stp.txt` section 4.3); f_s, b_s, w_s and bw_s leave them out. ``collectives``: how many that is in each of
    them (two a layer in the paper).
    ``extra``: pairs of name and values per stage, for costs and memory fields of ops that users register. ``group_comm_s``:
    seconds of the collective that ends what the ranks of a shared stage did by themselves. A stage of a span above 1 has the
    costs of one action, that is of all its microbatches together. ``crowding``: seconds are those of ranks that share the cores
    of one machine, all of them busy, by which a function takes so many times as long as alone (simulations leave it out;
    :func:`~jaxpipe.cost.at_ranks_share` counts it).
    ``reduce_s``: seconds of R, the reduction of a stage's gradients over dp; ``gather_s``: of G, the gather of its parameters.
    ``net_overlaps``: whether R and G run beside compute; if not, they take their turn on the compute lane, as programs of their
    own do on a device with one stream.
    ``links``: overrides of ``link`` as ``((src, dst), Link)``. ``memory_limit_bytes``: per rank, or empty for none.
    """

    f_s: tuple[float, ...]
    b_s: tuple[float, ...]
    w_s: tuple[float, ...]
    bw_s: tuple[float, ...]
    residual_bytes: tuple[float, ...]
    w_residual_bytes: tuple[float, ...]
    cotangent_bytes: tuple[float, ...] = ()
    offloadable_bytes: tuple[float, ...] = ()
    boundary_bytes: tuple[float, ...] = ()
    param_bytes: tuple[float, ...] = ()
    optimizer_bytes: tuple[float, ...] = ()
    temp_bytes: tuple[tuple[str, tuple[float, ...]], ...] = ()
    offload_s: tuple[float, ...] = ()
    load_s: tuple[float, ...] = ()
    link: Link = field(default_factory=Link)
    links: tuple[tuple[tuple[int, int], Link], ...] = ()
    host: HostLink = field(default_factory=HostLink)
    memory_limit_bytes: tuple[float, ...] = ()
    source: str = "unit costs"
    boundary_buffers: bool = False
    extra: tuple[tuple[str, tuple[float, ...]], ...] = ()
    f_comm_s: tuple[float, ...] = ()
    b_comm_s: tuple[float, ...] = ()
    collectives: tuple[int, ...] = ()
    group_comm_s: tuple[float, ...] = ()
    crowding: float = 1.0
    reduce_s: tuple[float, ...] = ()
    gather_s: tuple[float, ...] = ()
    net_overlaps: bool = True

    def __post_init__(self) -> None:
        n = len(self.f_s)
        zeros = (0.0,) * n
        for name in (
            "cotangent_bytes",
            "boundary_bytes",
            "param_bytes",
            "optimizer_bytes",
            "f_comm_s",
            "b_comm_s",
            "group_comm_s",
            "reduce_s",
            "gather_s",
        ):
            self._default(name, zeros)
        self._default("collectives", (1,) * n)
        # before the seconds of O and L, which are made of these bytes
        self._default("offloadable_bytes", self.residual_bytes)
        for name, rate in (("offload_s", self.host.d2h_bytes_per_s), ("load_s", self.host.h2d_bytes_per_s)):
            self._default(name, tuple(self.host.latency_s + x / rate for x in self.offloadable_bytes))
        problems = list(self._problems(n))
        if problems:
            raise ScheduleError("cost profile: " + "; ".join(problems), problems)

    def _default(self, name: str, values: Sequence[float]) -> None:
        if not getattr(self, name):
            object.__setattr__(self, name, values)

    def _problems(self, n: int) -> Iterator[str]:
        tables = [(name, getattr(self, name)) for name in PER_STAGE_FIELDS]
        tables += [(f"{x}[{name}]", values) for x in ("temp_bytes", "extra") for name, values in getattr(self, x)]
        for name, values in (*tables, ("collectives", self.collectives)):
            if len(values) != n:
                yield f"{name} has {len(values)} entries for {n} stages"
        for name, values in tables:
            for s, x in enumerate(values):
                # NaN fails here, too; the upper end leaves room to add up without overflow
                if not 0 <= x < 1e300:
                    yield f"{name}[{s}] is {x}; want a finite number >= 0"
        for s, count in enumerate(self.collectives):
            if not isinstance(count, int) or count < 1:
                yield f"collectives[{s}] is {count}; want a whole number of at least 1"
        if not 1 <= self.crowding < 1e300:
            yield f"crowding is {self.crowding}; want a number of at least 1"
        for r, x in enumerate(self.memory_limit_bytes):
            if not x >= 0:
                yield f"memory_limit_bytes[{r}] is {x}; want >= 0, or inf for no limit"

    @property
    def num_stages(self) -> int:
        return len(self.f_s)

    @property
    def has_collectives(self) -> bool:
        """Return whether an F or a B waits for collectives."""
        return any(self.f_comm_s) or any(self.b_comm_s)

    def require_stages(self, num_stages: int, what: str) -> None:
        """Raise ScheduleError unless these are the costs of so many stages, which ``what`` has."""
        if self.num_stages != num_stages:
            raise ScheduleError(f"the costs are for {self.num_stages} stages, {what} has {num_stages}")

    def values(self, name: str) -> Sequence[float]:
        """Return the cost or memory field called ``name`` (an :class:`~jaxpipe.schedule.ir.OpSpec` names it), one entry a
        stage.

        Raises:
            ScheduleError: neither a per-stage field nor an entry of ``extra`` has that name.
        """
        for field_name, extra in self.extra:
            if field_name == name:
                return extra
        if name not in PER_STAGE_FIELDS:
            raise ScheduleError(
                f"the cost profile has no {name!r}; give it as extra=(({name!r}, (value per stage, ...)),), in a file for "
                f'--costs as "extra": {{"{name}": [value per stage, ...]}}, or use one of {" ".join(PER_STAGE_FIELDS)}'
            )
        values: Sequence[float] = getattr(self, name)
        return values

    def with_values(self, name: str, values: Sequence[float]) -> CostProfile:
        """Return a copy with other :meth:`values` of that name, which may be a new one."""
        if name in PER_STAGE_FIELDS:
            changed: dict[str, Any] = {name: tuple(values)}
            return replace(self, **changed)
        return replace(self, extra=tuple({**dict(self.extra), name: tuple(values)}.items()))

    def seconds(self, cost: str, stage: int) -> float:
        """Return the seconds of the cost called ``cost`` (an :class:`~jaxpipe.schedule.ir.OpSpec` names it) on ``stage``; 0
        for ``""``."""
        return self.values(cost)[stage] if cost else 0.0

    def transfer_s(self, src_rank: int, dst_rank: int, stage: int, parts: float = 1.0) -> float:
        """Return the seconds until ``parts`` boundaries of ``stage`` (the sending F's, or the receiving one for B) have
        come from rank to rank."""
        return self._link(src_rank, dst_rank).seconds(self.boundary_bytes[stage] * parts)

    def occupied_s(self, src_rank: int, dst_rank: int, stage: int, parts: float = 1.0) -> float:
        """Return the seconds of :meth:`transfer_s` in which no other transfer of the pair of ranks may start."""
        return self._link(src_rank, dst_rank).occupied_s(self.boundary_bytes[stage] * parts)

    def _link(self, src_rank: int, dst_rank: int) -> Link:
        return _NO_LINK if src_rank == dst_rank else dict(self.links).get((src_rank, dst_rank), self.link)

    def of_stages(self, stages: range) -> CostProfile:
        """Return the costs of these stages alone."""
        # limits in bytes are per rank and stay as they are
        part: dict[str, Any] = {name: getattr(self, name)[stages.start : stages.stop] for name in PER_STAGE_FIELDS}
        for name in ("temp_bytes", "extra"):
            part[name] = tuple((key, values[stages.start : stages.stop]) for key, values in getattr(self, name))
        return replace(self, **part, collectives=self.collectives[stages.start : stages.stop])

    @classmethod
    def on(cls, placement: Placement, *, head: tuple[float, float] = (0.0, 0.0), **share: Any) -> CostProfile:
        """:meth:`uniform` for the stages of ``placement``. Of spread vocabulary layers each part of the head takes
        ``head``: seconds of S and T; parts of the embedding and the loss take none, and none of them holds anything."""
        n, trunk, p = placement.num_stages, placement.trunk, placement.num_ranks
        chain = cls.uniform(len(trunk), chunks=placement.num_chunks, **share)
        if len(trunk) == n:
            return chain

        def around(inside: tuple[Any, ...], of_head: float = 0.0) -> tuple[Any, ...]:
            return (0.0,) * trunk.start + inside + (of_head,) * p + (0.0,)

        heads = {"f_s": head[0], "w_s": head[1], "bw_s": head[1]}
        wider: dict[str, Any] = {name: around(getattr(chain, name), heads.get(name, 0.0)) for name in PER_STAGE_FIELDS}
        counts = (1,) * trunk.start + chain.collectives + (1,) * (p + 1)
        return replace(chain, **wider, collectives=counts)

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        chunks: int = 1,
        f: float = 1.0,
        b: float = 1.0,
        w: float = 1.0,
        comm: float = 0.0,
        w_residual: float = 1.0,
        offload_time: float = 0.0,
        host_mode: HostMode = "duplex",
        tp_comm: float | tuple[float, ...] = 0.0,
        tp_collectives: int = 1,
        reduction: tuple[float, float] = (0.0, 0.0),
        source: str = "uniform",
    ) -> CostProfile:
        """Equal stages. ``f b w`` and ``offload_time`` (the round trip) are one rank's share of a microbatch; each of the
        ``chunks`` stages of a rank takes that divided by ``chunks``, and holds ``1/chunks`` activation, of which the
        fraction ``w_residual`` stays from B's end to W's end. ``comm``: seconds of one transfer, a
        latency. ``tp_comm``: seconds of the collectives of a share's F and again of its B, or a pair of both, divided like
        ``f``; ``tp_collectives``: how many a stage has.
        ``reduction``: seconds of R and G of all stages of a rank, once a step."""
        if chunks < 1 or num_stages < 1:
            raise ScheduleError(f"costs need at least one stage and one chunk, got {num_stages} and {chunks}")
        if not 0 <= w_residual <= 1:
            raise ScheduleError(f"w_residual is {w_residual}; want a fraction between 0 and 1")
        f_comm, b_comm = tp_comm if isinstance(tp_comm, tuple) else (tp_comm, tp_comm)

        def each(x: float) -> tuple[float, ...]:
            return (x / chunks,) * num_stages

        return cls(
            f_s=each(f),
            b_s=each(b),
            w_s=each(w),
            bw_s=each(b + w),
            residual_bytes=each(1.0),
            w_residual_bytes=each(w_residual),
            offload_s=each(offload_time / 2),
            load_s=each(offload_time / 2),
            link=Link(latency_s=comm),
            host=HostLink(mode=host_mode),
            source=source,
            f_comm_s=each(f_comm),
            b_comm_s=each(b_comm),
            collectives=(tp_collectives,) * num_stages,
            reduce_s=each(reduction[0]),
            gather_s=each(reduction[1]),
        )


_NO_LINK = Link()
PER_STAGE_FIELDS = tuple(
    f.name for f in fields(CostProfile) if f.type == "tuple[float, ...]" and f.name != "memory_limit_bytes"
)
"""Costs and memory, one number a stage."""


def k_of(costs: CostProfile) -> float:
    """Return k of a cost profile: seconds of all O and L ÷ seconds of all F, B and W; inf where only the compute is 0. At
    most 1 means that offloading everything can be hidden (`pipeoffload.txt` section 1)."""
    compute_s = sum(costs.f_s) + sum(costs.b_s) + sum(costs.w_s)
    round_trip_s = sum(costs.offload_s) + sum(costs.load_s)
    if compute_s > 0:
        return round_trip_s / compute_s
    return float("inf") if round_trip_s > 0 else 0.0
