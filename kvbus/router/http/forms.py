"""The model that a body names which is passed on as it came: in JSON, or in a form with files. Pure."""

from __future__ import annotations

import re

from kvbus.router.http.bodies import Content, pieces
from kvbus.router.http.validation import parse

MAX_PARTS = 64
MAX_PART_HEAD_BYTES = 1 << 12
_MODEL_PART = re.compile(rb'content-disposition:[^\r\n]*[; ]name="?model"?\s*(?:;|\r|$)', re.IGNORECASE)


async def looked_at(content: Content, content_type: str) -> tuple[str | None, list[Content | memoryview]]:
    """The model that a body names, in JSON or in a form, None if it names none; and what of the body goes on.

    Raises:
        BadRequestError: it should be JSON and is not, or names something that is no model.
    """
    kind, _, parameters = content_type.partition(";")
    if kind.strip().lower() == "multipart/form-data":
        boundary = re.search(r'boundary="?([^";]{1,70})', parameters, re.IGNORECASE)
        model = _in_form(content, b"--" + boundary[1].encode()) if boundary else None
        return model, [content]
    if not content:
        return None, []
    body = await parse(content)
    return body.get("model"), pieces(body)


def _in_form(content: Content, delimiter: bytes) -> str | None:
    at = content.find(delimiter)
    for _ in range(MAX_PARTS):
        head_end = content.find(b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES)
        after = content.find(b"\r\n" + delimiter, head_end)
        if at < 0 or head_end < 0 or after < 0:
            return None
        if _MODEL_PART.search(content, at, head_end + 2):
            return content[head_end + 4 : after][:256].decode(errors="replace") or None
        at = after + 2
    return None
