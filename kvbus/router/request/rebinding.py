"""The router's question to a decode engine: will it take this request's KV from another prefill engine?"""

from __future__ import annotations

import asyncio
import time

from kvbus.bus import Node
from kvbus.errors import BusUnavailableError, MessageError
from kvbus.router.request.failover_events import AskRebind
from kvbus.wire import Rebind, RebindReply

TIMEOUT_S = 1.0
PATIENCE_S = 5.0
_PAUSES_S = (0.02, 0.04, 0.08, 0.16, 0.25)


async def ask_rebind(node: Node, transfer_id: str, ask: AskRebind, decode_leg_sent_at: float) -> str:
    """Why not, empty if it will. Asked again for a while if nobody answers, or if the decode leg is so new that it may
    be on its way into the engine's scheduler; one that is older and unknown has its first token."""
    subject = node.subjects.rebind(ask.sink.engine, node.me)
    rebind = Rebind(transfer_id, ask.attempt, ask.source.engine if ask.source else "")
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
