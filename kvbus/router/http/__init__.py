"""HTTP on both sides of the router: clients' connections and bodies, engines' answers, server-sent events.

Here is what is said about requests and answers as HTTP. Which engine gets a request, and what becomes of it, is not
known here.
"""

from __future__ import annotations

from kvbus.router.http import upstream
from kvbus.router.http.access_log import MODEL, Access
from kvbus.router.http.answers import (
    BAD_GATEWAY,
    INVALID,
    NOT_FOUND,
    OVERLOADED,
    UNAVAILABLE,
    Answer,
    error,
    error_body,
)
from kvbus.router.http.bodies import Content, Raw
from kvbus.router.http.client_address import Clients
from kvbus.router.http.forms import looked_at
from kvbus.router.http.headers import REQUEST_ID, request_id_of
from kvbus.router.http.in_flight import InFlight
from kvbus.router.http.listener import Listener, room_for
from kvbus.router.http.sse import Failure, Nothing, Token, error_event, look, whole_events
from kvbus.router.http.validation import BadRequestError, Reader, parse

__all__ = [
    "BAD_GATEWAY",
    "INVALID",
    "MODEL",
    "NOT_FOUND",
    "OVERLOADED",
    "REQUEST_ID",
    "UNAVAILABLE",
    "Access",
    "Answer",
    "BadRequestError",
    "Clients",
    "Content",
    "Failure",
    "InFlight",
    "Listener",
    "Nothing",
    "Raw",
    "Reader",
    "Token",
    "error",
    "error_body",
    "error_event",
    "look",
    "looked_at",
    "parse",
    "request_id_of",
    "room_for",
    "upstream",
    "whole_events",
]
