"""A second opinion on schedules and timelines: reads the file forms and judges them, sharing no code with jaxpipe.

Written from the documents (jaxpipe/README.md, schedule/README.md), not from the checker. A schedule can run if playing it
comes to an end: every rank issues its compute slots in row order, host copies in row order of their own lane and after the
compute slot that stands before them, and a slot starts when all it waits for has ended. Only the built-in ops.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

Action = tuple[str, int, int]
Slot = tuple[Action, ...]
Flow = list[tuple[int, ...]]

COMPUTE, SENDS = ("F", "B", "W", "BW", "S"), ("F", "B", "BW")
LANES = {"O": "out", "L": "in"} | dict.fromkeys(COMPUTE, "compute")
NUMBER = r"(?:0|[1-9][0-9]{0,17})"


class RefusedError(Exception):
    """The file is no schedule, or no timeline."""


@dataclass
class Read:
    """A schedule as its file says it. ``flows[k][stage]``: the ranks that run it for microbatches k, k + len(flows), …"""

    rows: list[list[Slot]]
    flows: list[Flow]
    microbatches: int
    edges: set[tuple[int, int]]
    problems: list[str] = field(default_factory=list)


# Reading


def read(name: str, text: str) -> Read:
    """Return the schedule in a file called ``name``. Raises RefusedError."""
    reader = {"sched": read_text, "json": read_json, "csv": read_csv}[name.rpartition(".")[2]]
    return reader(text)


def read_text(text: str) -> Read:
    headers: dict[str, str] = {}
    rows: dict[int, list[Slot]] = {}
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        if not line.strip() or line.startswith("#"):
            continue
        key, colon, value = line.partition(":")
        rank = re.fullmatch(r"rank (0|[1-9][0-9]*)", key)
        _want(bool(colon) and (rank is not None or key in ("name", "microbatches", "placement", "edges")), line)
        _want((int(rank[1]) not in rows) if rank else key not in headers, f"{key} twice")
        if rank:
            rows[int(rank[1])] = [_slot(word) for word in value.split()]
        else:
            headers[key] = value.strip()
    _want(sorted(rows) == list(range(len(rows))) and bool(rows), "ranks are missing")
    ordered = [rows[r] for r in range(len(rows))]
    if "placement" not in headers:
        return _inferred(ordered)
    flows = _text_flows(headers["placement"], len(rows))
    edges, stages = headers.get("edges", "chain"), len(flows[0])
    pairs = _chain(stages)
    if edges != "chain":
        _want(edges == "none" or re.fullmatch(rf"{NUMBER}->{NUMBER}(\s+{NUMBER}->{NUMBER})*", edges) is not None, edges)
        pairs = {(int(a), int(b)) for a, b in re.findall(r"(\d+)->(\d+)", edges)}
    return Read(ordered, flows, _whole(headers.get("microbatches", "")), pairs)


def _text_flows(text: str, num_rows: int) -> list[Flow]:
    if text.startswith('"'):
        kind, at = json.JSONDecoder().raw_decode(text)
        words = text[at:].split()
    else:
        kind, *words = text.split()
    pairs = [word.partition("=")[::2] for word in words]
    sizes = {key: _whole(value) for key, value in pairs if key != "flow"}
    flows = [[tuple(map(_whole, g.split("+"))) for g in value.split(",")] for key, value in pairs if key == "flow"]
    p, v = sizes.get("ranks", 0), sizes.get("chunks", 1)
    _want(p == num_rows, "the placement has other ranks")
    _want(p * v <= 1_000_000, "too many stages")
    down = list(range(p))
    flows_by_kind = {
        "one-to-one": [down],
        "circular": [down * v],
        "v": [down + down[::-1]],
        "wave": [[r for k in range(v) for r in (down if k % 2 == 0 else down[::-1])]],
        "bidirectional": [down, down[::-1]],
    }
    return flows or [[(r,) for r in flow] for flow in flows_by_kind[str(kind)]]


def read_json(text: str) -> Read:
    data = json.loads(text)
    rows = [[_slot(word) for word in row] for row in data["rows"]]
    if "placement" not in data:
        return _inferred(rows)
    place = data["placement"]
    flows = [[tuple(map(_exact, group)) for group in flow] for flow in place["flows"]]
    _want(_exact(place["ranks"]) == len(rows), "the placement has other ranks")
    microbatches = data.get("microbatches")
    count = _inferred_microbatches(rows) if microbatches is None else _exact(microbatches)
    return Read(rows, flows, count, {(_exact(a), _exact(b)) for a, b in place["edges"]})


def read_csv(text: str) -> Read:
    ops = {"F": "F", "I": "B", "W": "W", "B": "BW"}
    traffic = r"[0-9]{1,18}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,18}"

    def slot(cell: str) -> Slot:
        inner = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell)
        parts = [
            re.fullmatch(rf"({NUMBER})([FIWB])({NUMBER})", x.strip())
            for x in (inner[1].split(";") if inner else [cell])
        ]
        _want(all(parts) and len(parts) > (inner is not None), cell)
        return tuple((ops[m[2]], int(m[1]), int(m[3])) for m in parts if m)

    rows = []
    for cells in csv.reader(text.splitlines(keepends=True), strict=True):
        words = [cell.strip() for cell in cells]
        rows.append([slot(word) for word in words if word and not re.fullmatch(traffic, word)])
    return _inferred(rows)


def _inferred(rows: list[list[Slot]]) -> Read:
    """Stages where their actions stand, for all microbatches or for even and odd ones; a chain."""
    homes: dict[tuple[int, int], set[int]] = {}
    for rank, row in enumerate(rows):
        for _, stage, i in (action for slot in row for action in slot):
            homes.setdefault((stage, i), set()).add(rank)
    stages = {stage for stage, _ in homes}
    _want(bool(stages) and stages == set(range(len(stages))), "stages have gaps")
    for k in (1, 2):
        groups: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        for (stage, i), ranks in homes.items():
            groups.setdefault((i % k, stage), set()).add(tuple(sorted(ranks)))
        if len(groups) == k * len(stages) and all(len(stage_groups) == 1 for stage_groups in groups.values()):
            flows = [[next(iter(groups[f, s])) for s in range(len(stages))] for f in range(k)]
            return Read(rows, flows, _inferred_microbatches(rows), _chain(len(stages)))
    raise RefusedError("a stage moves between ranks")


def _inferred_microbatches(rows: list[list[Slot]]) -> int:
    return 1 + max((i for row in rows for slot in row for _, _, i in slot), default=-1)


def _chain(stages: int) -> set[tuple[int, int]]:
    return {(s, s + 1) for s in range(stages - 1)}


def _slot(word: object) -> Slot:
    _want(isinstance(word, str), str(word))
    parts = [re.fullmatch(rf"(F|B|W|BW|O|L|S)({NUMBER})\.({NUMBER})", part) for part in str(word).split("+")]
    _want(all(parts), str(word))
    return tuple((m[1], int(m[2]), int(m[3])) for m in parts if m)


def _whole(text: str) -> int:
    _want(re.fullmatch(NUMBER, text) is not None, text)
    return int(text)


def _exact(value: object) -> int:
    _want(isinstance(value, int) and not isinstance(value, bool) and value >= 0, str(value))
    return int(str(value))


def _want(good: bool, what: str) -> None:
    if not good:
        raise RefusedError(what[:80])


# Judging


def problems(s: Read) -> list[str]:
    """Describe what is wrong, in short; empty if the schedule is complete and can run."""
    return list(_shape(s)) or list(_complete(s)) or list(_order(s)) or list(_play(s))


def _shape(s: Read) -> Iterator[str]:
    p, n = len(s.rows), len(s.flows[0])
    groups = [group for flow in s.flows for group in flow]
    if s.microbatches < 1 or any(len(flow) != n for flow in s.flows):
        yield "no microbatches, or flows of other lengths"
    if {r for group in groups for r in group} != set(range(p)) or any(len(set(g)) != len(g) or not g for g in groups):
        yield "ranks without a stage, or out of range"
    if not all(0 <= a < n and 0 <= b < n for a, b in s.edges) or _has_cycle(n, s.edges):
        yield "edges out of range, or in a circle"
    for rank, row in enumerate(s.rows):
        for slot in row:
            if len(slot) > 1 and any(LANES[op] != "compute" for op, _, _ in slot):
                yield "a host copy in a braid"
            for op, stage, i in slot:
                if not (stage < n and i < s.microbatches) or rank not in s.flows[i % len(s.flows)][stage]:
                    yield f"{op}{stage}.{i} is not of rank {rank}"


def _has_cycle(n: int, edges: set[tuple[int, int]]) -> bool:
    remaining = set(range(n))
    while free := {s for s in remaining if not any(b == s and a in remaining for a, b in edges)}:
        remaining -= free
    return bool(remaining)


def _complete(s: Read) -> Iterator[str]:
    for rank, row in enumerate(s.rows):
        counts = Counter(
            (part, stage, i) for slot in row for op, stage, i in slot for part in (op if op == "BW" else [op])
        )
        once = Counter(action for slot in row for action in slot)
        actions = [
            (stage, i) for i in range(s.microbatches) for stage, g in enumerate(s.flows[i % len(s.flows)]) if rank in g
        ]
        for stage, i in actions:
            if any(counts[part, stage, i] != 1 for part in "FBW"):
                yield f"F, B, W of stage {stage}, microbatch {i} on rank {rank}"
            if counts["O", stage, i] != counts["L", stage, i] or counts["S", stage, i] > counts["O", stage, i]:
                yield f"O, L, S of stage {stage}, microbatch {i} on rank {rank}"
        if any(count > 1 for count in once.values()):
            yield f"an action twice on rank {rank}"


def _needs(s: Read, action: Action, rank: int, on: dict[Action, set[int]]) -> Iterator[tuple[Action, int]]:
    """Actions, and the rank whose copy counts, that ``action`` on ``rank`` waits for."""
    op, stage, i = action
    before = [a for a, b in s.edges if b == stage]
    after = [b for a, b in s.edges if a == stage]
    sources: list[tuple[tuple[str, ...], int]] = []
    if op == "F":
        sources = [(("F",), t) for t in before]
    elif op in ("B", "BW"):
        sources = [(("F",), stage), *((("B", "BW"), t) for t in after)]
        sources += [(("L",), stage)] if rank in on.get(("L", stage, i), ()) else []
    elif op == "W":
        sources = [(("B",), stage)]
    elif op == "L":
        sources = [(("O",), stage)] + ([(("S",), stage)] if rank in on.get(("S", stage, i), ()) else [])
    else:
        sources = [(("F",) if op == "O" else ("O",), stage)]
    for ops, t in sources:
        source = next(((o, t, i) for o in ops if on.get((o, t, i))), (ops[0], t, i))
        group = s.flows[i % len(s.flows)][t]
        yield source, rank if rank in group else group[0]


def _order(s: Read) -> Iterator[str]:
    """Check that each action of a rank follows its sources there; joint work is the same op on all ranks of a group."""
    on: dict[Action, set[int]] = {}
    place: dict[tuple[Action, int], int] = {}
    for rank, row in enumerate(s.rows):
        for k, slot in enumerate(row):
            for action in slot:
                on.setdefault(action, set()).add(rank)
                place[action, rank] = k
    for (action, rank), k in place.items():
        op, stage, i = action
        if op in SENDS and on[action] != set(s.flows[i % len(s.flows)][stage]):
            yield f"{action} is not on its whole group"
        for source, where in _needs(s, action, rank, on):
            if (source, where) not in place:
                yield f"{action} waits for {source}, which is not there"
            elif where == rank and place[source, rank] >= k:
                yield f"{action} stands before {source}"


def _play(s: Read) -> Iterator[str]:
    on: dict[Action, set[int]] = {}
    for rank, row in enumerate(s.rows):
        for slot in row:
            for action in slot:
                on.setdefault(action, set()).add(rank)
    queues: dict[tuple[int, str], list[tuple[Slot, int]]] = {}
    issued = [0] * len(s.rows)  # compute slots that have ended
    for rank, row in enumerate(s.rows):
        compute = 0
        for slot in row:
            lane = LANES[slot[0][0]]
            queues.setdefault((rank, lane), []).append((slot, compute))
            compute += lane == "compute"
    finished: set[tuple[Action, int]] = set()

    def heads(rank: int) -> Slot:
        queue = queues.get((rank, "compute"))
        return queue[0][0] if queue else ()

    def ready(rank: int, slot: Slot) -> bool:
        return all(need in finished for action in slot for need in _needs(s, action, rank, on))

    def together(rank: int, slot: Slot) -> set[int] | None:
        """Return the ranks whose heads start with this slot; None if one of them is not there yet."""
        ranks, todo = {rank}, [slot]
        while todo:
            for action in todo.pop():
                for other in on[action] if action[0] in SENDS else ():
                    if action not in heads(other):
                        return None
                    if other not in ranks:
                        ranks.add(other)
                        todo.append(heads(other))
        return ranks

    moved = True
    while moved:
        moved = False
        for (rank, lane), queue in queues.items():
            if not queue or issued[rank] < queue[0][1]:
                continue
            slot = queue[0][0]
            ranks = together(rank, slot) if lane == "compute" else {rank}
            if ranks is None or not all(ready(r, heads(r) if lane == "compute" else slot) for r in ranks):
                continue
            for r in ranks:
                finished.update((action, r) for action in queues[r, lane].pop(0)[0])
                issued[r] += lane == "compute"
            moved = True
    if any(queues.values()):
        yield "the ranks wait for each other"


# Timelines


def timeline_problems(text: str) -> list[str]:
    """Describe what is wrong with a timeline file; empty if a reader may trust it. Raises RefusedError and what ``json``
    raises."""
    data = json.loads(text)
    p = _exact(data["ranks"])
    lanes = {"compute", "tp", "d2h", "h2d", "send"}
    problems = [f"{key} is not of {p} ranks" for key in ("memory", "peak_activations") if len(data[key]) != p]
    for rank, lane, action, start, end in data["events"]:
        _slot(action)
        if not (0 <= _exact(rank) < p and lane in lanes and float(start) <= float(end)):
            problems.append(f"event {action}")
    problems += ["a curve" for m in data["memory"] if len(m["times_s"]) != len(m["bytes"])]
    return problems


# Making


def random_text(rng: random.Random) -> str:
    """Return a valid schedule in text form: a random order of everything that respects all waits, dealt out to the rows."""
    p, m = rng.randint(1, 4), rng.randint(1, 5)
    n = p * rng.randint(1, 2) + rng.randint(0, 1)
    num_flows = 2 if rng.random() < 0.25 else 1
    flows: list[Flow] = []
    for _ in range(num_flows):
        ranks = [*range(p), *(rng.randrange(p) for _ in range(n - p))]
        rng.shuffle(ranks)
        flow: Flow = [(r,) for r in ranks]
        if rng.random() < 0.25:
            flow[rng.randrange(n)] = tuple(range(p))
        flows.append(flow)
    edges = _chain(n)
    if rng.random() < 0.3:
        edges = {(a, b) for a in range(n - 1) for b in rng.sample(range(a + 1, n), min(n - a - 1, rng.randint(1, 2)))}
    rows: list[list[Slot]] = [[] for _ in range(p)]
    s = Read(rows, flows, m, edges)
    items = [item for i in range(m) for stage in range(n) for item in _items(s, stage, i, rng)]
    on: dict[Action, set[int]] = {}
    for action, ranks in items:
        on.setdefault(action, set()).update(ranks)
    finished: set[tuple[Action, int]] = set()
    last: tuple[Action, tuple[int, ...]] = (("", 0, 0), ())
    while items:
        free = [x for x in items if all(need in finished for r in x[1] for need in _needs(s, x[0], r, on))]
        action, ranks = free[rng.randrange(len(free))]
        items.remove((action, ranks))
        finished.update((action, r) for r in ranks)
        is_single = ranks == last[1] and len(ranks) == 1 and {action[0], last[0][0]} <= {*COMPUTE}
        if is_single and rng.random() < 0.2 and (last[0], ranks[0]) not in _needs(s, action, ranks[0], on):
            rows[ranks[0]].append(
                (*rows[ranks[0]].pop(), action)
            )  # dealt one after the other: neither waits for the other
            last = (("", 0, 0), ())
        else:
            for r in ranks:
                rows[r].append((action,))
            last = (action, ranks)
    return as_text(s)


def _items(s: Read, stage: int, i: int, rng: random.Random) -> Iterator[tuple[Action, tuple[int, ...]]]:
    group = s.flows[i % len(s.flows)][stage]
    full = rng.random() < 0.5
    yield ("F", stage, i), group
    yield ("BW" if full else "B", stage, i), group
    for rank in group:
        if not full:
            yield ("W", stage, i), (rank,)
        if rng.random() < 0.15:
            for op in "OLS"[: rng.randint(2, 3)]:
                yield (op, stage, i), (rank,)


def as_text(s: Read) -> str:
    """Return the text form."""
    flows = " ".join("flow=" + ",".join("+".join(map(str, g)) for g in flow) for flow in s.flows)
    edges = (
        "chain" if s.edges == _chain(len(s.flows[0])) else " ".join(f"{a}->{b}" for a, b in sorted(s.edges)) or "none"
    )
    lines = ["# jaxpipe schedule 1", "name: random", f"microbatches: {s.microbatches}"]
    lines += [f"placement: explicit ranks={len(s.rows)} {flows}", f"edges: {edges}"]
    for rank, row in enumerate(s.rows):
        lines.append(" ".join([f"rank {rank}:", *("+".join(f"{op}{t}.{i}" for op, t, i in slot) for slot in row)]))
    return "\n".join(lines) + "\n"
