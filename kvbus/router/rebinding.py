"""The router's question to a decode engine: will it take this request's KV from another prefill engine?"""

from __future__ import annotations

import asyncio
import time

from kvbus.errors import BusUnavailableError, MessageError
from kvbus.messages import Rebind, RebindReply
from kvbus.node import Node
from kvbus.router.flying import AskRebind

TIMEOUT_S = 1.0
PATIENCE_S = 5.0  # the decode leg may still be on its way into the engine's scheduler
NOBODY = "nobody"  # an engine's id that is on no bus: decode looks for it, and then computes the prompt itself
_PAUSES_S = (0.02, 0.04, 0.08, 0.16, 0.25)


async def ask_rebind(node: Node, transfer_id: str, ask: AskRebind) -> str:
    """Why not, empty if it will."""
    subject = node.subjects.rebind(ask.sink.engine)
    rebind = Rebind(transfer_id, ask.attempt, ask.source.engine if ask.source else NOBODY)
    deadline, pauses = time.monotonic() + PATIENCE_S, iter(_PAUSES_S)
    while True:
        try:
            reply = await node.request(subject, rebind, TIMEOUT_S)
            refused = reply.refused if isinstance(reply, RebindReply) else f"answered with {reply.KIND}"
            again = refused == "unknown transfer"
        except (BusUnavailableError, MessageError) as failure:
            refused, again = str(failure), True
        if not again or time.monotonic() > deadline:
            return refused
        await asyncio.sleep(next(pauses, _PAUSES_S[-1]))
