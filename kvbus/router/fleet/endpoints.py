"""The engines as requests see them: which ones serve a model by a name, and what to answer if none does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvbus.bus import Caches, Node
from kvbus.protocol import Change, PeerLeft
from kvbus.router.fleet.cached import CachedPrompts
from kvbus.router.fleet.discovery import ModelDiscovery
from kvbus.router.fleet.loads import Loads
from kvbus.router.fleet.models import ModelNames
from kvbus.router.fleet.policy import is_usable
from kvbus.router.fleet.tokenizing import Tokenizing
from kvbus.router.http import NOT_FOUND, UNAVAILABLE, Answer, RefusedError, error
from kvbus.wire import Heartbeat, State

RETRY_AFTER_S = "5"
SHOWN_NAMES = 20


class Fleet:
    """A node's membership, with what this router knows besides: the engines' names, loads and failures.

    Lives in the node's event loop; to be made before the node is entered.

    Args:
        engine_key: see :class:`ModelDiscovery`.
        tokenized: see :class:`Tokenizing`.
    """

    def __init__(self, node: Node, engine_key: str = "", tokenized: Callable[[str], None] = lambda _: None) -> None:
        self._node = node
        self.names, self.loads = ModelNames(), Loads(time.monotonic)
        self.caches, self.tokenizing = Caches(node), Tokenizing(tokenized)
        self.cached = CachedPrompts(self.caches, self.names)
        self.discovery = ModelDiscovery(node.membership, self.names, engine_key)

    def on_peer(self, change: Change) -> None:
        """Called for each change of the membership."""
        self.discovery.on_peer(change)
        if isinstance(change, PeerLeft):
            self.loads.forget(change.engine)

    def serving(self, model: str | None) -> list[Heartbeat]:
        """All engines that serve a model by this name, whatever their role and state; None: any model."""
        return self.names.serving(self._node.membership.peers(), model)

    def decoding(self, model: str | None) -> list[Heartbeat]:
        """Those of them that decode and take new requests."""
        return [engine for engine in self.serving(model) if engine.role.decodes and is_usable(engine)]

    async def find(self, model: str | None, headers: Mapping[str, str]) -> list[Heartbeat]:
        """Likewise. If the name is not known, the engines are asked first, with the key among a client's headers.

        Raises:
            RefusedError: there is none.
        """
        engines, refused = self.decoding(model), None
        if model is not None and self.decoding(None) and (not engines or self._may_miss_prefill(model)):
            refused = await self.discovery.ask_now(headers)
            engines = self.decoding(model)
        if not engines:
            raise RefusedError(refused or self.no_decode_engine(model))
        return engines

    async def everywhere(self, model: str | None, headers: Mapping[str, str]) -> list[Heartbeat]:
        """All engines that serve a model by this name and can be reached, whatever their role.

        Raises:
            RefusedError: there is none.
        """
        refused = None if self.serving(model) else await self.discovery.ask_now(headers)
        engines = [engine for engine in self.serving(model) if engine.address]
        if not engines:
            raise RefusedError(refused or self.no_decode_engine(model))
        return engines

    def _may_miss_prefill(self, model: str) -> bool:
        """Whether a prefill engine that is not known to serve the model may do so by now."""
        ready = self._node.membership.peers(prefill=True, ready=True)
        serving = self.names.serving(ready, model)
        return self.discovery.is_stale([engine for engine in ready if engine not in serving and engine.address])

    def no_decode_engine(self, model: str | None) -> Answer:
        """Why there is no decode engine for a model."""
        peers = self._node.membership.peers()
        if model is not None and peers and not self.serving(model):
            served = sorted({name for peer in peers for name in self.names.of(peer)})
            more = f" and {len(served) - SHOWN_NAMES} more" if len(served) > SHOWN_NAMES else ""
            shown = ", ".join(served[:SHOWN_NAMES])
            return error(404, f"the model {model!r:.200} does not exist; served: {shown}{more}", NOT_FOUND, "model")
        missing = "no decode engine is ready"
        if not self._node.bus.connected:
            missing = "the bus is not connected, so no engine is known"
        elif any(peer.state is State.DRAINING for peer in peers if peer.role.decodes):
            missing = "no decode engine is ready: the last ones are draining"
        return error(503, missing, UNAVAILABLE, headers={"Retry-After": RETRY_AFTER_S})
