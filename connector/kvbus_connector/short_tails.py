"""Which prompts a decode engine computes itself because little of them is missing from its prefix cache. Pure.

A few tokens more in a step that runs anyway cost less than a transfer's way over two engines. But every one of them
makes that step longer for all requests in it. So the tokens that are taken in one step are bounded, too: a request
that comes when they are used up takes the transfer.
"""

from __future__ import annotations


class ShortTails:
    """Admits tails into vLLM's next step.

    Args:
        most: tokens, of one prompt and of all in one step; 0 admits none.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def begin_step(self) -> None:
        self._left = self._most

    def take(self, tokens: int) -> bool:
        """Whether a prompt of which ``tokens`` are not cached is computed here."""
        if not 0 < tokens <= self._left:
            return False
        self._left -= tokens
        return True
