"""One client's request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbus.wire import Role


@dataclass(slots=True)
class Request:
    """One client's request: what the router and both of its engines know of it.

    Attributes:
        on_event: called with ``prefilled`` by the prefill engine, and by the decode engine with how the request ended.
        on_decode_lost: called when its decode engine died before the first token; returns whether another one is asked.
        takeover_s: how long a decode engine waits for the router to replace a lost prefill engine.
        bad_blocks: the decode engine registers blocks that it does not have.
        short_tail: the decode engine computes it itself.
        history: the router tells both engines that the decode engine may have the prompt's beginning, and the prefill
            engine lacks it.
        source_cached_blocks: how many of the prompt's blocks the prefill engine has in its cache.
        mixed_up: the engines were given different prompts under one transfer id.
    """

    transfer_id: str
    prompt_blocks: int
    cached_blocks: int
    hint: str = ""
    attempt: int = 1
    started: float = 0.0
    on_event: Callable[[str], None] = lambda _: None
    on_decode_lost: Callable[[], bool] = lambda: False
    abort_after_s: float | None = None
    takeover_s: float = 0.0
    prefill_fails: bool = False
    bad_blocks: bool = False
    short_tail: bool = False
    history: bool = False
    source_cached_blocks: int = 0
    mixed_up: bool = False
    source: str = ""
    sink: str = ""
    prefilled: bool = False
    ended: str = ""
    ended_at: float = 0.0

    def prompt_on(self, role: Role) -> str:
        """What this engine was given, in short."""
        return f"{self.transfer_id}'" if self.mixed_up and role.decodes else self.transfer_id
