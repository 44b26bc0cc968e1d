"""List scheduling in which activations may leave for host memory, and forwards wait for memory.

:func:`run_policy` plays one policy on the clock of :mod:`~jaxpipe.schedule.list_schedule.clock` and gives rows of codes with
their times. A rank takes the next B, F or W of its stages (microbatches of a stage in order) as soon as inputs, residency and
memory allow; its host lanes, which the clock takes for ranks of their own, copy residuals out (O) and back (L). Where an F
waits for the memory that an O gives back, an S goes before it: rows hold only the order (:mod:`~jaxpipe.schedule.ir`), and S is
how an order says so. The rows, simulated, run no later than the plan says.

Not modelled: in the simulator the ranks of a PCIe group get their lane in the order in which they could use it, here in the
order of their numbers; so what comes of groups must be simulated before it is believed. Source: `optpipe.txt` section 3 (what
is scheduled); the rule is our own.
"""

from __future__ import annotations

import heapq
from math import inf

from jaxpipe.schedule.list_schedule.clock import Clock
from jaxpipe.schedule.problem import BW, B, F, W
from jaxpipe.schedule.solve.offload_shop import L, O, Plan, Policy, S, Shop

ABSENT, HERE, LEAVING, AWAY, COMING, BACK = range(6)
"""Where the residuals of a (replica, microbatch) are: not made, on the device, on their way out, on the host, on their way
back, back."""


def run_policy(shop: Shop, policy: Policy, give_up: float = inf) -> Plan | None:
    """The plan that ``policy`` leads to; None if it gets stuck, or passes ``give_up`` seconds."""
    return _Play(shop, policy).run(give_up)


