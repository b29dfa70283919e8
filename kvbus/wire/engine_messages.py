"""What engines say of themselves, and what they are asked: membership, leases, metadata, drains, clocks, marks."""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.wire.fields import Address, Echoes, Key, MarkList, Pairs, Role, State
from kvbus.wire.message import Message

# A step that lasts longer may keep a request unannounced for long; see :mod:`kvbus.protocol.decode.patience`.
LONG_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """An engine is there. ``incarnation`` is the wall-clock ns of its start: larger is newer.

    ``requests`` are in its scheduler, or only their KV is, for another engine; of their prompts' tokens,
    ``queued_tokens`` are still to be computed here.
    ``step_s``: its scheduler has been in its present step for so long; requests that came since are not announced yet.
    ``compat`` holds what must be equal in two engines that exchange KV; :func:`kvbus.protocol.membership.differences`
    names what is not.
    ``public_key`` and ``farewell``: see :mod:`kvbus.bus.keys`.
    ``data_parallel``: other ranks share the address; ``data_parallel_rank`` tells vLLM which one is meant.
    ``cache_block_size``: it says what is in its prefix cache, of so many tokens a block; 0: it does not.
    ``cache_number``: of its last :class:`~kvbus.wire.cache_messages.CacheUpdate`.
    Of ``prompt_tokens`` in requests that have ended, ``cached_tokens`` were in its prefix cache.
    ``first_token``: when asked it says which token its prefill sampled, or goes on from the one that another sampled.
    ``history``: a decode engine that has it also writes what it has of a prompt into prefill engines that have it.
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
    history: bool = False
    first_token: bool = False
    cache_block_size: int = 0
    cache_number: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def is_in_long_step(self) -> bool:
        """Whether a request may have come to this engine some time ago without being announced yet."""
        return self.step_s > LONG_STEP_S

    @property
    def writes(self) -> bool:
        """Whether it writes KV into any other engine."""
        return self.role.prefills or self.history

    @property
    def is_written(self) -> bool:
        """Whether any other engine writes KV into it."""
        return self.role.decodes or self.history

    def may_write_into(self, sink: Heartbeat) -> bool:
        """Whether KV can go this way: from prefill to decode, and of history back."""
        forth = self.role.prefills and sink.role.decodes
        return forth or (self.history and sink.history and self.role.decodes and sink.role.prefills)


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """This incarnation of the engine is leaving. Its heartbeats have said the digest of ``word``."""

    KIND = "bye"
    SPEAKER = ("engine", "incarnation")

    engine: str
    incarnation: int
    word: Key = b""


@dataclass(frozen=True, slots=True)
class Who(Message):
    """Asks every engine for a heartbeat at once."""

    KIND = "who"
    SPEAKER = ("sender", "")

    sender: str


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
    """A decode engine has heard these pulses, and wants what it registered in this epoch.

    See :mod:`kvbus.protocol.lease`.
    """

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
