"""Keys: how an engine knows who sent a message, on a bus where anybody may publish anything.

Each incarnation of an engine has an X25519 key pair, derived from a secret that only its own processes share; its
heartbeat says the public key. Any two engines, and an engine's own processes, so have a key in common that is never
sent. A message between them ends in a *seal*: a keyed BLAKE2b over all that precedes it. NIXL metadata is encrypted.

The one rule: the first public key heard of an incarnation is its key. Another one is not believed until the
incarnation was silent for :data:`FORGET_S`. So a liar who was first can lie for a while, but not for good; and when the
key changes, every right to write of the engine with the old key has ended (:mod:`kvbus.protocol.lease`).

No I/O, and time is an argument; thread-safe. Sources: RFC 7748 (X25519), 7693 (BLAKE2), 8439 (ChaCha20-Poly1305).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from dataclasses import dataclass, field, replace

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from kvbus.bounded import BoundedDict
from kvbus.wire import SEAL_BYTES, Bye, Heartbeat, Message, farewell_of, seal_of

MAX_PINS = 1 << 13
FORGET_S = 10.0
_NONCE_BYTES = 12

Speaker = tuple[str, int]
"""An engine and its incarnation."""


class Keys:
    """What one process of an engine knows: its own key pair, and the public keys of other engines.

    Args:
        secret: shared by the processes of this engine, and by nobody else; of any length.
    """

    def __init__(self, secret: bytes, engine: str, incarnation: int) -> None:
        self._me: Speaker = (engine, incarnation)
        name, secret = _name(self._me), hashlib.blake2b(secret).digest()
        self._private = X25519PrivateKey.from_private_bytes(_derive(secret, b"kvbus key", name))
        self._farewell = _derive(secret, b"kvbus bye", name)
        self.public_key = self._private.public_key().public_bytes_raw()
        self._pins: dict[Speaker, _Pin] = {self._me: _Pin(self.public_key, float("inf"))}
        self._proven: BoundedDict[str, int] = BoundedDict(MAX_PINS)
        self._proven[engine] = incarnation
        self._lock = threading.Lock()

    @property
    def farewell(self) -> bytes:
        """What a heartbeat says, so that nobody else can say this engine's :class:`~kvbus.wire.engine_messages.Bye`."""
        return farewell_of(self._farewell)

    def introduce(self, heartbeat: Heartbeat) -> Heartbeat:
        """This engine's heartbeat with its key."""
        return replace(heartbeat, public_key=self.public_key, farewell=self.farewell)

    def bye(self) -> Bye:
        return Bye(*self._me, self._farewell)

    def may_be(self, heartbeat: Heartbeat, now: float) -> bool:
        """Whether the public key in it can be that of its engine. An older kvbus has none."""
        with self._lock:
            pin = self._pins.get((heartbeat.engine, heartbeat.incarnation))
            return pin is None or pin.public_key == heartbeat.public_key or now - pin.heard_at > FORGET_S

    def learn(self, heartbeat: Heartbeat, now: float) -> None:
        """Take the public key of an engine that is there, unless it may not be its own, or there are too many."""
        speaker = (heartbeat.engine, heartbeat.incarnation)
        if not self.may_be(heartbeat, now):
            return
        with self._lock:
            pin = self._pins.get(speaker)
            if pin is not None and pin.public_key == heartbeat.public_key:
                pin.heard_at = max(pin.heard_at, now)
                return
            if pin is None and len(self._pins) >= MAX_PINS:
                self._pins = {name: old for name, old in self._pins.items() if now - old.heard_at <= FORGET_S}
            if pin is not None or len(self._pins) < MAX_PINS:
                self._pins[speaker] = _Pin(heartbeat.public_key, now)

    def towards(self, engine: str, member: int | None) -> list[bytes]:
        """The keys to seal with what is sent to ``engine``: that of the incarnation which last proved that it has one,
        and that of ``member``, which is taken for the present one; as a rule they are the same."""
        with self._lock:
            found = {each for each in (self._proven.get(engine), member) if each is not None}
        keys = (self._key(b"seal", self._me, (engine, incarnation)) for incarnation in sorted(found))
        return [key for key in keys if key is not None]

    def believes(self, message: Message, payload: bytes) -> bool:
        """Whether ``payload``, which is ``message``, was sealed for us by the engine that it says it is of."""
        speaker = message.speaker
        key = self._key(b"seal", speaker, self._me)
        if key is None or not hmac.compare_digest(payload[-SEAL_BYTES:], seal_of(payload, key)):
            return False
        with self._lock:
            self._proven[speaker[0]] = speaker[1]
        return True

    def know(self, speaker: Speaker) -> bool:
        """Whether this incarnation's public key was heard."""
        with self._lock:
            return speaker in self._pins

    def encrypt(self, secret: bytes, reader: Speaker) -> bytes | None:
        """For the engine ``reader`` alone; None if its key is not known."""
        key = self._key(b"encrypt", self._me, reader)
        if key is None:
            return None
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + ChaCha20Poly1305(key).encrypt(nonce, secret, None)

    def decrypt(self, sealed: bytes, writer: Speaker) -> bytes | None:
        """The inverse of :meth:`encrypt`; None if it was not encrypted for us by the engine ``writer``."""
        key = self._key(b"encrypt", writer, self._me)
        if key is None or len(sealed) < _NONCE_BYTES:
            return None
        try:
            return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except InvalidTag:
            return None

    def _key(self, purpose: bytes, sender: Speaker, receiver: Speaker) -> bytes | None:
        """The key of this direction; None if the other one's public key is not known. One of the two is us."""
        other = receiver if sender == self._me else sender
        with self._lock:
            pin = self._pins.get(other)
            if pin is None or not pin.public_key:
                return None
            key = pin.keys.get((purpose, sender))
            if key is None:
                try:
                    shared = self._private.exchange(X25519PublicKey.from_public_bytes(pin.public_key))
                except ValueError:  # no point of the curve, or one that gives the same key to everybody
                    return None
                key = pin.keys[purpose, sender] = _derive(shared, purpose, _name(sender), _name(receiver))
            return key


@dataclass(slots=True)
class _Pin:
    """What is known of an incarnation of an engine."""

    public_key: bytes
    heard_at: float
    keys: dict[tuple[bytes, Speaker], bytes] = field(default_factory=dict)
    """By purpose and sender: at most four."""


def _name(speaker: Speaker) -> bytes:
    return f"{speaker[0]}/{speaker[1]}".encode()


def _derive(secret: bytes, *about: bytes) -> bytes:
    """32 bytes; ``secret`` has at most 64."""
    return hashlib.blake2b(b"\0".join(about), key=secret, digest_size=32).digest()
