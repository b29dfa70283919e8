"""A decode engine's end of history: what it offers of a request's prompt, and until when its blocks must stay.

See :mod:`kvbus_connector.history`. EngineCore's thread calls it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbus.wire import Heartbeat

from .identity import history_name, is_of_tokens
from .outgoing import Outgoing
from .steps import Steps

WITHDRAW_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class _Offer:
    request: Any
    name: str
    blocks: Sequence[int]
    tokens: int
    computed_in: int
    """The last step that may have computed any of it."""


class HistoryGiver:
    """The requests whose cached blocks are offered, until no rank can read them any more. Two rules:

    vLLM puts a block into its prefix cache when it plans the step that computes it. So a block may be written only
    after every step that was planned up to the offer has ended. The prefill engine is told how much there is at once.

    vLLM hears that the KV of such a request has come, or will not, only after every rank has let its blocks go. Until
    then the request waits, so vLLM neither frees its blocks nor runs it; one that runs may be preempted, and then vLLM
    takes the blocks without asking.
    """

    def __init__(self, own: Heartbeat, outgoing: Outgoing, block_size: int, steps: Steps) -> None:
        self._own, self._outgoing, self._block_size, self._steps = own, outgoing, block_size, steps
        self._new: list[_Offer] = []
        self._given: dict[str, str] = {}  # request id -> the id of its history's transfer
        self._held_back: dict[str, bool] = {}  # request id -> whether its receive has failed
        self._withdraw_at = 0.0

    def offer(self, request: Any, block_ids: Sequence[Sequence[int]], cached_tokens: int) -> None:
        """Blocks ``block_ids`` are allocated for a request whose KV comes; its first ``cached_tokens`` are there."""
        params = request.kv_transfer_params
        if not self._own.history or not params or params.pop("history", None) is not True:
            return  # popped: it is offered once, and to nobody when another prefill engine has taken over
        count, name = cached_tokens // self._block_size, history_name(request)
        if not count or len(block_ids) != 1 or not is_of_tokens(request):
            self._outgoing.say_no_history(request, name)
            return
        self._given[request.request_id] = name
        self._outgoing.announce_history(request, name, cached_tokens)
        self._new.append(_Offer(request, name, list(block_ids[0])[:count], cached_tokens, self._steps.next))

    def plan(self) -> bool:
        """vLLM has planned a step. Returns whether the next one must come soon."""
        waiting = []
        for offer in self._new:
            if not self._steps.have_ended(offer.computed_in):
                waiting.append(offer)
            else:
                self._outgoing.offer_history(offer.request, offer.name, [offer.blocks], offer.tokens)
        self._new = waiting
        if self._held_back and time.monotonic() >= self._withdraw_at:  # the prefill engine may be gone
            self._withdraw_at = time.monotonic() + WITHDRAW_AGAIN_S
            for request_id in self._held_back:
                self._outgoing.withdraw(self._given[request_id])
        return bool(waiting)

    def admit(self, received: set[str], failed: set[str], sent: set[str]) -> None:
        """Hold back of ``received`` what vLLM must not hear yet, and add what it may hear now.

        Args:
            failed: those of ``received`` whose KV has not come.
            sent: requests whose blocks no rank reads any more.
        """
        for request_id in sent & self._given.keys():
            del self._given[request_id]
            sent.discard(request_id)  # vLLM has not been told of it
        for request_id in received & self._given.keys():
            self._held_back[request_id] = request_id in failed
            self._withdraw_at = 0.0
            received.discard(request_id)
            failed.discard(request_id)
        for request_id in self._held_back.keys() - self._given.keys():
            received.add(request_id)
            if self._held_back.pop(request_id):
                failed.add(request_id)
