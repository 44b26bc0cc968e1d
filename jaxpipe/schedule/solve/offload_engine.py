"""Event-driven list scheduling in which activations may leave for host memory, and forwards wait for memory.

:func:`run_policy` plays one policy and gives rows of codes with their times. A rank takes the next B, F or W of its stages
(microbatches of a stage in order) as soon as inputs, residency and memory allow; its host lane copies residuals out (O) and
back (L). Where an F waits for the memory that an O gives back, an S goes before it: rows hold only the order
(:mod:`~jaxpipe.schedule.ir`), and S is how an order says so. The rows, simulated, run no later than the plan says.

Not modelled: in the simulator the ranks of a PCIe group get their lane in the order in which they could use it, here in the
order in which they ask; so what comes of groups must be simulated before it is believed. Source: `optpipe.txt` section 3 (what
is scheduled); the rule is our own.
"""

from __future__ import annotations

import heapq
from math import inf

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
        self.now = 0.0
        self.begun_f, self.begun_b, self.ended_b, self.begun_w = [0] * n, [0] * n, [0] * n, [0] * n
        self.arrived_f, self.arrived_b = [[inf] * c for c in shop.count], [[inf] * c for c in shop.count]
        # when it will arrive, known as soon as its producer starts
        self.soon_f, self.soon_b = [[inf] * c for c in shop.count], [[inf] * c for c in shop.count]
        self.state = [[ABSENT] * c for c in shop.count]
        stages = shop.stages
        for k in range(0, n, stages):
            self.arrived_f[k] = [0.0] * shop.count[k]
        self.link_free: dict[tuple[int, int], float] = {}
        self.memory = [0] * p
        self.busy = [False] * p
        self.lane_busy = [False] * (2 * p)
        self.rows: list[list[int]] = [[] for _ in range(p)]
        self.at = [0] * p  # where in its row the running slot of a rank stands; the row's end if it is idle
        self.first, self.last = [inf] * p, [0.0] * p
        # (which, code of S, size) of O's that ended and that no slot of the row waits for
        self.unsynced: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
        self.ended_o = [0] * p
        self.after_o: dict[tuple[int, int], int] = {}  # how many O's of the rank had ended when an L began
        self.events: list[tuple[float, int, int, int]] = []
        self.left = sum(shop.count) * (2 if policy.weights == "fused" else 3)
        self.fused, self.copies = policy.weights == "fused", policy.leave != "none"
        self.lane_last = [L] * p

    def run(self, give_up: float) -> Plan | None:
        events, dirty = self.events, set(range(self.q.num_ranks))
        while True:
            for r in sorted(dirty) if len(dirty) > 1 else dirty:
                if not self.busy[r]:
                    if self.copies and not self.shop.shared:
                        self._copy(r)  # only now can an S go before an L
                    self._compute(r)
                if self.copies and self._copy(r) and not self.busy[r]:
                    self._compute(r)
            if not events:
                break
            now = self.now = events[0][0]
            if now > give_up:
                return None
            dirty = set()
            while events and events[0][0] == now:
                _, kind, k, i = heapq.heappop(events)
                self._ended(kind, k, i, dirty)
        if self.left:
            return None
        first = min(self.first)
        spans = (b - a for a, b in zip(self.first, self.last, strict=True))
        return Plan(tuple(self.rows), max(self.last) - first, max(spans))

    # What ends.

    def _ended(self, kind: int, k: int, i: int, dirty: set[int]) -> None:
        shop, rank = self.shop, self.q.rank[k]
        dirty.add(rank)
        if kind == -1:
            return
        if kind in (O, L):
            lane = 2 * shop.lane[rank] + (0 if shop.shared or kind == O else 1)
            self.lane_busy[lane] = False
            dirty.update(shop.riders[shop.lane[rank]])
            if kind == O:
                self.state[k][i] = AWAY
                self.memory[rank] -= shop.leaves[k]
                self.ended_o[rank] += 1
                self.unsynced[rank].append((self.ended_o[rank], self._code(S, k, i), shop.leaves[k]))
            else:
                self.state[k][i] = BACK
            self.last[rank] = max(self.last[rank], self.now)
            return
        self.busy[rank] = False
        self.at[rank] = len(self.rows[rank])
        self.last[rank] = self.now
        self.left -= 1
        if kind == F:
            self._sent(k, i, k + 1, self.q.down_s[k], dirty)
        elif kind == B:
            self.memory[rank] -= shop.held[k] - shop.kept[k]
            self.ended_b[k] += 1
            self._sent(k, i, k - 1, self.q.up_s[k], dirty)
        elif kind == W:
            self.memory[rank] -= shop.kept[k]
        else:
            self.memory[rank] -= shop.held[k]
            self._sent(k, i, k - 1, self.q.up_s[k], dirty)

    def _sent(self, k: int, i: int, to: int, seconds: float, dirty: set[int]) -> None:
        """The result of replica k's F (``to`` above k) or B reaches the next stage, or turns round on the last."""
        stages = self.shop.stages
        if to > k:
            arrived = self.arrived_f
            if to % stages == 0:
                to, arrived = k, self.arrived_b
        else:
            if k % stages == 0:
                return
            arrived = self.arrived_b
        now, here, there = self.now, self.q.rank[k], self.q.rank[to]
        if here != there:
            pair = (here, there)
            now = max(now, self.link_free.get(pair, 0.0)) + seconds
            self.link_free[pair] = now
        arrived[to][i] = now
        if now > self.now:
            heapq.heappush(self.events, (now, -1, to, i))
        else:
            dirty.add(there)

    # Compute.

    def _compute(self, r: int) -> None:
        """Start what the policy takes next on idle rank ``r``, if anything can start."""
        mine, policy = self.shop.mine[r], self.policy
        back = next((k for k in reversed(mine) if self._can_b(k)), -1)
        if back >= 0 and not policy.forward_first and (policy.weights != "eager" or not self._waiting_w(mine)):
            self._start(r, BW if self.fused else B, back)
            return
        if policy.weights == "eager" and (k := self._waiting_w(mine) - 1) >= 0:
            self._start(r, W, k)
            return
        ahead = next((k for k in reversed(mine) if self._can_f(r, k)), -1)
        if ahead >= 0:
            self._start(r, F, ahead)
        elif back >= 0:
            self._start(r, BW if self.fused else B, back)
        elif not self.fused and (k := self._waiting_w(mine) - 1) >= 0 and not self._better_wait(r, k):
            self._start(r, W, k)

    def _waiting_w(self, mine: tuple[int, ...]) -> int:
        """One more than the first replica with a W that can run; 0 if there is none."""
        for k in mine:
            if self.begun_w[k] < self.ended_b[k]:
                return k + 1
        return 0

    def _can_b(self, k: int) -> bool:
        i = self.begun_b[k]
        if i >= self.shop.count[k] or self.arrived_b[k][i] > self.now:
            return False
        state = self.state[k][i]
        return state in (HERE, BACK)

    def _can_f(self, r: int, k: int) -> bool:
        i = self.begun_f[k]
        if i >= self.shop.count[k] or self.arrived_f[k][i] > self.now or i - self.begun_b[k] >= self.policy.caps[k]:
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

    def _better_wait(self, r: int, k: int) -> bool:
        """Whether W of replica k would hold up something that arrives before it ends (policies ``gap`` and ``half``)."""
        if self.policy.weights != "gap" and self.policy.weights != "half":
            return False
        end = self.now + self.q.w_s[k] * (1.0 if self.policy.weights == "gap" else 0.5)
        for j in self.shop.mine[r]:
            i = self.begun_b[j]
            if i < self.shop.count[j] and self.now < self.soon_b[j][i] < end and self.state[j][i] in (HERE, BACK):
                return True
            i = self.begun_f[j]
            if (
                i < self.shop.count[j]
                and self.now < self.soon_f[j][i] < end
                and i - self.begun_b[j] < self.policy.caps[j]
                and self.memory[r] + self.shop.held[j] <= self.shop.room[r]
            ):
                return True
        return False

    def _start(self, r: int, op: int, k: int) -> None:
        q, row = self.q, self.rows[r]
        if op == F:
            i = self.begun_f[k]
            self.begun_f[k] += 1
            self._sync(r, self.shop.held[k])
            self.memory[r] += self.shop.held[k]
            self.state[k][i] = HERE
            seconds = q.f_s[k]
        elif op == W:
            i = self.begun_w[k]
            self.begun_w[k] += 1
            seconds = q.w_s[k]
        else:
            i = self.begun_b[k]
            self.begun_b[k] += 1
            seconds = q.b_s[k] if op == B else q.bw_s[k]
            if (k, i) in self.after_o:  # it waits for its L, which waited for what went before on its lane
                before = self.after_o[k, i]
                self.unsynced[r] = [x for x in self.unsynced[r] if x[0] > before]
        if self.first[r] == inf:
            self.first[r] = self.now
        self.at[r] = len(row)
        row.append(self._code(op, k, i))
        self.busy[r] = True
        if op != W:
            self._announce(op, k, i, self.now + seconds)
        heapq.heappush(self.events, (self.now + seconds, op, k, i))

    def _owed(self, r: int, size: int) -> bool:
        """Whether ``size`` more needs what O's gave back that no slot waited for."""
        return sum(s for _, _, s in self.unsynced[r]) > self.shop.room[r] - self.memory[r] - size

    def _announce(self, op: int, k: int, i: int, end: float) -> None:
        stages = self.shop.stages
        if op == F and (k + 1) % stages:
            self.soon_f[k + 1][i] = end + self.q.down_s[k]
        elif op == F:
            self.soon_b[k][i] = end
        elif k % stages:
            self.soon_b[k - 1][i] = end + self.q.up_s[k]

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

    def _copy(self, r: int) -> bool:
        """Give rank ``r``'s idle lanes something to do. Whether any was found."""
        lane = 2 * self.shop.lane[r]
        if self.shop.shared:
            if self.lane_busy[lane]:
                return False
            rule = self.policy.lane
            first = rule == "out" or (rule == "alternate" and self.lane_last[r] == L)
            first = first and not self._stalled(r)
            return (first and self._copy_out(r, lane)) or self._copy_back(r, lane) or self._copy_out(r, lane)
        found = not self.lane_busy[lane] and self._copy_out(r, lane)
        return (not self.lane_busy[lane + 1] and self._copy_back(r, lane + 1)) or found

    def _stalled(self, r: int) -> bool:
        """Whether a cotangent has arrived whose residuals are away."""
        for k in self.shop.mine[r]:
            i = self.begun_b[k]
            if i < self.begun_f[k] and self.state[k][i] == AWAY and self.arrived_b[k][i] <= self.now:
                return True
        return False

    def _copy_back(self, r: int, lane: int) -> bool:
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
            return False
        if not shop.shared and self._owed(r, shop.leaves[chosen]):
            if self.busy[r]:
                return False
            self._sync(r, shop.leaves[chosen])
            self.at[r] = len(self.rows[r])
        if shop.shared:
            self.after_o[chosen, best] = self.ended_o[r]
        self.memory[r] += shop.leaves[chosen]
        mine = self._code(S, chosen, best)  # it takes what its own O gave, so no slot need wait for that O any more
        self.unsynced[r] = [x for x in self.unsynced[r] if x[1] != mine]
        self._send_copy(r, L, chosen, best, lane, COMING, shop.back_s[chosen])
        return True

    def _copy_out(self, r: int, lane: int) -> bool:
        shop, policy = self.shop, self.policy
        longest, chosen, number = -1, -1, -1
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
        if chosen < 0:
            return False
        self._send_copy(r, O, chosen, number, lane, LEAVING, shop.out_s[chosen])
        return True

    def _f_ended(self, r: int, k: int, i: int) -> bool:
        return not (self.busy[r] and self.rows[r][self.at[r]] == self._code(F, k, i))

    def _send_copy(self, r: int, op: int, k: int, i: int, lane: int, state: int, seconds: float) -> None:
        self.state[k][i] = state
        self.lane_busy[lane] = True
        self.lane_last[r] = op
        self.rows[r].insert(self.at[r], self._code(op, k, i))
        self.at[r] += 1
        heapq.heappush(self.events, (self.now + seconds, op, k, i))

    def _code(self, op: int, k: int, i: int) -> int:
        shop = self.shop
        return op * shop.step + shop.base[k] + i * shop.flows
