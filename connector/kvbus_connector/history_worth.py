"""Whether a conversation's history is worth what it costs, by this engine's own last steps and transfers. Pure.

Times are seconds on a monotonic clock.
"""

from __future__ import annotations

import statistics
from collections import deque

MIN_STEP_TOKENS = 64
RECENT = 8
TRY_AGAIN = 16


class PrefillSpeed:
    """How many tokens a second this engine computes, by its last large steps; 0 while it is not known.

    With asynchronous scheduling a step is planned while the one before runs, and what is reported then is of the
    earlier one. So some rates are wrong: the median is not.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[int, float]] = deque(maxlen=2)
        self._rates: deque[float] = deque(maxlen=RECENT)
        self.tokens_per_s = 0.0

    def begin_step(self, tokens: int, now: float) -> None:
        """A step is planned that computes so many tokens; a small one tells nothing."""
        if tokens >= MIN_STEP_TOKENS:
            self._begun.append((tokens, now))

    def end_step(self, now: float) -> None:
        """What a step has done is reported."""
        if not self._begun:
            return
        tokens, began_at = self._begun.popleft()
        if now > began_at:
            self._rates.append(tokens / (now - began_at))
            self.tokens_per_s = statistics.median(self._rates)

    def takes_s(self, tokens: int, at_least: float, at_most: float) -> float:
        """How long ``tokens`` take to compute, seconds, within these bounds; ``at_most`` while that is not known."""
        takes_s = tokens / self.tokens_per_s if self.tokens_per_s else at_most
        return min(max(takes_s, at_least), at_most)


class Worth:
    """What the last histories have brought and cost, and so whether another one pays.

    Of those that do not seem to, every :data:`TRY_AGAIN`-th is tried all the same: the load may have changed.
    """

    def __init__(self, speed: PrefillSpeed) -> None:
        self._speed = speed
        self._shares: deque[float] = deque(maxlen=RECENT)
        self._took_s: deque[float] = deque(maxlen=RECENT)
        self._received_s: deque[float] = deque(maxlen=RECENT)
        self._skipped = 0

    def asking(self, lacking: int) -> bool:
        """Whether to ask, where this engine lacks so many tokens of a prompt."""
        if not self._shares:
            return True
        return self._pays(statistics.fmean(self._shares) * lacking, statistics.median(self._took_s))

    def taking(self, tokens: int) -> bool:
        """Whether to take so many tokens that are offered."""
        return self._pays(tokens, statistics.median(self._received_s) if self._received_s else 0.0)

    def learn(self, lacking: int, came: int, took_s: float, received_s: float = 0.0) -> None:
        """What became of one that was asked for.

        Args:
            lacking, came: tokens that this engine lacked, and those of them that came.
            took_s: from asking to the end.
            received_s: of it, from the registration on; 0 if there was none.
        """
        self._shares.append(came / lacking if lacking else 0.0)
        self._took_s.append(took_s)
        if received_s:
            self._received_s.append(received_s)

    def _pays(self, tokens: float, cost_s: float) -> bool:
        rate = self._speed.tokens_per_s
        if not rate or tokens / rate >= cost_s:
            return True
        self._skipped += 1
        return self._skipped % TRY_AGAIN == 0
