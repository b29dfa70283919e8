"""kvbus's configuration: one frozen dataclass, read once, from ``kv_connector_extra_config`` or a command line.

A bad value fails at start and names the key, the value and what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from kvbus.errors import ConfigError
from kvbus.protocol.decode import UNCLAIMED_S
from kvbus.wire import check_token, is_address

NATS_SCHEMES = ("nats", "tls", "ws", "wss")


MAX_LOCAL_PREFILL_TOKENS = 1 << 20
REGISTRATIONS = ("eager", "jit", "after_prefill", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a user can set.

    Attributes:
        nats_url: where the NATS server is; several, separated by commas, are tried in turn.
        namespace: engines of different namespaces do not see each other.
        http_address: ``host:port`` under which routers reach this engine's API; found out by itself if empty.
        backends: NIXL backends.
        heartbeat_interval_s: seconds between heartbeats.
        dead_after_s: seconds of silence after which an engine is taken for gone.
        block_lease_s: seconds for which a finished prefill's blocks wait for a registration.
        transfer_timeout_s: the longest that a decode request waits for its KV, seconds.
        unclaimed_s: for how long a decode request waits for a prefill that no prefill engine has, seconds: see
            :mod:`kvbus.protocol.decode.patience`.
        registration: when a decode engine takes blocks for a request whose KV comes from outside: ``eager``, as soon as
            vLLM would; ``jit``, when its last tokens are being prefilled; ``after_prefill``; or ``auto``, eager while
            half of its blocks would stay free, else jit. A request may say it, too.
        local_prefill_tokens: a decode engine computes a prompt itself if at most so many of its tokens are not in its
            prefix cache; 0: never.
        cache_events: say on the bus what enters and leaves the prefix cache, so that routers choose by it.
        history: prefill and decode engines that have it give each other what they have of a conversation; see
            docs/protocol.md.
        first_token: a decode engine goes on from the token that prefill sampled, for requests that ask for it; see
            docs/protocol.md.
        write_lease_s, max_write_s: see :mod:`kvbus.protocol.lease`; the same in all engines of a namespace.
    """

    nats_url: str
    namespace: str = "default"
    http_address: str = ""
    backends: tuple[str, ...] = ("UCX",)
    heartbeat_interval_s: float = 0.5
    dead_after_s: float = 5.0
    block_lease_s: float = 30.0
    transfer_timeout_s: float = 600.0
    unclaimed_s: float = UNCLAIMED_S
    write_lease_s: float = 1.5
    max_write_s: float = 2.0
    registration: str = "auto"
    local_prefill_tokens: int = 64
    history: bool = True
    cache_events: bool = False
    first_token: bool = True

    def __post_init__(self) -> None:
        for server in self.servers:
            check_nats_url("nats_url", server)
        check_token("namespace", self.namespace)
        if self.http_address and not is_address(self.http_address):
            raise ConfigError("http_address", self.http_address, "host:port")
        for name in (
            "heartbeat_interval_s",
            "dead_after_s",
            "block_lease_s",
            "transfer_timeout_s",
            "unclaimed_s",
            "write_lease_s",
            "max_write_s",
        ):
            if not 0.01 <= getattr(self, name) <= 86400:
                raise ConfigError(name, getattr(self, name), "0.01 to 86400 seconds")
        if self.registration not in REGISTRATIONS:
            raise ConfigError("registration", self.registration, ", ".join(REGISTRATIONS))
        if not 0 <= self.local_prefill_tokens <= MAX_LOCAL_PREFILL_TOKENS:
            raise ConfigError("local_prefill_tokens", self.local_prefill_tokens, f"0 to {MAX_LOCAL_PREFILL_TOKENS}")
        if self.dead_after_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                "dead_after_s", self.dead_after_s, f"at least twice heartbeat_interval_s={self.heartbeat_interval_s}"
            )
        if self.write_lease_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                "write_lease_s", self.write_lease_s, f"at least twice heartbeat_interval_s={self.heartbeat_interval_s}"
            )
        if not self.backends or not all(isinstance(backend, str) and backend for backend in self.backends):
            raise ConfigError("backends", list(self.backends), 'a list of NIXL backend names, such as ["UCX"]')

    @property
    def calm_pulse_interval_s(self) -> float:
        """How often a rank pulses that has nothing to write: what is left of the write lease then is one interval."""
        return max(self.heartbeat_interval_s, self.write_lease_s - self.heartbeat_interval_s)

    @property
    def servers(self) -> list[str]:
        return [server.strip() for server in self.nats_url.split(",")]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Read ``kv_connector_extra_config``.

        Raises:
            ConfigError: naming the first key that is unknown, missing, of a wrong type or out of bounds.
        """
        hints = get_type_hints(cls)
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(key, values[key], f"the keys {', '.join(sorted(known))}")
        if "nats_url" not in values:
            raise ConfigError("nats_url", None, "a URL such as nats://host:4222 (the key is required)")
        return cls(**{key: _typed(key, value, hints[key]) for key, value in values.items()})

    @classmethod
    def from_words(cls, words: Iterable[str], **given: Any) -> Config:
        """Read ``key=value`` words, as on a command line; a list's elements are separated by commas.

        Args:
            given: keys that have an option of their own.

        Raises:
            ConfigError: as :meth:`from_mapping`, or a word that is none.
        """
        hints, values = get_type_hints(cls), dict(given)
        for word in words:
            key, equals, text = word.partition("=")
            if not equals or key in values:
                raise ConfigError("--set", word, "key=value, each key once, and not what has an option of its own")
            values[key] = _read(text, hints.get(key))
        return cls.from_mapping(values)

    def as_mapping(self) -> dict[str, Any]:
        """``kv_connector_extra_config``: what differs from the defaults."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


def _read(text: str, wanted: Any) -> Any:
    """``text`` in the type ``wanted``; as it is where it is no such thing, for :func:`_typed` to refuse."""
    if wanted == tuple[str, ...]:
        return [each.strip() for each in text.split(",")]
    if wanted is bool and text in ("true", "false"):
        return text == "true"
    if wanted in (float, int):
        with contextlib.suppress(ValueError):
            return wanted(text)
    return text


def check_nats_url(key: str, value: object) -> str:
    """Return ``value`` if it is a NATS URL with a host; raise :class:`ConfigError` naming ``key`` otherwise."""
    allowed = f"a URL such as nats://host:4222 (schemes: {', '.join(NATS_SCHEMES)})"
    if not isinstance(value, str):
        raise ConfigError(key, value, allowed)
    try:
        parts = urlsplit(value)
        usable = parts.scheme in NATS_SCHEMES and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(key, value, allowed)
    return value


def _typed(key: str, value: Any, wanted: Any) -> Any:
    if wanted is float and type(value) in (int, float):
        return float(value)
    if wanted == tuple[str, ...] and isinstance(value, list | tuple):
        return tuple(value)
    if wanted in (str, int, bool) and type(value) is wanted:
        return value
    names = {str: "text", float: "a number", int: "a whole number", bool: "true or false"}
    raise ConfigError(key, value, names.get(wanted, "a list of text"))
