"""Every message on the bus: one frozen dataclass each, checked when it is built, and the codec beside it.

The one rule: nothing past this module sees a dict or an unchecked field. :func:`encode` and :func:`decode` are each
other's inverse; whatever :func:`decode` cannot accept raises :class:`~kvbus.errors.MessageError` and nothing else.

Wire format: one msgpack map ``{"v": version, "k": kind, field: value, ...}``. Unknown fields are ignored, missing
ones take their default, or the message is refused if there is none. What one engine says to another ends in a field
``"s"``, its seal (:mod:`kvbus.keys`): 16 bytes over all bytes before them.

Wire versions:
    1  first.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_type_hints

import msgpack

from kvbus.blocks import BlockRuns
from kvbus.errors import MessageError
from kvbus.fields import CHECK_OF_TYPE, MAX_BINARY_BYTES, MAX_RUNS, MAX_TEXT_CHARS
from kvbus.fields import Address as Address
from kvbus.fields import Echoes as Echoes
from kvbus.fields import Key as Key
from kvbus.fields import MarkList as MarkList
from kvbus.fields import Pairs as Pairs
from kvbus.fields import Role as Role
from kvbus.fields import State as State

WIRE_VERSION = 1

FIRST_ATTEMPT = 1

MAX_MESSAGE_BYTES = 8 << 20
SEAL_BYTES = 16


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages. ``KIND`` is the tag on the wire.

    ``SPEAKER`` names the fields that say who speaks: an id, which the last token of the subject must repeat, and the
    incarnation of an engine. What is ``SEALED`` is said by one engine to another, or to itself.
    """

    KIND: ClassVar[str] = ""
    SPEAKER: ClassVar[tuple[str, str]] = ("", "")
    SEALED: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, check in _CHECKS[type(self)]:
            value = getattr(self, name)
            if (checked := check(name, value)) is not value:
                object.__setattr__(self, name, checked)

    @property
    def speaker(self) -> tuple[str, int]:
        """Who says it, and which incarnation of it: empty and 0 if the message does not tell."""
        name, incarnation = self.SPEAKER
        return getattr(self, name) if name else "", getattr(self, incarnation) if incarnation else 0


@dataclass(frozen=True, slots=True)
class _FromSink(Message):
    """What a decode engine says about one attempt at one transfer."""

    SPEAKER = ("sink_engine", "sink_incarnation")
    SEALED = True

    transfer_id: str
    attempt: int
    sink_engine: str
    sink_incarnation: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Registration(_FromSink):
    """The blocks that a decode engine has allocated for the KV of a prompt.

    ``blocks`` holds only those still to be filled, the prompt's last ones; ``request_id`` is the decode engine's.
    ``source_incarnation`` is that of the prefill engine it was sent to: only this one may write; 0 while it is unknown.
    ``echoes`` and ``epoch``: see :mod:`kvbus.lease`. ``digest`` is of the prompt's token ids and its LoRA adapter,
    empty if there are neither.
    """

    KIND = "reg"

    blocks: BlockRuns
    prompt_tokens: int
    cached_tokens: int = 0
    digest: str = ""
    traceparent: str = ""
    source_incarnation: int = 0
    echoes: Echoes = ()
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Wanted(_FromSink):
    """The decode engine has this request but no blocks for it yet: keep its KV for another block lease."""

    KIND = "wanted"


@dataclass(frozen=True, slots=True)
class Delivered(_FromSink):
    """The decode engine's first token is out, or the request is over: nobody will need this transfer's KV again."""

    KIND = "delivered"


@dataclass(frozen=True, slots=True)
class Rebind(Message):
    """A router's word to a decode engine: this transfer's KV shall come under ``attempt`` from ``source_engine``.

    If that is empty, nobody has it: the decode engine shall compute the prompt itself.
    """

    KIND = "rebind"

    transfer_id: str
    attempt: int
    source_engine: str


@dataclass(frozen=True, slots=True)
class RebindReply(Message):
    """The decode engine's answer; ``refused`` says why it will not, empty if it will."""

    KIND = "rebind!"

    transfer_id: str
    attempt: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Cancel(_FromSink):
    """The decode engine no longer wants this attempt. ``release``: nor any other; P may free its blocks."""

    KIND = "cancel"

    reason: str
    release: bool = True


@dataclass(frozen=True, slots=True)
class Release(Message):
    """A router's word to a prefill engine: ``sink_engine`` did not serve this attempt, and nobody else will.

    Routers have no key, so anybody can say it: believed, it costs a transfer whose prompt is then computed on decode.
    """

    KIND = "release"
    SPEAKER = ("sender", "")

    transfer_id: str
    attempt: int
    sender: str
    sink_engine: str
    sink_incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class _FromSource(Message):
    """What a prefill engine says about one transfer."""

    SPEAKER = ("source_engine", "source_incarnation")
    SEALED = True

    transfer_id: str
    source_engine: str
    source_incarnation: int


