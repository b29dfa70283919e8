"""A decode engine's stream of events: waits for the first token, then yields what comes, whole events at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp

from kvbus.router.http import Failure, Nothing, Token, look, upstream, whole_events

SILENCE_S = 5.0  # how long an engine that left the bus in the middle of its answer may be silent


class StreamBrokenError(Exception):
    """The engine was lost in the middle."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class Stream:
    """Read once, by one task."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self._held = b""
        self._doubtful = False
        self._patience: asyncio.Timeout | None = None

    async def begin(self) -> Nothing | Token | Failure:
        """Wait for the first token. What comes until then is yielded later.

        Raises:
            aiohttp.ClientError: the engine is lost.
        """
        while True:
            chunk = await self.answer.content.readany()
            self._held += chunk
            found = look(self._held)
            if not chunk or not isinstance(found, Nothing):
                return found

    def doubt(self) -> None:
        """The engine left the bus. It may have lost only the bus, but from now on it must not be silent for long."""
        self._doubtful = True
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time() + SILENCE_S)

    def trust(self) -> None:
        """The engine is on the bus again: it may be silent."""
        self._doubtful = False
        if self._patience is not None:
            self._patience.reschedule(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            ready, self._held = whole_events(self._held)
            if ready:
                yield ready
            chunk = await self._read()
            if not chunk:
                break
            self._held += chunk
        if self._held:
            yield self._held

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(SILENCE_S if self._doubtful else None) as self._patience:
                return await self.answer.content.readany()
        except TimeoutError:
            raise StreamBrokenError(f"it left the bus and was silent for {SILENCE_S:g} s") from None
        except upstream.LOST as failure:
            raise StreamBrokenError(upstream.why(failure)) from failure
        finally:
            self._patience = None
