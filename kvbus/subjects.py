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


@dataclass(frozen=True, slots=True)
class Subjects:
    """Subjects of one namespace. An engine id of ``"*"`` gives the subject for all engines."""

    namespace: str

    def __post_init__(self) -> None:
        check_token("namespace", self.namespace)

    def _of(self, area: str) -> str:
        return f"{_ROOT}.{self.namespace}.{area}"

    @property
    def everything(self) -> str:
        return self._of(">")

    @property
    def pool(self) -> str:
        """Registrations whose prefill engine the decode engine does not know."""
        return self._of("reg")

    def registrations(self, engine: str) -> str:
        return self._of(f"reg.{engine}")

    def cancels(self, engine: str) -> str:
        return self._of(f"cancel.{engine}")

    @property
    def cancels_pool(self) -> str:
        """Cancels of registrations that no prefill engine has acknowledged."""
        return self._of("cancel")

    def acks(self, engine: str) -> str:
        return self._of(f"ack.{engine}")

    def transfers(self, engine: str) -> str:
        """What becomes of the transfers into the decode engine ``engine``: started, done, failed."""
        return self._of(f"done.{engine}")

    def prefill(self, engine: str) -> str:
        """Progress, completion and failure of prefills in ``engine``, for its ranks and observers."""
        return self._of(f"prefill.{engine}")

    def heartbeats(self, role: str, engine: str) -> str:
        return self._of(f"hb.{role}.{engine}")

    @staticmethod
    def heartbeats_anywhere() -> str:
        """Heartbeats of all engines in all namespaces."""
        return f"{_ROOT}.*.hb.*.*"

    def pulses(self, engine: str) -> str:
        """Pulses of the ranks of the prefill engine ``engine``."""
        return self._of(f"pulse.{engine}")

    def echoes(self, engine: str) -> str:
        """Echoes of the pulses of the prefill engine ``engine``."""
        return self._of(f"echo.{engine}")

    def rebind(self, engine: str) -> str:
        """Request/reply: a router gives a transfer into the decode engine ``engine`` to another prefill engine."""
        return self._of(f"rebind.{engine}")

    def drain(self, engine: str) -> str:
        """Request/reply: an operator drains the engine ``engine``."""
        return self._of(f"drain.{engine}")

    def marks(self, engine: str) -> str:
        """What the engine's processes did for traced requests, and when."""
        return self._of(f"mark.{engine}")

    def clock(self, engine: str) -> str:
        """Request/reply: the engine's clock."""
        return self._of(f"clock.{engine}")

    @property
    def who(self) -> str:
        return self._of("who")

    def bye(self, engine: str) -> str:
        return self._of(f"bye.{engine}")

    def metadata(self, engine: str, rank: int | str) -> str:
        """Request/reply: the NIXL agent metadata of one rank."""
        return self._of(f"meta.{engine}.{rank}")
