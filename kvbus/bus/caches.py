"""Hears what engines say of their prefix caches, keeps an index of it, and asks for what is missing.

Called in the node's loop only. While no engine says anything, all that it costs is a subscription.
"""

from __future__ import annotations

import time

from kvbus.bus.node import Node
from kvbus.errors import BusUnavailableError, MessageError
from kvbus.protocol import AskCache, CacheIndex, Change, EngineLeft, PeerLeft
from kvbus.wire import CachePage, CacheRequest, CacheUpdate, Heartbeat

ANSWER_S = 1.0
MAX_PAGES = 1 << 10  # an engine may begin anew in between, but not for ever


class Caches:
    """See the module's docstring. To be made before ``node`` is started."""

    def __init__(self, node: Node) -> None:
        self._node, self.index = node, CacheIndex()
        node.listen(node.subjects.caches("*"), CacheUpdate, self._hear)
        node.watch_heartbeats(self._hear)
        node.watch_peers(self._on_peer)

    def _hear(self, news: Heartbeat | CacheUpdate) -> None:
        self._perform(self.index.apply(news, time.monotonic()))

    def _on_peer(self, change: Change) -> None:
        if isinstance(change, PeerLeft):
            self._perform(self.index.apply(EngineLeft(change.engine, change.incarnation), time.monotonic()))

    def _perform(self, asked: list[AskCache]) -> None:
        for question in asked:
            self._node.spawn(self._ask(question), f"cache-of-{question.engine}")

    async def _ask(self, question: AskCache) -> None:
        """Until all pages are there; if one does not come, the index asks again at a later heartbeat."""
        asked = [question]
        for _ in range(MAX_PAGES):
            if not asked:
                return
            [question] = asked
            subject = self._node.subjects.whole_caches(question.engine, self._node.me)
            request = CacheRequest(self._node.me, question.number, question.offset)
            try:
                answer = await self._node.request(subject, request, ANSWER_S)
            except (BusUnavailableError, MessageError):
                return
            if not isinstance(answer, CachePage) or answer.engine != question.engine:
                return
            asked = self.index.apply(answer, time.monotonic())
