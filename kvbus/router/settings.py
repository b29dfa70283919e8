"""The router's own limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvbus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """See ``kvbus router --help``; ``takeover_s`` is no option. Seconds and MiB.

    Raises:
        ConfigError: a value is not positive, or not finite.
    """

    max_in_flight: int = 512
    max_queue: int = 1024
    max_wait_s: float = 30.0
    body_timeout_s: float = 60.0
    max_body_mib: int = 32
    max_bodies_mib: int = 512
    first_token_s: float = 600.0
    answer_s: float = 3600.0
    max_takeovers: int = 3
    notice_s: float = 5.0
    grace_s: float = 45.0
    max_connections: int = 8192
    keep_alive_s: float = 75.0
    takeover_s: float = 5.0
    access_log: str = "off"
    trusted_proxies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        may_be_zero = ("max_queue", "max_takeovers", "takeover_s", "notice_s", "grace_s")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str | tuple):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in may_be_zero):
                allowed = "zero or more" if field.name in may_be_zero else "more than zero"
                raise ConfigError(field.name, value, allowed)
