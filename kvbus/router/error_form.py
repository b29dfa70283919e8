"""Every error that leaves the router has OpenAI's form, also those that aiohttp raises."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from kvbus.router.http import INVALID, NOT_FOUND, RefusedError, error, respond
from kvbus.router.routes import unknown

logger = logging.getLogger(__name__)


@web.middleware
async def in_openais_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as refused:
        return respond(refused.answer, close=refused.close)
    except web.HTTPNotFound:
        return respond(error(404, unknown(request.path), NOT_FOUND))
    except web.HTTPMethodNotAllowed as refused:
        allowed = ", ".join(sorted(refused.allowed_methods))
        message = f"{request.method} {request.path} is not allowed; allowed: {allowed}"
        return respond(error(405, message, INVALID, headers={"Allow": allowed}))
    except web.HTTPException as refused:
        return respond(error(refused.status, refused.reason, INVALID))
    except Exception:
        logger.exception("kvbus: a fault of the router, %s %s", request.method, request.path)
        return respond(error(500, "a fault of the router; see its log", "internal_error"))
