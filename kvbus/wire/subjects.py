"""Names of the NATS subjects. Engine ids appear in them, request ids never (they would defeat the server's subject
cache). One wildcard, :attr:`Subjects.everything`, shows an observer the whole bus of a namespace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvbus.errors import ConfigError

_ROOT = "kvbus.v1"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_token(value: str) -> bool:
    """Whether ``value`` can be one token of a subject."""
    return _TOKEN.fullmatch(value) is not None


def check_token(key: str, value: object) -> str:
    """Return ``value`` if it can be one token of a subject; raise :class:`ConfigError` naming ``key`` otherwise."""
    if not isinstance(value, str) or not is_token(value):
        raise ConfigError(key, value, "1 to 128 of the characters A-Z a-z 0-9 _ -")
    return value


ANYBODY = "*"


@dataclass(frozen=True, slots=True)
class Subjects:
    """Subjects of one namespace. The last token of each is who speaks, so that the server can say who may.

    ``by`` is the speaker: an engine's id, or a router's or tool's name; without it, the subject for what anybody says.
    ``to`` is the engine that it is for, ``"*"`` for all of them.
    """

    namespace: str

    def __post_init__(self) -> None:
        check_token("namespace", self.namespace)

    def _of(self, area: str) -> str:
        return f"{_ROOT}.{self.namespace}.{area}"

    @property
    def everything(self) -> str:
        return self._of(">")

    # A decode engine to a prefill engine

    def registrations(self, to: str, by: str = ANYBODY) -> str:
        return self._of(f"reg.{to}.{by}")

    def cancels(self, to: str, by: str = ANYBODY) -> str:
        return self._of(f"cancel.{to}.{by}")

    def echoes(self, to: str, by: str = ANYBODY) -> str:
        """Echoes of the pulses of the prefill engine ``to``."""
        return self._of(f"echo.{to}.{by}")

    # A decode engine to any prefill engine

    def pool(self, by: str = ANYBODY) -> str:
        """Registrations whose prefill engine the decode engine does not know."""
        return self._of(f"pool.reg.{by}")

    def cancels_pool(self, by: str = ANYBODY) -> str:
        """Cancels of registrations that no prefill engine has acknowledged."""
        return self._of(f"pool.cancel.{by}")

    # A prefill engine to a decode engine

    def acks(self, to: str, by: str = ANYBODY) -> str:
        return self._of(f"ack.{to}.{by}")

    def transfers(self, to: str, by: str = ANYBODY) -> str:
        """What becomes of the transfers into the decode engine ``to``: started, done, failed."""
        return self._of(f"done.{to}.{by}")

    # An engine to whoever listens

    def prefill(self, by: str) -> str:
        """Progress, completion and failure of prefills in the engine ``by``, for its ranks and observers."""
        return self._of(f"prefill.{by}")

    @staticmethod
    def heartbeats_anywhere() -> str:
        """Heartbeats of all engines in all namespaces."""
        return f"{_ROOT}.*.hb.*.*"

    def heartbeats(self, role: str, by: str) -> str:
        return self._of(f"hb.{role}.{by}")

    def loads(self, role: str, by: str) -> str:
        """Heartbeats that only routers and tools need, between those that everybody hears."""
        return self._of(f"load.{role}.{by}")

    def pulses(self, by: str) -> str:
        """Pulses of the ranks of the prefill engine ``by``."""
        return self._of(f"pulse.{by}")

    def history_pulses(self, by: str) -> str:
        """Pulses of the ranks of the engine ``by``, which only writes history."""
        return self._of(f"hpulse.{by}")

    def marks(self, by: str) -> str:
        """What the engine's processes did for traced requests, and when."""
        return self._of(f"mark.{by}")

    def caches(self, by: str = ANYBODY) -> str:
        """What enters and leaves the engine's prefix cache."""
        return self._of(f"cache.{by}")

    def bye(self, by: str) -> str:
        return self._of(f"bye.{by}")

    def who(self, by: str = ANYBODY) -> str:
        """Asks every engine for a heartbeat."""
        return self._of(f"who.{by}")

    # A router or a tool to an engine

    def releases(self, to: str, by: str = ANYBODY) -> str:
        """A router to the prefill engine ``to``: nobody takes this transfer."""
        return self._of(f"release.{to}.{by}")

    def rebind(self, to: str, by: str = ANYBODY) -> str:
        """Request/reply: a router gives a transfer into the decode engine ``to`` to another prefill engine."""
        return self._of(f"rebind.{to}.{by}")

    def drain(self, to: str, by: str = ANYBODY) -> str:
        """Request/reply: an operator drains the engine ``to``."""
        return self._of(f"drain.{to}.{by}")

    def clock(self, to: str, by: str = ANYBODY) -> str:
        """Request/reply: the engine's clock."""
        return self._of(f"clock.{to}.{by}")

    def whole_caches(self, to: str, by: str = ANYBODY) -> str:
        """Request/reply: all that is in the engine's prefix cache."""
        return self._of(f"cached.{to}.{by}")

    def metadata(self, to: str, rank: int | str, by: str = ANYBODY) -> str:
        """Request/reply: the NIXL agent metadata of one rank."""
        return self._of(f"meta.{to}.{rank}.{by}")
