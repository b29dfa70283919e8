"""What a registration is to a transfer that may hold one already. Pure, and changes nothing.

An attempt that was superseded or cancelled is never written (F2, F4). What came over the pool may have been said by
anybody: it does not stand against a registration that was sent to this engine itself, nor against another one there.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from kvbus.protocol.prefill.transfer import Transfer
from kvbus.wire import Registration


class Claim(Enum):
    """How a registration stands to what the transfer holds."""

    FIRST = "nothing is held, or only what does not stand against it"
    REPEATED = "the same again: it, or the answer to it, was lost or is under way"
    CONFIRMED = "the same again, which only the pool had: now it may be written"
    NEWER = "a later attempt: it takes the place of what is held"
    OLDER = "an attempt that is over"
    OTHER = "another registration under the attempt that is held"
    POOLED = "over the pool, and another one is held"


def claim_of(registration: Registration, transfer: Transfer, *, direct: bool, bound: bool) -> Claim:
    """Judge a registration.

    Args:
        direct: it was sent to this engine, not to the pool.
        bound: and to this very incarnation of it.
    """
    held = transfer.registration
    if registration.attempt < transfer.lowest_attempt:
        return Claim.OLDER
    if held is None:
        return Claim.FIRST
    if same(held, registration):
        return Claim.CONFIRMED if bound and not transfer.bound else Claim.REPEATED
    if not transfer.bound and (bound or not direct):
        return Claim.FIRST
    if not direct:
        return Claim.POOLED
    if registration.attempt == held.attempt:
        return Claim.OTHER
    return Claim.NEWER if registration.attempt > held.attempt else Claim.OLDER


def same(held: Registration, again: Registration) -> bool:
    """Whether it is the same registration sent again: only what belongs to the sending may differ."""
    sending = {name: getattr(held, name) for name in ("source_incarnation", "echoes", "epoch")}
    return replace(again, **sending) == held