class _Play:
    """The state of one run. Numbers of microbatches count within their flow."""

    def __init__(self, shop: Shop, policy: Policy) -> None:
        q = self.q = shop.problem
        self.shop, self.policy = shop, policy
        n, p = q.num_replicas, q.num_ranks
        self.clock = Clock(shop.tables)
        self.ready = self.clock.ready
        self.begun_f, self.begun_b, self.ended_b, self.begun_w = [0] * n, [0] * n, [0] * n, [0] * n
        self.state = [[ABSENT] * c for c in shop.count]
        self.memory = [0] * p
        self.rows: list[list[int]] = [[] for _ in range(p)]
        self.at = [0] * p  # where in its row the running slot of a rank stands; the row's end if it is idle
        self.busy = [False] * p
        self.running: list[tuple[float, int, int, int]] = []
        self.first, self.last = [inf] * p, [0.0] * p
        self.begun = self.begun_f, self.begun_b, self.begun_w, self.begun_b
        self.given = [0] * n, [h - k for h, k in zip(shop.held, shop.kept, strict=True)], shop.kept, shop.held
        # (which, code of S, size) of O's that ended and that no slot of the row waits for
        self.unsynced: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
        self.ended_o = [0] * p
        self.after_o: dict[tuple[int, int], int] = {}  # how many O's of the rank had ended when an L began
        self.fused, self.copies = policy.weights == "fused", policy.leave != "none"
        self.left = sum(shop.count) * (2 if self.fused else 3)
        self.lane_last = [L] * p
        self.out, self.most_out = [0] * p, shop.task.offloads_in_flight

    def run(self, give_up: float) -> Plan | None:
        self.clock.run(self.choose, until=give_up)
        if self.left:
            return None
        first = min(self.first)
        spans = (b - a for a, b in zip(self.first, self.last, strict=True))
        return Plan(tuple(self.rows), max(self.last) - first, max(spans))

    def choose(self, rank: int, now: float) -> int:
        """What a rank or a host lane starts; lanes have the numbers from p on."""
        running = self.running
        while running and running[0][0] <= now:
            self._ended(*heapq.heappop(running))
        p = self.q.num_ranks
        if rank >= p:
            return self._copy(rank - p, now) if self.copies else -1
        if not self.copies:
            return self._compute(rank, now)
        if not self.shop.shared:
            self._fill_lanes(rank, now)  # only now can an S go before an L
        code = self._compute(rank, now)
        self._fill_lanes(rank, now)
        return code

    def _fill_lanes(self, rank: int, now: float) -> None:
        p, clock = self.q.num_ranks, self.clock
        for lane in self.shop.lanes[rank]:
            if clock.free[p + lane] <= now and (code := self._copy(lane, now)) >= 0:
                clock.start(p + lane, code, now)

    # What ends.

    def _ended(self, end: float, kind: int, k: int, i: int) -> None:
        shop, rank = self.shop, self.q.rank[k]
        self.last[rank] = max(self.last[rank], end)
        if kind == O:
            self.state[k][i] = AWAY
            self.memory[rank] -= shop.leaves[k]
            self.ended_o[rank] += 1
            self.unsynced[rank].append((self.ended_o[rank], self._code(S, k, i), shop.leaves[k]))
        elif kind == L:
            self.state[k][i] = BACK
            self.out[rank] -= 1
        else:
            self.busy[rank] = False
            self.at[rank] = len(self.rows[rank])
            self.left -= 1
            self.ended_b[k] += kind == B
            self.memory[rank] -= self.given[kind][k]

    # Compute.

    def _compute(self, r: int, now: float) -> int:
        """The code of what the policy takes next on idle rank ``r``, if anything can start."""
        mine, policy = self.shop.mine[r], self.policy
        back = next((k for k in reversed(mine) if self._can_b(k, now)), -1)
        if back >= 0 and not policy.forward_first and (policy.weights != "eager" or not self._waiting_w(mine)):
            return self._start(r, BW if self.fused else B, back, now)
        if policy.weights == "eager" and (k := self._waiting_w(mine) - 1) >= 0:
            return self._start(r, W, k, now)
        ahead = next((k for k in reversed(mine) if self._can_f(r, k, now)), -1)
        if ahead >= 0:
            return self._start(r, F, ahead, now)
        if back >= 0:
            return self._start(r, BW if self.fused else B, back, now)
        if not self.fused and (k := self._waiting_w(mine) - 1) >= 0 and not self._better_wait(r, k, now):
            return self._start(r, W, k, now)
        return -1

    def _waiting_w(self, mine: tuple[int, ...]) -> int:
        """One more than the first replica with a W that can run; 0 if there is none."""
        for k in mine:
            if self.begun_w[k] < self.ended_b[k]:
                return k + 1
        return 0

    def _arrives(self, op: int, k: int, i: int) -> float:
        """When the input of an F or B arrives, known as soon as its producer starts."""
        shop = self.shop
        return self.ready[op * shop.step + shop.base[k] + i * shop.flows]

    def _can_b(self, k: int, now: float) -> bool:
        i = self.begun_b[k]
        return i < self.begun_f[k] and self._arrives(B, k, i) <= now and self.state[k][i] in (HERE, BACK)

    def _can_f(self, r: int, k: int, now: float) -> bool:
        i = self.begun_f[k]
        if i >= self.shop.count[k] or i - self.begun_b[k] >= self.policy.caps[k] or self._arrives(F, k, i) > now:
            return False
        return self.memory[r] + self.shop.held[k] + self._reserve(r) <= self.shop.room[r]

    def _reserve(self, r: int) -> int:
        """Room that the next microbatch to turn back needs, if it is away."""
        if not self.copies or self.policy.bold:
            return 0
        most = 0
        for k in self.shop.mine[r]:
            i = self.begun_b[k]
            if i < self.begun_f[k] and LEAVING <= self.state[k][i] <= AWAY and self.shop.leaves[k] > most:
                most = self.shop.leaves[k]
        return most

    def _better_wait(self, r: int, k: int, now: float) -> bool:
        """Whether W of replica k would hold up something that arrives before it ends (policies ``gap`` and ``half``)."""
        if self.policy.weights not in ("gap", "half"):
            return False
        end = now + self.q.w_s[k] * (1.0 if self.policy.weights == "gap" else 0.5)
        for j in self.shop.mine[r]:
            i, count = self.begun_b[j], self.shop.count[j]
            if i < count and now < self._arrives(B, j, i) < end and self.state[j][i] in (HERE, BACK):
                return True
            i = self.begun_f[j]
            if (
                i < count
                and now < self._arrives(F, j, i) < end
                and i - self.begun_b[j] < self.policy.caps[j]
                and self.memory[r] + self.shop.held[j] <= self.shop.room[r]
            ):
                return True
        return False

    def _start(self, r: int, op: int, k: int, now: float) -> int:
        i = self.begun[op][k]
        self.begun[op][k] += 1
        if op == F:
            self._sync(r, self.shop.held[k])
            self.memory[r] += self.shop.held[k]
            self.state[k][i] = HERE
        elif op != W and (k, i) in self.after_o:  # it waits for its L, which waited for what went before on its lane
            before = self.after_o[k, i]
            self.unsynced[r] = [x for x in self.unsynced[r] if x[0] > before]
        self.first[r] = min(self.first[r], now)
        self.at[r] = len(self.rows[r])
        self.busy[r] = True
        return self._run(r, op, k, i, now)

    def _run(self, r: int, op: int, k: int, i: int, now: float) -> int:
        """Put an action into the row of ``r``; its code."""
        code = self._code(op, k, i)
        self.rows[r].insert(self.at[r], code)
        seconds = self.shop.tables.seconds[op * self.q.num_replicas + k]
        heapq.heappush(self.running, (now + seconds, op, k, i))
        return code

    def _owed(self, r: int, size: int) -> bool:
        """Whether ``size`` more needs what O's gave back that no slot waited for."""
        return sum(s for _, _, s in self.unsynced[r]) > self.shop.room[r] - self.memory[r] - size

    def _sync(self, r: int, size: int) -> None:
        """Put an S before an F that needs the memory of O's that no earlier slot of the row waits for."""
        unsynced = self.unsynced[r]
        spare = self.shop.room[r] - self.memory[r] - size
        owed, code = sum(size for _, _, size in unsynced), -1
        while unsynced and owed > spare:
            _, code, size = unsynced.pop(0)
            owed -= size
        if code >= 0:
            self.rows[r].append(code)

    # Copies.

    def _copy(self, lane: int, now: float) -> int:
        """The code of what idle host lane ``lane`` does next for one of its ranks; -1 for nothing."""
        shared = self.shop.shared
        for r in self.shop.riders[lane // 2]:
            out_first = not shared and lane % 2 == 0
            if shared:
                rule = self.policy.lane
                out_first = rule == "out" or (rule == "alternate" and self.lane_last[r] == L)
                out_first = out_first and not self._stalled(r, now)
            code = self._copy_out(r, now) if out_first else -1
            if code < 0 and (shared or lane % 2):
                code = self._copy_back(r, now)
            if code < 0 and shared:
                code = self._copy_out(r, now)
            if code >= 0:
                return code
        return -1

    def _stalled(self, r: int, now: float) -> bool:
        """Whether a cotangent has arrived whose residuals are away."""
        for k in self.shop.mine[r]:
            i = self.begun_b[k]
            if i < self.begun_f[k] and self.state[k][i] == AWAY and self._arrives(B, k, i) <= now:
                return True
        return False

    def _copy_back(self, r: int, now: float) -> int:
        shop = self.shop
        best, chosen = shop.task.num_microbatches, -1
        for k in shop.mine[r]:
            state = self.state[k]
            low = self.begun_b[k]
            for i in range(low, min(low + self.policy.prefetch, self.begun_f[k])):
                if state[i] == AWAY:
                    if i < best:
                        best, chosen = i, k
                    break
        if chosen < 0 or self.memory[r] + shop.leaves[chosen] > shop.room[r]:
            return -1
        if not shop.shared and self._owed(r, shop.leaves[chosen]):
            if self.busy[r]:
                return -1
            self._sync(r, shop.leaves[chosen])
            self.at[r] = len(self.rows[r])
        if shop.shared:
            self.after_o[chosen, best] = self.ended_o[r]
        self.memory[r] += shop.leaves[chosen]
        mine = self._code(S, chosen, best)  # it takes what its own O gave, so no slot need wait for that O any more
        self.unsynced[r] = [x for x in self.unsynced[r] if x[1] != mine]
        return self._send_copy(r, L, chosen, best, COMING, now)

    def _copy_out(self, r: int, now: float) -> int:
        shop, policy = self.shop, self.policy
        longest, chosen, number = -1, -1, -1
        if self.out[r] == self.most_out:
            return -1
        for k in shop.mine[r]:
            if policy.leave == "need" and self.memory[r] + 2 * shop.held[k] <= shop.room[r]:
                continue
            state, away = self.state[k], policy.away
            low = self.begun_b[k] + policy.keep
            for i in range(self.begun_f[k] - 1, low - 1, -1):
                if state[i] == HERE and (away is None or away[k][i]) and self._f_ended(r, k, i):
                    if i - low > longest:
                        longest, chosen, number = i - low, k, i
                    break
        return self._send_copy(r, O, chosen, number, LEAVING, now) if chosen >= 0 else -1

    def _f_ended(self, r: int, k: int, i: int) -> bool:
        return not self.busy[r] or self.rows[r][self.at[r]] != self._code(F, k, i)

    def _send_copy(self, r: int, op: int, k: int, i: int, state: int, now: float) -> int:
        self.state[k][i] = state
        self.lane_last[r] = op
        self.out[r] += op == O
        code = self._run(r, op, k, i, now)
        self.at[r] += 1
        return code

    def _code(self, op: int, k: int, i: int) -> int:
        shop = self.shop
        return op * shop.step + shop.base[k] + i * shop.flows
