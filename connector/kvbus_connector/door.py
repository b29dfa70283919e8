"""The last door before vLLM: only what vLLM itself has named passes.

vLLM's scheduler asserts that it knows each id that a connector reports, and takes its whole engine down for one that it
does not. So both halves hold each id against what vLLM said: the worker's ranks against the step plan, which came
through vLLM; the scheduler half against its own tables, right before vLLM looks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvbus.bounded import BoundedDict
from kvbus.engine import RankReport
from kvbus.metrics import Counters, OncePer

from .step import StepPlan

logger = logging.getLogger(__name__)

MAX_EARLY = 1 << 12


class Door:
    """In the scheduler's process; see the module's docstring."""

    def __init__(self, counters: Counters) -> None:
        self._counters, self._once = counters, OncePer()

    def keep(self, ids: set[str], known: Callable[[str], bool], hook: str) -> None:
        """Take out of ``ids`` what is not ``known``."""
        for each in [each for each in ids if not known(each)]:
            ids.discard(each)
            self._counters.add(f"rejected: {hook} of nobody")
            if self._once.due(hook):
                logger.error("kvbus: kept request %.200s from vLLM's %s: vLLM does not wait for it", each, hook)


class RankDoor:
    """In a worker: what one rank may report. A release that is faster than its step plan waits for the plan."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._owed: set[str] = set()
        self._expected: set[str] = set()
        self._early: BoundedDict[str, None] = BoundedDict(MAX_EARLY)

    def hear(self, plan: StepPlan) -> None:
        """vLLM's scheduler half has named these."""
        self._owed.update(word.request_id for word in plan.completions)
        self._expected.update(plan.expect)

    def let_out(self, report: RankReport) -> RankReport:
        """What of ``report`` vLLM may be told now; each id once."""
        for request_id in report.released:
            self._early[request_id] = None
        released = tuple(each for each in self._early if each in self._owed)
        arrived = tuple(each for each in report.arrived if each.request_id in self._expected)
        if unknown := len(report.arrived) - len(arrived):
            self._counters.add("rejected: receive of nobody", unknown)
        for request_id in released:
            del self._early[request_id]
        self._owed.difference_update(released)
        self._expected.difference_update(each.request_id for each in arrived)
        return RankReport(released, arrived)