@dataclass(frozen=True, slots=True)
class PrefillProgress(_FromSource):
    """``computed`` of the prompt's ``total`` tokens are computed; 0 when the request has just arrived.

    The scheduler numbers what it says of prefills, from 1: ranks so know what they have heard of it already.
    """

    KIND = "progress"

    request_id: str
    computed: int
    total: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class PrefillCompleted(_FromSource):
    """The prefill of ``tokens`` prompt tokens is done; ``blocks`` hold its KV and stay until the transfer ends."""

    KIND = "completed"

    request_id: str
    blocks: BlockRuns
    tokens: int
    digest: str = ""
    traceparent: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class PrefillFailed(_FromSource):
    """There will be no KV for this transfer."""

    KIND = "prefill_failed"

    request_id: str
    reason: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class _FromSourceRank(_FromSource):
    """What rank ``rank`` of a prefill engine's ``ranks`` says about one attempt, to the decode engine."""

    attempt: int
    rank: int
    ranks: int
    request_id: str


@dataclass(frozen=True, slots=True)
class RegistrationAck(_FromSourceRank):
    """The registration is held (``refused`` empty), or will never be served (``refused`` says why).

    ``claimed``: the prefill engine has the request; an acknowledgement is sent again when it comes, and with each
    :class:`PrefillProgress` of it. Decode engines do not listen to those themselves: each would hear all of the pool's.
    """

    KIND = "ack"

    refused: str = ""
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class CancelAck(_FromSourceRank):
    """No WRITE of this attempt is posted, and none will be."""

    KIND = "cancel_ack"


@dataclass(frozen=True, slots=True)
class TransferStarted(_FromSourceRank):
    """A WRITE is posted: from now on it is worth polling for its notification."""

    KIND = "started"


@dataclass(frozen=True, slots=True)
class TransferDone(_FromSourceRank):
    """The WRITEs of this rank have ended well. Times are seconds on this rank's monotonic clock.

    ``late_side`` is the one the match waited for. ``match_wait_s`` is how long the earlier side waited for the later.
    """

    KIND = "done"

    blocks: int = 0
    nbytes: int = 0
    late_side: str = ""
    match_wait_s: float = 0.0
    queue_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferFailed(_FromSourceRank):
    """This rank will not (or not completely) write; none of its WRITEs is outstanding."""

    KIND = "failed"

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """An engine is there. ``incarnation`` is the wall-clock ns of its start: larger is newer.

    ``requests`` are in its scheduler, or only their KV is, for another engine; of their prompts' tokens,
    ``queued_tokens`` are still to be computed here.
    ``step_s``: its scheduler has been in its present step for so long; requests that came since are not announced yet.
    ``compat`` holds what must be equal in two engines that exchange KV; :func:`kvbus.membership.differences` names
    what is not.
    ``public_key`` and ``farewell``: see :mod:`kvbus.keys`.
    ``data_parallel``: other ranks share the address; ``data_parallel_rank`` tells vLLM which one is meant.
    """

    KIND = "hb"
    SPEAKER = ("engine", "incarnation")

    engine: str
    incarnation: int
    number: int
    role: Role
    state: State
    tp_size: int
    model: str = ""
    address: Address = ""
    free_blocks: int = 0
    total_blocks: int = 0
    requests: int = 0
    queued_tokens: int = 0
    compat: Pairs = ()
    data_parallel: bool = False
    data_parallel_rank: int = 0
    public_key: Key = b""
    farewell: Key = b""
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pulse(Message):
    """A prefill rank is alive; ``number`` is what a decode engine echoes."""

    KIND = "pulse"
    SPEAKER = ("source_engine", "source_incarnation")

    source_engine: str
    source_incarnation: int
    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class LeaseEcho(Message):
    """A decode engine has heard these pulses, and wants what it registered in this epoch (:mod:`kvbus.lease`)."""

    KIND = "echo"
    SPEAKER = ("sink_engine", "sink_incarnation")
    SEALED = True

    sink_engine: str
    sink_incarnation: int
    echoes: Echoes
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DrainRequest(Message):
    """Asks an engine to say that it is draining, so that routers send it nothing new; ``undo``: that it is ready."""

    KIND = "drain?"
    SPEAKER = ("sender", "")

    sender: str
    undo: bool = False


@dataclass(frozen=True, slots=True)
class DrainReply(Message):
    """The engine did as it was asked; it still has so many ``requests``."""

    KIND = "drain!"

    engine: str
    incarnation: int
    requests: int


@dataclass(frozen=True, slots=True)
class Marks(Message):
    """What one process of an engine did for a traced transfer, and when.

    ``host`` names its monotonic clock; ``traceparent`` is the one that the request came with.
    """

    KIND = "marks"
    SPEAKER = ("engine", "")

    transfer_id: str
    engine: str
    role: Role
    rank: int
    host: str
    marks: MarkList
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ClockRequest(Message):
    """Asks an engine for its clock."""

    KIND = "clock?"
    SPEAKER = ("sender", "")

    sender: str


