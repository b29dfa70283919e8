"""Counts every request once, by route, method, status and model, and writes a line of the access log for it.

No prompt and no key is written. Lives in one event loop.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler

from kvbus.errors import ConfigError
from kvbus.router.http.client_address import Clients
from kvbus.router.http.headers import REQUEST_ID

FORMS = ("off", "text", "json")
CLIENT_LEFT = 499  # nginx's status for it
OTHER = "other"
MODEL = web.RequestKey("model", str)
"""The engines' own name of the model that serves a request, so that clients cannot make up label values."""
_KVBUS_HEADERS = ("X-KVBus-Prefill", "X-KVBus-Decode", "X-KVBus-Attempt", "X-KVBus-Transfer-Id")


class Access:
    """See the module's docstring.

    Args:
        form: one of :data:`FORMS`.
        count: called with route, method, status and model.

    Raises:
        ConfigError: ``form`` is unknown.
    """

    def __init__(self, form: str, count: Callable[[str, str, int, str], None], clients: Clients) -> None:
        if form not in FORMS:
            raise ConfigError("--access-log", form, ", ".join(FORMS))
        self._form, self._count, self._clients = form, count, clients
        self._logger = logging.getLogger("kvbus.access")
        if form == "off":
            return
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        if not self._logger.handlers:
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(logging.Formatter("%(message)s"))
            self._logger.addHandler(handler)

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        started, response = time.monotonic(), None
        try:
            response = await handler(request)
            return response
        finally:
            status = response.status if response is not None else CLIENT_LEFT
            self._count(_route_of(request), request.method, status, request.get(MODEL, ""))
            if self._form != "off":
                self._write(request, response, status, time.monotonic() - started)

    def _write(self, request: web.Request, response: web.StreamResponse | None, status: int, took_s: float) -> None:
        headers = response.headers if response is not None else {}
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "client": self._clients.address(request.headers, request.remote),
            "method": request.method,
            "path": request.path[:256],
            "status": status,
            "model": request.get(MODEL, ""),
            "took_s": round(took_s, 4),
            "bytes": response.body_length if response is not None and response.prepared else 0,
            "stream": headers.get("Content-Type", "").startswith("text/event-stream"),
            "request_id": headers.get(REQUEST_ID, ""),
        }
        line |= {
            name.removeprefix("X-KVBus-").lower().replace("-", "_"): headers.get(name, "") for name in _KVBUS_HEADERS
        }
        if self._form == "json":
            self._logger.info(json.dumps(line))
        else:
            self._logger.info(" ".join(f"{name}={json.dumps(value)}" for name, value in line.items()))


def _route_of(request: web.Request) -> str:
    """The route's own path, so that clients cannot make up label values."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else OTHER
