"""When a decode engine takes blocks for a request whose KV comes from outside, and registers them. Pure.

Early gives the most overlap and holds blocks, idle, for as long as the prefill takes; late is the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Without a word about a prefill for so long, word of it may have been lost: the decode engine registers all the same.
SILENCE_S = 10.0
# ``auto`` registers early while more than this share of the blocks would stay free.
ROOM = 0.5


class Registration(StrEnum):
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


def take_blocks_now(
    when: Registration, progress: Progress | None, *, waits_since: float, now: float, room: float
) -> bool:
    """Whether to let vLLM allocate blocks for a request now.

    Args:
        progress: None if nothing was heard of its prefill.
        waits_since: when the request was first asked for.
        room: share of the KV blocks that would stay free.
    """
    if when is Registration.AUTO:
        when = Registration.EAGER if room > ROOM else Registration.JIT
    if when is Registration.EAGER or now - max(waits_since, progress.at if progress else waits_since) > SILENCE_S:
        return True
    if progress is None:
        return False
    return progress.done or (progress.nearly_done and when is Registration.JIT)
