"""vLLM's extension point for logits, with which a request's first token becomes the one that :mod:`.first_token` names.

vLLM loads it in each engine where kvbus is installed (entry point ``vllm.logits_processors``), also where kvbus is not
the connector or has ``first_token`` off: there it does nothing. Of vLLM's two model runners the new one refuses to
start with a plugin that lacks its own interface, so this has both, and does nothing in that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as NewLogitsProcessor

from kvbus.wire import NO_TOKEN

from .first_token import FIRST_TOKENS, taker_of, told_token


@dataclass(frozen=True, slots=True)
class _Forced:
    """A request whose first token is given. ``output`` is vLLM's own list of its tokens, which grows."""

    token: int
    taker: str
    output: list[int]


class FirstTokenProcessor(LogitsProcessor, NewLogitsProcessor):  # type: ignore[misc]
    """See the module's docstring. Rows of the logits are requests of the batch."""

    def __init__(self, *_: Any) -> None:
        self._forced: dict[int, _Forced] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._forced, batch_update, _forced)
        for row, each in list(self._forced.items()):
            if each.output:
                FIRST_TOKENS.drop(each.taker)
                del self._forced[row]

    def apply(self, logits: Any, _: Any = None) -> Any:
        """Leave nothing but the token, whatever else was forbidden: prefill was allowed to choose it.

        Args:
            logits: ``[rows, vocabulary]``; changed in place.
        """
        for row, each in self._forced.items():
            if row < logits.shape[0] and each.token < logits.shape[1]:  # a peer may have said anything
                logits[row] = -float("inf")
                logits[row, each.token] = 0.0
        return logits

    def add_request(self, *_: Any) -> bool:
        """Of the new model runner's interface."""
        return False


def _forced(params: Any, prompt: list[int] | None, output: list[int]) -> _Forced | None:
    told = (params.extra_args or {}).get("kv_transfer_params") if FIRST_TOKENS.on and not output else None
    if not isinstance(told, dict):
        return None
    taker, token = taker_of(told, prompt), told_token(told)
    if token == NO_TOKEN:
        token = FIRST_TOKENS.get(taker)
    return _Forced(token, taker, output) if token != NO_TOKEN else None
