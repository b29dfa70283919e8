"""For how long a decode engine waits for a prefill that no prefill engine has announced. Pure.

A prefill engine announces each request as soon as it is in its scheduler, however long the queue there is. So what is
not announced after some seconds will not come, unless the scheduler was in one long step meanwhile (a compilation, a
huge batch): it looks for new requests between steps only. Its heartbeat says so, and then the seconds begin anew.

Times are seconds on a monotonic clock. Used for what is registered (:mod:`kvbus.protocol.decode.registrar`) and for
what still waits in vLLM's queue.
"""

from __future__ import annotations

# What a step keeps unannounced that does not count as long (``Heartbeat.is_in_long_step``) is said well within it.
UNCLAIMED_S = 6.0
PATIENCE_S = 60.0
NEVER_SEEN = "no prefill engine saw the request"


def unknown_at(since: float, busy_at: float, unclaimed_s: float, patience_s: float = PATIENCE_S) -> float:
    """When a request that was asked for ``since`` then, and not announced, counts as one that nobody has.

    Args:
        busy_at: when an engine that may have it was last seen in a long step.
        patience_s: it counts as such after so long whatever the engine does.
    """
    return min(max(since, busy_at) + unclaimed_s, since + patience_s)
