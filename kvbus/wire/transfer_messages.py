"""What is said about one transfer: by the decode engine, by the prefill engine and its ranks, by a router."""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.wire.blocks import BlockRuns
from kvbus.wire.fields import NO_TOKEN, Echoes, TokenId
from kvbus.wire.message import Message


@dataclass(frozen=True, slots=True)
class FromSink(Message):
    """What a decode engine says about one attempt at one transfer."""

    SPEAKER = ("sink_engine", "sink_incarnation")
    SEALED = True

    transfer_id: str
    attempt: int
    sink_engine: str
    sink_incarnation: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Registration(FromSink):
    """The blocks that a decode engine has allocated for the KV of a prompt.

    ``blocks`` holds only those still to be filled, the prompt's last ones; ``request_id`` is the decode engine's.
    ``source_incarnation`` is that of the prefill engine it was sent to: only this one may write; 0 while it is unknown.
    ``echoes`` and ``epoch``: see :mod:`kvbus.protocol.lease`. ``digest`` is of the prompt's token ids and its LoRA
    adapter, empty if there are neither. ``takes_token``: the request goes on from the token that prefill sampled.
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
    takes_token: bool = False


@dataclass(frozen=True, slots=True)
class Wanted(FromSink):
    """The decode engine has this request but no blocks for it yet: keep its KV for another block lease."""

    KIND = "wanted"


@dataclass(frozen=True, slots=True)
class Delivered(FromSink):
    """The decode engine's first token is out, or the request is over: nobody will need this transfer's KV again."""

    KIND = "delivered"


@dataclass(frozen=True, slots=True)
class Cancel(FromSink):
    """The decode engine no longer wants this attempt. ``release``: nor any other; P may free its blocks.

    ``local_tokens``: it computes the prompt itself, of which so many tokens are not in its cache; 0 if it does not.
    """

    KIND = "cancel"

    reason: str
    release: bool = True
    local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FromSource(Message):
    """What a prefill engine says about one transfer."""

    SPEAKER = ("source_engine", "source_incarnation")
    SEALED = True

    transfer_id: str
    source_engine: str
    source_incarnation: int


@dataclass(frozen=True, slots=True)
class PrefillProgress(FromSource):
    """``computed`` of the prompt's ``total`` tokens are computed; 0 when the request has just arrived.

    The scheduler numbers what it says of prefills, from 1: ranks so know what they have heard of it already.
    """

    KIND = "progress"

    request_id: str
    computed: int
    total: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class PrefillCompleted(FromSource):
    """The prefill of ``tokens`` prompt tokens is done; ``blocks`` hold its KV and stay until the transfer ends.

    ``first_token``: the one it sampled.
    """

    KIND = "completed"

    request_id: str
    blocks: BlockRuns
    tokens: int
    digest: str = ""
    traceparent: str = ""
    number: int = 0
    first_token: TokenId = NO_TOKEN


@dataclass(frozen=True, slots=True)
class PrefillFailed(FromSource):
    """There will be no KV for this transfer."""

    KIND = "prefill_failed"

    request_id: str
    reason: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class FromSourceRank(FromSource):
    """What rank ``rank`` of a prefill engine's ``ranks`` says about one attempt, to the decode engine."""

    attempt: int
    rank: int
    ranks: int
    request_id: str


@dataclass(frozen=True, slots=True)
class RegistrationAck(FromSourceRank):
    """The registration is held (``refused`` empty), or will never be served (``refused`` says why).

    ``claimed``: the prefill engine has the request; an acknowledgement is sent again when it comes, and with each
    :class:`PrefillProgress` of it. Decode engines do not listen to those themselves: each would hear all of the pool's.
    """

    KIND = "ack"

    refused: str = ""
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class CancelAck(FromSourceRank):
    """No WRITE of this attempt is posted, and none will be."""

    KIND = "cancel_ack"


@dataclass(frozen=True, slots=True)
class TransferStarted(FromSourceRank):
    """A WRITE is posted: from now on it is worth polling for its notification."""

    KIND = "started"


@dataclass(frozen=True, slots=True)
class TransferDone(FromSourceRank):
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
class TransferFailed(FromSourceRank):
    """This rank will not (or not completely) write; none of its WRITEs is outstanding.

    ``kept``: the prompt's KV is computed, and stays for another attempt, for a block lease.
    """

    KIND = "failed"

    reason: str = ""
    kept: bool = False


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
