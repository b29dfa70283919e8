"""HTTP on both sides of the router: clients' connections and bodies, engines' answers, server-sent events.

Nothing here chooses an engine, or knows what a request is for.
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
    RefusedError,
    error,
    error_body,
    respond,
)
from kvbus.router.http.client_address import Clients
from kvbus.router.http.headers import REQUEST_ID, forwarded, request_id_of, returned
from kvbus.router.http.in_flight import InFlight
from kvbus.router.http.lazy_json import Content, Raw
from kvbus.router.http.listener import Listener
from kvbus.router.http.request_body import Reader, model_and_pieces, parse
from kvbus.router.http.sockets import room_for
from kvbus.router.http.sse import Failure, Nothing, Token, error_event, look, whole_events

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
    "Clients",
    "Content",
    "Failure",
    "InFlight",
    "Listener",
    "Nothing",
    "Raw",
    "Reader",
    "RefusedError",
    "Token",
    "error",
    "error_body",
    "error_event",
    "forwarded",
    "look",
    "model_and_pieces",
    "parse",
    "request_id_of",
    "respond",
    "returned",
    "room_for",
    "upstream",
    "whole_events",
]
