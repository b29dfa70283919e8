"""The engines as the router sees them: which there are, what they serve, how busy they are, which one is chosen.

Choosing is pure. Engines are asked for the names of their models, and for the token ids of long texts.
"""

from __future__ import annotations

from kvbus.router.fleet.affinity import CHARS_PER_TOKEN, SESSION_HEADER, affinity_of, prompt_tokens
from kvbus.router.fleet.endpoints import RETRY_AFTER_S, Fleet
from kvbus.router.fleet.models import merge_lists, one_model
from kvbus.router.fleet.policy import Choice, Key, choose_one, is_usable, key_of, one_per_port
from kvbus.router.fleet.readiness import Readiness, readiness_of

__all__ = [
    "CHARS_PER_TOKEN",
    "RETRY_AFTER_S",
    "SESSION_HEADER",
    "Choice",
    "Fleet",
    "Key",
    "Readiness",
    "affinity_of",
    "choose_one",
    "is_usable",
    "key_of",
    "merge_lists",
    "one_model",
    "one_per_port",
    "prompt_tokens",
    "readiness_of",
]
