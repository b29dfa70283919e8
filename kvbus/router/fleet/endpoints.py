"""The engines as requests see them: who serves a model by this name, and what to say if nobody does."""

from __future__ import annotations

from collections.abc import Mapping

from kvbus.bus import Node
from kvbus.router.fleet.discovery import Asker
from kvbus.router.fleet.model_names import Names
from kvbus.router.fleet.policy import is_usable
from kvbus.router.http import NOT_FOUND, UNAVAILABLE, Answer, BadRequestError, error
from kvbus.wire import Heartbeat, State

RETRY_AFTER_S = "5"
SHOWN_NAMES = 20


class Fleet:
    """A view of a node's membership; lives in its event loop."""

    def __init__(self, node: Node, names: Names, asker: Asker) -> None:
        self._node, self._names, self._asker = node, names, asker

    def serving(self, model: str | None) -> list[Heartbeat]:
        """All engines that serve a model by this name, whatever their role and state; None: any model."""
        return self._names.serving(self._node.membership.peers(), model)

    def decoding(self, model: str | None) -> list[Heartbeat]:
        """Those of them that decode and take new requests."""
        return [engine for engine in self.serving(model) if engine.role.decodes and is_usable(engine)]

    async def find(self, model: str | None, headers: Mapping[str, str]) -> list[Heartbeat]:
        """Likewise; a name that is not known is asked for first, with the key among a client's headers.

        Raises:
            BadRequestError: there is none.
        """
        engines, refused = self.decoding(model), None
        if model is not None and self.decoding(None) and (not engines or self._asker.is_stale(self._without(model))):
            refused = await self._asker.ask_now(headers)
            engines = self.decoding(model)
        if not engines:
            raise BadRequestError(refused or self.nobody(model))
        return engines

    async def everywhere(self, model: str | None, headers: Mapping[str, str]) -> list[Heartbeat]:
        """All engines that serve a model by this name and can be reached, whatever their role.

        Raises:
            BadRequestError: there is none.
        """
        refused = None if self.serving(model) else await self._asker.ask_now(headers)
        engines = [engine for engine in self.serving(model) if engine.address]
        if not engines:
            raise BadRequestError(refused or self.nobody(model))
        return engines

    def _without(self, model: str) -> list[Heartbeat]:
        """Prefill engines that are not known to serve a model."""
        ready = self._node.membership.peers(prefill=True, ready=True)
        serving = self._names.serving(ready, model)
        return [engine for engine in ready if engine not in serving and engine.address]

    def nobody(self, model: str | None) -> Answer:
        """Why there is no decode engine for a model."""
        peers = self._node.membership.peers()
        if model is not None and peers and not self.serving(model):
            served = sorted({name for peer in peers for name in self._names.of(peer)})
            more = f" and {len(served) - SHOWN_NAMES} more" if len(served) > SHOWN_NAMES else ""
            shown = ", ".join(served[:SHOWN_NAMES])
            return error(404, f"the model {model!r:.200} does not exist; served: {shown}{more}", NOT_FOUND, "model")
        missing = "no decode engine is ready"
        if not self._node.bus.connected:
            missing = "the bus is not connected, so no engine is known"
        elif any(peer.state is State.DRAINING for peer in peers if peer.role.decodes):
            missing = "no decode engine is ready: the last ones are draining"
        return error(503, missing, UNAVAILABLE, headers={"Retry-After": RETRY_AFTER_S})
