"""Every error that kvbus raises on purpose. Text is built from typed attributes, so that callers can act on them."""

from __future__ import annotations


class KVBusError(Exception):
    """Base of all errors that kvbus raises on purpose."""


class ConfigError(KVBusError):
    """A configuration value is refused at start."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        super().__init__(f"kvbus: bad configuration: {key}={value!r}; allowed: {allowed}")


class MessageError(KVBusError):
    """A message is refused, on the way out or in: wrong shape, wrong type or out of bounds."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class PayloadTooLargeError(KVBusError):
    """A payload is larger than the NATS server accepts; nothing was sent."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        self.subject, self.size_bytes, self.limit_bytes = subject, size_bytes, limit_bytes
        super().__init__(
            f"kvbus: message on {subject} has {size_bytes} bytes, the NATS server accepts max_payload={limit_bytes}"
        )


class BusUnavailableError(KVBusError):
    """The bus is not connected, or nobody answered a request on it."""


class PeerRefusedError(KVBusError):
    """A peer engine's memory cannot be used: it does not fit this engine's."""

    def __init__(self, engine: str, reason: str) -> None:
        self.engine, self.reason = engine, reason
        super().__init__(f"kvbus: peer engine {engine} refused: {reason}")


class TransferRefusedError(KVBusError):
    """A WRITE could not be built or posted; no part of it is outstanding."""


class LocalClusterError(KVBusError):
    """The local cluster cannot start or lost one of its processes."""


class TraceError(KVBusError):
    """A trace cannot be read, or is not there."""

    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(f"kvbus: {where}: {reason}")
