"""What both ends of a transfer ask about a model's blocks. vLLM's own NIXL connector answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class BlockRules(Protocol):
    def clip(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The blocks of each KV group that hold what the other engine needs."""
        ...

    def external_tokens(self, prompt_tokens: int) -> int:
        """How many of a prompt's tokens the prefill engine computes."""
        ...

    def truncate(self, request: Any) -> None:
        """Drop from a prefill engine's request what the decode engine computes itself."""
        ...
