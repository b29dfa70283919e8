"""The first token of an answer, which prefill samples and decode goes on from.

Both legs may say ``takes_token`` in ``kv_transfer_params``: then prefill says which token it sampled, and decode's
first token is the one that came with its KV, if one came; else it samples its own. A decode leg may also say
``first_token`` (a token id: that one, whatever comes). The rank that receives the KV puts the token on
:data:`FIRST_TOKENS`; the sampler of the same process, :mod:`.first_token_processor`, looks there. Imports no vLLM.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kvbus.bounded import BoundedDict
from kvbus.wire import MAX_TOKEN_ID, NO_TOKEN

MAX_TOKENS = 1 << 12


class FirstTokens:
    """Tokens that have come and are not used up, by taker. Used by the worker's main thread only.

    A preempted request is looked up again; what nobody looks up makes room for what is newer.

    Attributes:
        on: whether this process is a rank of an engine that has ``first_token``; the sampler is loaded everywhere.
    """

    def __init__(self) -> None:
        self.on = False
        self._tokens: BoundedDict[str, int] = BoundedDict(MAX_TOKENS)

    def put(self, taker: str, token: int) -> None:
        self._tokens[taker] = token

    def get(self, taker: str) -> int:
        """The token, NO_TOKEN if none has come."""
        return self._tokens.get(taker, NO_TOKEN)

    def drop(self, taker: str) -> None:
        """The request has its first token."""
        self._tokens.pop(taker, None)


FIRST_TOKENS = FirstTokens()


def first_token_of(request: Any) -> int:
    """The token that a prefill has sampled; NO_TOKEN if its leg does not ask, or it has not exactly one."""
    if request.kv_transfer_params.get("takes_token") is not True:
        return NO_TOKEN
    tokens = request.output_token_ids
    return int(tokens[0]) if len(tokens) == 1 and 0 <= tokens[0] <= MAX_TOKEN_ID else NO_TOKEN


def taker_of(params: Mapping[str, Any], prompt: Sequence[int] | None) -> str:
    """What the sampler knows this request by, empty if it does not go on from prefill's token.

    The prompt's tokens are part of it: a transfer id that is used again must not bring another prompt's token.
    """
    name = params.get("transfer_id")
    if params.get("takes_token") is not True or not isinstance(name, str) or prompt is None:
        return ""
    return f"{name}:{hashlib.blake2b(array('I', prompt).tobytes(), digest_size=16).hexdigest()}"


def told_token(params: Mapping[str, Any]) -> int:
    """The token that the request itself names, NO_TOKEN if none."""
    token = params.get("first_token")
    return token if type(token) is int and 0 <= token <= MAX_TOKEN_ID else NO_TOKEN
