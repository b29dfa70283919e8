"""What the router tells engines on the bus about one request's transfers: take the KV from another engine; drop it."""

from __future__ import annotations

import asyncio
import contextlib
import time

from kvbus.bus import Node
from kvbus.errors import BusUnavailableError, MessageError, PayloadTooLargeError
from kvbus.router.request import failover_events as events
from kvbus.router.request.job import Job
from kvbus.wire import Rebind, RebindReply, Release

TIMEOUT_S = 1.0
PATIENCE_S = 5.0
_PAUSES_S = (0.02, 0.04, 0.08, 0.16, 0.25)


async def ask_rebind(node: Node, job: Job, ask: events.AskRebind, decode_leg_sent_at: float) -> str:
    """Ask the decode engine to take the KV from another prefill engine. Returns why it does not; empty if it does.

    The router asks again for a while if nobody answers, and if the decode leg was sent so short a time ago that it may
    not have reached the engine's scheduler yet. An older leg that the engine does not know has its first token.
    """
    subject = node.subjects.rebind(ask.sink.engine, node.me)
    rebind = Rebind(job.transfer_id, ask.attempt, ask.source.engine if ask.source else "")
    pauses, asked_at = iter(_PAUSES_S), time.monotonic()
    while True:
        try:
            reply = await node.request(subject, rebind, TIMEOUT_S)
            refused = reply.refused if isinstance(reply, RebindReply) else f"answered with {reply.KIND}"
            again, since = refused == "unknown transfer", decode_leg_sent_at
        except (BusUnavailableError, MessageError) as failure:
            refused, again, since = str(failure), True, asked_at
        if not again or time.monotonic() > since + PATIENCE_S:
            return refused
        await asyncio.sleep(next(pauses, _PAUSES_S[-1]))


def publish_release(node: Node, job: Job, release: events.Release) -> None:
    """Tell the prefill engine that nobody takes this KV.

    A decode engine may have refused the request, or died, before its connector knew of it. If it does know of it, the
    prefill engine believes the decode engine.
    """
    subject, sink = node.subjects.releases(release.source.engine, node.me), release.sink
    for transfer_id in job.transfers:
        reason = "decode does not take it"
        word = Release(transfer_id, release.attempt, node.me, sink.engine, sink.incarnation, reason)
        with contextlib.suppress(PayloadTooLargeError):
            node.publish(subject, word)
