"""When a decode engine takes blocks for a request whose KV comes from outside, and registers them. Pure.

Early gives the most overlap and holds blocks, idle, for as long as the prefill takes; late is the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvbus.bounded import BoundedDict
from kvbus.wire import PrefillCompleted, PrefillFailed, PrefillProgress

MAX_PREFILLS = 1 << 14
# After so long without news of a prefill, news may have been lost: the decode engine registers all the same.
SILENCE_S = 10.0
# ``auto`` registers early while more than this share of the blocks would stay free.
ROOM = 0.5


class RegistrationTiming(StrEnum):
    """``eager``: when vLLM schedules the request. ``jit``: when its last tokens are being computed. ``after_prefill``:
    when all are. ``auto``: eager while there is room, else jit."""

    EAGER = "eager"
    JIT = "jit"
    AFTER_PREFILL = "after_prefill"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Progress:
    """What was last heard of a prefill, and when."""

    at: float
    nearly_done: bool = False
    done: bool = False


class Prefills:
    """What was last heard of each transfer's prefill. Bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self._heard: BoundedDict[str, tuple[str, Progress]] = BoundedDict(MAX_PREFILLS)

    def hear(self, message: PrefillProgress | PrefillCompleted | PrefillFailed, now: float) -> None:
        done = not isinstance(message, PrefillProgress)
        nearly = isinstance(message, PrefillProgress) and message.computed >= message.total
        self._heard[message.transfer_id] = (message.source_engine, Progress(now, done or nearly, done))

    def of(self, transfer_id: str, engine: str) -> Progress | None:
        """What ``engine``, or any if it is empty, said of it."""
        source, progress = self._heard.get(transfer_id, ("", None))
        return progress if engine in ("", source) else None


def take_blocks_now(
    timing: RegistrationTiming, progress: Progress | None, *, waits_since: float, now: float, room: float
) -> bool:
    """Whether to let vLLM allocate blocks for a request now.

    Args:
        progress: None if nothing was heard of its prefill.
        waits_since: when the request was first asked for.
        room: share of the KV blocks that would stay free.
    """
    if timing is RegistrationTiming.AUTO:
        timing = RegistrationTiming.EAGER if room > ROOM else RegistrationTiming.JIT
    last_news_at = max(waits_since, progress.at) if progress is not None else waits_since
    if timing is RegistrationTiming.EAGER or now - last_news_at > SILENCE_S:
        return True
    if progress is None:
        return False
    return progress.done or (progress.nearly_done and timing is RegistrationTiming.JIT)
