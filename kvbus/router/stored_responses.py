"""Finds the engine that keeps a response of the Responses API.

vLLM keeps responses in the memory of its API server, and only if told to. So all engines are asked: another router, or
this one before a restart, may have sent the request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from kvbus.router.fleet import RETRY_AFTER_S, is_usable, one_per_port
from kvbus.router.http import BAD_GATEWAY, NOT_FOUND, UNAVAILABLE, RefusedError, error, forwarded, upstream
from kvbus.router.request import Resources
from kvbus.wire import Heartbeat, State

HOLDER_S = 5.0
_RESPONSE_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")


class StoredResponses:
    """See the module's docstring."""

    def __init__(self, resources: Resources) -> None:
        self._session, self._fleet = resources.session, resources.fleet

    def may_hold(self, model: str | None) -> list[Heartbeat]:
        """The engines that may keep responses, also those that drain."""
        decoding = [engine for engine in self._fleet.serving(model) if engine.role.decodes and engine.address]
        return one_per_port([engine for engine in decoding if engine.state is not State.STARTING])

    async def holder(
        self, response_id: str, engines: Sequence[Heartbeat], headers: Mapping[str, str]
    ) -> Heartbeat | None:
        """The one of ``engines`` that has this response for a client with these headers; None if none has.

        Raises:
            RefusedError: it is no id, or an engine that may have it does not answer.
        """
        if not _RESPONSE_ID.fullmatch(response_id):  # it becomes a part of a path
            raise RefusedError(error(404, f"there is no response {response_id!r:.200}", NOT_FOUND))
        if len(engines) == 1:
            return engines[0]
        statuses = await asyncio.gather(*(self._status_of(response_id, engine, headers) for engine in engines))
        for engine, status in zip(engines, statuses, strict=True):
            if status == 200:
                return engine
        for engine, status in zip(engines, statuses, strict=True):
            if status is None:
                message = f"engine {engine.engine} may keep the response {response_id!r:.200} and does not answer"
                raise RefusedError(error(502, message, BAD_GATEWAY))
        return None

    async def pinned(self, response_id: str, model: str | None, headers: Mapping[str, str]) -> Heartbeat | None:
        """The engine that must continue this response; None if none has it, which any engine will tell the client.

        Raises:
            RefusedError: it drains, or does not answer.
        """
        engine = await self.holder(response_id, self.may_hold(model), headers)
        if engine is not None and not is_usable(engine):
            message = f"engine {engine.engine}, which keeps the response {response_id!r:.200}, is draining"
            raise RefusedError(error(503, message, UNAVAILABLE, headers={"Retry-After": RETRY_AFTER_S}))
        return engine

    async def _status_of(self, response_id: str, engine: Heartbeat, headers: Mapping[str, str]) -> int | None:
        url = upstream.url_of(engine, f"/v1/responses/{response_id}")
        try:
            async with asyncio.timeout(HOLDER_S), self._session.get(url, headers=forwarded(headers)) as answer:
                return answer.status
        except upstream.LOST:
            return None
