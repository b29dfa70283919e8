"""What a NATS server's refusals mean, for whoever has to act on them. Pure.

The client library gives them as text, in lower case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

INBOXES = "_INBOX.>"
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)
_LOGIN = ("authorization violation", "authorization failed", "authentication")
_CUT = ("connection reset", "unexpected eof", "broken pipe", "empty response")
_TLS = ("ssl", "tls", "certificate", "secure connection")


@dataclass(frozen=True, slots=True)
class Denied:
    """A permission that this user lacks: to ``publish`` or to ``subscribe``."""

    verb: str
    subject: str

    @property
    def text(self) -> str:
        return f"this NATS user may not {self.verb} to {self.subject}"


def denied(text: str) -> Denied | None:
    """The permission that ``text`` is about, if it is about one; an inbox, whose name is random, as :data:`INBOXES`."""
    found = _DENIED.search(text)
    if found is None:
        return None
    subject = INBOXES if found[2].lower().startswith("_inbox.") else found[2]
    return Denied("publish" if found[1].lower() == "publish" else "subscribe", subject)


def explain(text: str, before: str = "") -> str:
    """Why a connection was not made, if a server refused it; empty if none answered.

    Args:
        before: what was said of the last try. A server that closes may have refused without being heard: it stands.
    """
    lower = text.lower()
    if any(words in lower for words in _LOGIN):
        return "it refused the login: are user and password (or token, or keys) right?"
    if any(words in lower for words in _TLS):
        return f"TLS failed: {' '.join(text.split())}"
    if any(words in lower for words in _CUT):
        return before or "it closed the connection"
    return ""
