"""Every error that leaves the router has OpenAI's form, also those that the HTTP library raises."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from kvbus.router.http import INVALID, NOT_FOUND, Answer, BadRequestError, error
from kvbus.router.routes import unknown

logger = logging.getLogger(__name__)


@web.middleware
async def in_openais_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as refused:
        return _response(refused.answer, close=refused.close)
    except web.HTTPNotFound:
        return _response(error(404, unknown(request.path), NOT_FOUND))
    except web.HTTPMethodNotAllowed as refused:
        allowed = ", ".join(sorted(refused.allowed_methods))
        answer = error(
            405,
            f"{request.method} {request.path} is not allowed; allowed: {allowed}",
            INVALID,
            None,
            {"Allow": allowed},
        )
        return _response(answer)
    except web.HTTPException as refused:
        return _response(error(refused.status, refused.reason, INVALID))
    except Exception:
        logger.exception("kvbus: a fault of the router, %s %s", request.method, request.path)
        return _response(error(500, "a fault of the router; see its log", "internal_error"))


def _response(answer: Answer, *, close: bool = False) -> web.Response:
    response = web.Response(status=answer.status, body=answer.body, headers=answer.headers)
    if close:
        response.force_close()
    return response
