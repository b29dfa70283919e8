"""How much of a request's prompt each engine has in its prefix cache, as the engines tell it, for the choice of them.

Engines tell it by keys of token ids (:mod:`kvbus.protocol.cache_keys`). A prompt that is text has none here, so an
engine is asked for them; see :mod:`kvbus.router.fleet.tokenizing`. All of it is a hint, and whatever goes wrong gives
none: then the choice is made by the prompt's head. Lives in one event loop.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvbus.bounded import BoundedDict
from kvbus.bus import Caches
from kvbus.protocol import Prompt
from kvbus.router.fleet.models import ModelNames
from kvbus.router.http import Raw
from kvbus.wire import Heartbeat

LONG_TOKENS = 2048
KNOWN_TOKENS = 512
MAX_SESSIONS = 1 << 16
HEAD_BYTES = 1 << 18  # some 40,000 token ids; to parse them takes 3 ms

TokenIds = Sequence[int]


class CachedPrompts:
    """See the module's docstring."""

    def __init__(self, caches: Caches, names: ModelNames) -> None:
        self._caches, self._names = caches, names
        self._seen: BoundedDict[str, None] = BoundedDict(MAX_SESSIONS)

    async def held(
        self,
        body: Mapping[str, Any],
        engines: Sequence[Heartbeat],
        session: str,
        tokens: int,
        tokenize: Callable[[], Awaitable[TokenIds | None]],
    ) -> dict[str, int]:
        """Tokens of the prompt that each of the engines has; empty if that is not known, or changes nothing.

        Args:
            session: its affinity key; ``tokens``: about how many the prompt has.
            tokenize: asks for the token ids of a prompt that is text.
        """
        if not _is_a_choice(engines) or not any(self._caches.index.knows(each.engine) for each in engines):
            return {}
        ids = token_ids_of(body)
        if ids is None:
            known = session in self._seen
            if session:
                self._seen[session] = None
            if tokens >= (KNOWN_TOKENS if known else LONG_TOKENS):
                ids = await tokenize()
        if not ids:
            return {}
        name, salt = body.get("model"), body.get("cache_salt")
        lora = name if isinstance(name, str) and self._names.is_adapter(name) else ""
        prompt = Prompt(engines[0].model, ids, lora, salt if isinstance(salt, str) else "")
        try:
            return self._caches.index.held(prompt)
        except ValueError:
            return {}


def token_ids_of(body: Mapping[str, Any]) -> TokenIds | None:
    """The ids of a prompt that comes as such, of a very long one the first ones; None for text, or several prompts."""
    prompt = body.get("prompt")
    if isinstance(prompt, Raw):
        if prompt.children or prompt.begins[:1] != b"[":
            return None
        head = bytes(prompt.raw[:HEAD_BYTES])
        try:
            prompt = json.loads(head if len(head) == len(prompt.raw) else head[: head.rfind(b",")] + b"]")
        except ValueError:
            return None
    return prompt if isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int else None


def _is_a_choice(engines: Sequence[Heartbeat]) -> bool:
    prefilling, decoding = sum(e.role.prefills for e in engines), sum(e.role.decodes for e in engines)
    return prefilling > 1 or decoding > 1
