"""Which requests share a prefix, and about how many tokens a prompt has. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvbus.router.http import Raw

SESSION_HEADER = "X-Session-Id"
HEAD_CHARS = 512
HEAD_TOKENS = 128
HEAD_BYTES = 2048
CHARS_PER_TOKEN = 4
_SESSION_KEYS = ("user", "prompt_cache_key")


def affinity_of(body: Mapping[str, Any], header: str | None) -> str:
    """A key that requests with the same prefix have in common; empty if there is none.

    It is the client's own name of its session (``X-Session-Id``, ``prompt_cache_key``, ``user``), else a hash of the
    prompt's head. The head of a chat are its messages up to the user's first one, which every later turn repeats.
    """
    for name in (header, *(body.get(key) for key in _SESSION_KEYS)):
        if isinstance(name, str) and name:
            return name
    messages, prompt = body.get("messages"), body.get("prompt")
    for long in (messages, prompt):
        if isinstance(long, Raw):
            return hashlib.blake2b(long.head[:HEAD_BYTES], digest_size=16).hexdigest()
    if isinstance(messages, list) and messages:
        first = next((at for at, each in enumerate(messages) if _role(each) == "user"), 0)
        head = json.dumps(messages[: first + 1])
    elif isinstance(prompt, str) and prompt:
        head = prompt[:HEAD_CHARS]
    elif isinstance(prompt, list) and prompt:
        first_prompt = prompt if isinstance(prompt[0], int) else prompt[0]
        size = HEAD_CHARS if isinstance(first_prompt, str) else HEAD_TOKENS
        head = json.dumps(first_prompt[:size]) if isinstance(first_prompt, str | list) else ""
    else:
        return ""
    return hashlib.blake2b(head.encode(), digest_size=16).hexdigest()


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """About how many tokens the prompts of a request have. Token ids are counted; text is estimated."""
    prompt = body.get("prompt")
    if isinstance(prompt, Raw) and prompt.begins[:1] == b"[" and not prompt.children:
        return prompt.items
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(len(each) if isinstance(each, list) else _estimate(each) for each in prompt)
    return _estimate(prompt if prompt is not None else body.get("messages"))


def _estimate(value: Any) -> int:
    text = value if isinstance(value, str) else value.raw if isinstance(value, Raw) else json.dumps(value)
    return 1 + len(text) // CHARS_PER_TOKEN


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None
