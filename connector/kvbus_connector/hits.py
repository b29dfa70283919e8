"""How much of its prompts this engine had in its prefix cache, for its heartbeats. EngineCore's thread only."""

from __future__ import annotations

from typing import Any


class Hits:
    """See the module's docstring. Bounded by the requests in vLLM's scheduler.

    Attributes:
        prompt_tokens: of requests that have ended; ``cached_tokens``: those of them that were cached here.
    """

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self.prompt_tokens = self.cached_tokens = 0

    def looked_up(self, request: Any, cached_tokens: int) -> None:
        """vLLM has looked into its prefix cache: the first time counts, later ones find what the request computed."""
        self._found.setdefault(request.request_id, cached_tokens)

    def finished(self, request: Any) -> None:
        found = self._found.pop(request.request_id, None)
        if found is not None:
            self.prompt_tokens += request.num_prompt_tokens
            self.cached_tokens += found
