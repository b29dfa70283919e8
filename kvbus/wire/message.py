"""What all messages have in common: they are frozen, and checked when they are built.

A message is a frozen dataclass; its fields' annotations say what is allowed in them (:mod:`kvbus.wire.fields`), and its
class variables who may say it. To add a field, add it to its class, with a default if older engines may not send it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from kvbus.wire.fields import CHECK_OF_TYPE

FIRST_ATTEMPT = 1
HISTORY_SUFFIX = "~history"
"""Ends the id of the transfer in which decode gives prefill what it has of a prompt; the prompt's own is before it."""


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages. ``KIND`` is the tag on the wire.

    ``SPEAKER`` names the fields that say who speaks: an id, which the last token of the subject must repeat, and the
    incarnation of an engine. What is ``SEALED`` is said by one engine to another, or to itself.
    """

    KIND: ClassVar[str] = ""
    SPEAKER: ClassVar[tuple[str, str]] = ("", "")
    SEALED: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, check in checks_of(type(self)):
            value = getattr(self, name)
            if (checked := check(name, value)) is not value:
                object.__setattr__(self, name, checked)

    @property
    def speaker(self) -> tuple[str, int]:
        """Who says it, and which incarnation of it: empty and 0 if the message does not tell."""
        name, incarnation = self.SPEAKER
        return getattr(self, name) if name else "", getattr(self, incarnation) if incarnation else 0


Checks = tuple[tuple[str, Callable[[str, object], object]], ...]
_CHECKS: dict[type[Any], Checks] = {}


def checks_of(cls: type[Any]) -> Checks:
    """The names of a message's fields, each with the check that its values pass."""
    checks = _CHECKS.get(cls)
    if checks is None:
        hints = get_type_hints(cls, include_extras=True)
        checks = tuple((field.name, CHECK_OF_TYPE[hints[field.name]]) for field in dataclasses.fields(cls))
        _CHECKS[cls] = checks
    return checks