@dataclass(frozen=True, slots=True)
class ClockReply(Message):
    """The monotonic clock of ``host``, ns: when the question came, and when this answer left."""

    KIND = "clock!"

    engine: str
    host: str
    received_ns: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class Who(Message):
    """Asks every engine for a heartbeat at once."""

    KIND = "who"
    SPEAKER = ("sender", "")

    sender: str


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """This incarnation of the engine is leaving. Its heartbeats have said the digest of ``word``."""

    KIND = "bye"
    SPEAKER = ("engine", "incarnation")

    engine: str
    incarnation: int
    word: Key = b""


@dataclass(frozen=True, slots=True)
class MetadataRequest(Message):
    """Asks one rank of an engine for its NIXL agent metadata; ``incarnation`` is the only one that shall answer."""

    KIND = "meta?"
    SPEAKER = ("sender", "sender_incarnation")
    SEALED = True

    sender: str
    incarnation: int = 0
    sender_incarnation: int = 0


@dataclass(frozen=True, slots=True)
class MetadataReply(Message):
    """The metadata, encrypted for who asked; ``error`` says why there is none."""

    KIND = "meta!"

    engine: str
    incarnation: int
    rank: int
    payload: bytes = b""
    error: str = ""


_NO_SEAL = bytes(SEAL_BYTES)


def encode(message: Message, key: bytes | None = None) -> bytes:
    """Encode a message; the inverse of :func:`decode`. With a ``key`` it is sealed."""
    body: dict[str, Any] = {"v": WIRE_VERSION, "k": message.KIND}
    for name, _ in _CHECKS[type(message)]:
        body[name] = getattr(message, name)
    if key is None:
        return cast(bytes, msgpack.packb(body))
    payload = cast(bytes, msgpack.packb({**body, "s": _NO_SEAL}))
    return payload[:-SEAL_BYTES] + seal_of(payload, key)


def seal_of(payload: bytes, key: bytes) -> bytes:
    """The seal that belongs into the last :data:`SEAL_BYTES` of ``payload``."""
    return hashlib.blake2b(payload[:-SEAL_BYTES], key=key, digest_size=SEAL_BYTES).digest()


def farewell_of(word: bytes) -> bytes:
    """What a heartbeat says beforehand of the ``word`` that a :class:`Bye` will reveal."""
    return hashlib.blake2b(word, digest_size=32).digest()


def heard(subject: str, payload: bytes) -> Message:
    """Decode what was heard on ``subject``: the subject, which the server can guard, says who speaks.

    Raises:
        MessageError: as :func:`decode`, or the message is of somebody else.
    """
    message, (*_, role, speaker) = decode(payload), subject.split(".")
    if message.SPEAKER[0] and message.speaker[0] != speaker:
        raise MessageError(f"{message.KIND} of {message.speaker[0]!r:.80}, said by {speaker}")
    if isinstance(message, Heartbeat) and message.role != role:
        raise MessageError(f"heartbeat of a {message.role} engine, said by one for {role}")
    return message


def decode(data: bytes) -> Message:
    """Decode one message.

    Raises:
        MessageError: for anything else than a well-formed message of a known kind and version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes, allowed {MAX_MESSAGE_BYTES}")
    try:
        body = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_str_len=4 * MAX_TEXT_CHARS,
            max_bin_len=MAX_BINARY_BYTES,
            max_array_len=MAX_RUNS,
            max_map_len=64,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack within bounds: {type(error).__name__}") from None
    if not isinstance(body, dict):
        raise MessageError(f"not a map but {type(body).__name__}")
    if body.get("v") != WIRE_VERSION:
        raise MessageError(f"wire version {body.get('v')!r}, spoken here: {WIRE_VERSION}")
    kind = body.get("k")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"unknown kind {kind!r:.80}")
    try:
        return cls(**{name: body[name] for name, _ in _CHECKS[cls] if name in body})
    except TypeError:
        missing = [f.name for f in dataclasses.fields(cls) if _is_required(f) and f.name not in body]
        raise MessageError(f"{kind}: missing {', '.join(missing)}") from None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _leaves(cls: type[Message]) -> list[type[Message]]:
    below = [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]
    return below + ([cls] if cls.KIND else [])


_CHECKS: dict[type[Message], tuple[tuple[str, Callable[[str, object], object]], ...]] = {
    cls: tuple(
        (field.name, CHECK_OF_TYPE[hints[field.name]])
        for hints in (get_type_hints(cls, include_extras=True),)
        for field in dataclasses.fields(cls)
    )
    for cls in _leaves(Message)
}
KINDS: dict[str, type[Message]] = {cls.KIND: cls for cls in _CHECKS}
