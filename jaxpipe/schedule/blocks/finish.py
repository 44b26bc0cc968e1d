"""From the rows of a repeated block to a good order: recipes of the reordering, tried in turn and repeated on the best.

Which rule fills bubbles best depends on costs, transfers and memory, and no rule wins everywhere, so a :class:`Finisher` tries
several *recipes* and re-times each result with the real costs. A recipe is a rule and the costs it looks at: the real ones,
the real ones with free transfers (looking too closely at short transfers, a greedy rule breaks the rhythm of the steady
phase), or a grid of cells as in the paper. The order of recipes was found by greedy selection over random problems (blocks of
V-Min, V-Half, 1F1B-V and the adaptive search, p up to 12, costs even, from Table 5 of `controllable-memory.txt` and random,
transfers 0 to 0.3 F): each is the one that improves most on those before it; the 20 come within 0.05% of all 600 tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Literal

from jaxpipe.schedule.blocks.reorder import AS_GIVEN, Phases, Reorderer, Rule
from jaxpipe.schedule.problem import CodeRows, Problem
from jaxpipe.schedule.retime import Draft, nine_digits

_ROUNDING = 1e-9
_STARTS, _FEWEST = 2, 10
View = Literal["real", "free transfers", "cells"]


def _ends(warm_up: Rule, cool_down: Rule) -> Phases:
    return Phases(warm_up, AS_GIVEN, cool_down)


RECIPES: tuple[tuple[View, Rule | Phases], ...] = (
    ("real", Rule(pull_gap=0.5, w_gap=0.5, reserve=True)),
    ("real", _ends(Rule(pull_gap=1.0, w_gap=0.5, lazy=False, reserve=True), Rule(pull_gap=1.0, w_gap=0.5))),
    ("free transfers", Rule(w_gap=0.5, reserve=True)),
    ("free transfers", Rule(w_gap=0.0, reserve=True)),
    ("real", Rule(pull_gap=0.5, reserve=True)),
    ("cells", _ends(Rule(backward=False, w_gap=0.5, lazy=False, reserve=True), Rule(w_gap=0.0))),
    ("free transfers", Rule(pull_gap=0.5, w_gap=0.5)),
    ("real", Rule(pull_gap=1.0, w_gap=0.0, reserve=True)),
    ("real", _ends(Rule(pull_gap=1.0, w_gap=0.5, reserve=True), Rule())),
    ("free transfers", Rule(pull_gap=0.5, reserve=True)),
    ("real", Rule(w_gap=0.5)),
    ("real", Rule(pull_gap=1.0, reserve=True)),
    ("real", Rule(w_gap=0.5, lazy=False, reserve=True)),
    ("free transfers", _ends(Rule(w_gap=0.5, reserve=True), Rule(w_gap=0.5))),
    ("real", _ends(Rule(backward=False, pull_gap=1.0, reserve=True), Rule(pull_gap=1.0, w_gap=0.5))),
    ("free transfers", _ends(Rule(w_gap=0.5, lazy=False, reserve=True), Rule())),
    ("free transfers", _ends(Rule(w_gap=0.5, lazy=False), Rule(pull_gap=0.5, w_gap=0.5))),
    ("cells", Rule(w_gap=0.0)),
    ("free transfers", _ends(Rule(pull_gap=1.0, w_gap=0.5, reserve=True), Rule(w_gap=0.5))),
    ("real", _ends(Rule(pull_gap=1.0, reserve=True), Rule(w_gap=0.0))),
)


class Finisher:
    """Recipes for one problem; its tables are made once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.real = Reorderer(problem)

    @cached_property
    def _views(self) -> dict[View, Reorderer]:
        nothing, one = (0.0,) * self.problem.num_replicas, (1.0,) * self.problem.num_replicas
        free = replace(self.problem, down_s=nothing, up_s=nothing)
        cells = replace(free, f_s=one, b_s=one, w_s=one, bw_s=tuple(2.0 for _ in one))
        same = free == self.problem
        return {"real": self.real, "free transfers": self.real if same else Reorderer(free), "cells": Reorderer(cells)}

    def squeezed(self, rows: CodeRows) -> Draft | None:
        """``rows`` as they are, re-timed."""
        return self.real.retimer.draft(rows)

    def best(self, rows: CodeRows, limit: float, tries: int) -> Draft | None:
        """The best of ``rows`` squeezed, ``tries`` recipes on them, and on the best of what these gave; None if none is within
        ``limit`` (units of a rank's share). Best: by :func:`merit`."""
        found = [d for d in (self.squeezed(rows),) if d is not None and _within(d, limit)]
        found += self.drafts(rows, limit, tries)
        left = tries - len(RECIPES)
        for draft in sorted(found, key=merit)[:_STARTS]:
            if left > 0:
                found += self.drafts(draft.rows, limit, left)
                left -= len(RECIPES)
        return min(found, key=merit, default=None)

    def drafts(self, rows: CodeRows, limit: float, tries: int) -> Iterator[Draft]:
        """``rows`` by the first ``tries`` recipes, those that keep within ``limit`` (units of a rank's share)."""
        for view, rule in islice(self._recipes(), max(0, tries)):
            draft = self.real.retimer.draft(self._views[view].rows(rows, limit, rule))
            if draft is not None and _within(draft, limit):
                yield draft

    def _recipes(self) -> Iterator[tuple[View, Rule | Phases]]:
        """Each recipe once: without transfer times two views are one."""
        seen: set[tuple[int, Rule | Phases]] = set()
        for view, rule in RECIPES:
            key = id(self._views[view]), rule
            if key not in seen:
                seen.add(key)
                yield view, rule


def merit(draft: Draft) -> tuple[float, float]:
    """Smaller is better: makespan plus longest span, then peak. Both count: the span where no rank waits for the others' last
    passes before it steps, the makespan otherwise."""
    return nine_digits(draft.makespan + draft.span), draft.peak


def affordable(problem: Problem, actions: int) -> int:
    """How many recipes may be tried if ``actions`` actions may be ordered in all; at least a few."""
    return max(_FEWEST, actions // max(1, 3 * problem.num_replicas * problem.num_microbatches))


def _within(draft: Draft, limit: float) -> bool:
    return draft.peak <= limit * (1 + _ROUNDING)
