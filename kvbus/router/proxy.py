"""Requests that the router passes on as they are: to one engine, to the holder of a response, to all of a model.

The one rule: the client gets what an engine says, whatever it is. The router speaks for itself only where no engine
answered, or where several did. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from random import Random

from aiohttp import hdrs, web
from multidict import CIMultiDict

from kvbus.router.fleet import (
    CHARS_PER_TOKEN,
    choose_one,
    is_usable,
    merge_lists,
    one_model,
    one_per_port,
)
from kvbus.router.http import (
    BAD_GATEWAY,
    INVALID,
    MODEL,
    REQUEST_ID,
    Answer,
    Content,
    Reader,
    RefusedError,
    error,
    error_body,
    error_event,
    forwarded,
    model_and_pieces,
    parse,
    request_id_of,
    respond,
    returned,
    upstream,
)
from kvbus.router.request import DECODE_HEADER, UNBUFFERED, Resources
from kvbus.router.routes import Route
from kvbus.router.stored_responses import StoredResponses
from kvbus.wire import Heartbeat

LOOKUP_S = 30.0  # for what needs no forward pass: a frozen engine must not hold a client for ever


class Proxy:
    """See the module's docstring."""

    def __init__(self, resources: Resources, reader: Reader, stored: StoredResponses, chance: Random) -> None:
        self._session, self._fleet, self._settings = resources.session, resources.fleet, resources.settings
        self._reader, self._stored, self._chance = reader, stored, chance

    async def to_one(self, route: Route, request: web.Request) -> web.StreamResponse:
        """To an engine that serves the model in the request; if it is lost before it answers, to another.

        Raises:
            RefusedError: there is none.
        """
        content = await self._reader.read(request)
        model, parts = await model_and_pieces(content, request.headers.get("Content-Type", ""))
        engines = await self._fleet.find(model, request.headers)
        request[MODEL] = engines[0].model
        patience_s = self._settings.first_token_s if route.computes else LOOKUP_S
        tokens = len(content) // CHARS_PER_TOKEN if route.computes else 0
        loads = self._fleet.loads
        failed = self._fleet.no_decode_engine(None)
        for _ in range(2):
            engine = choose_one(loads.preferred(engines), loads.decode, self._chance)
            if engine is None:
                break
            try:
                with loads.counted(engine, tokens):
                    response = await self._relay(request, engine, parts, patience_s)
            except upstream.LOST as failure:
                loads.suspect(engine)
                failed = _lost(engine, failure)
                engines = [other for other in engines if other is not engine]
                continue
            if upstream.engine_failed(response.status):
                loads.suspect(engine)
            else:
                loads.trust(engine)
            return response
        return respond(failed)

    async def to_holder(self, request: web.Request) -> web.StreamResponse:
        """To the engine that keeps the response whose id is in the path."""
        engines = self._stored.may_hold(None)
        if not engines:
            return respond(self._fleet.no_decode_engine(None))
        response_id = request.match_info["response_id"]
        engine = await self._stored.holder(response_id, engines, request.headers) or engines[0]
        try:
            return await self._relay(request, engine, [], self._settings.first_token_s)
        except upstream.LOST as failure:
            return respond(_lost(engine, failure))

    async def to_every(self, route: Route, request: web.Request) -> web.StreamResponse:
        """To every engine of a model, prefill and decode: a LoRA adapter is of use only where both have it."""
        content = await self._reader.read(request)
        body = await parse(content)
        engines = await self._engines_of_adapter(route, body, request.headers)
        headers = _headers(request)

        async def post(engine: Heartbeat) -> Answer:
            url = upstream.url_of(engine, route.path)
            try:
                async with (
                    asyncio.timeout(self._settings.first_token_s),
                    self._session.post(url, data=upstream.Pieces([content]), headers=headers) as answer,
                ):
                    return await upstream.whole(answer)
            except upstream.LOST as failure:
                return _lost(engine, failure)

        answers = await asyncio.gather(*(post(engine) for engine in engines))
        await self._fleet.discovery.ask(engines, forwarded(request.headers))
        return respond(_combined(engines, answers))

    async def models(self, request: web.Request) -> web.StreamResponse:
        """What the decode engines list to this client, as one list, or one model of it."""
        engines = one_per_port(self._fleet.decoding(None))
        if not engines:
            return respond(self._fleet.no_decode_engine(None))
        prefill = [engine for engine in self._fleet.serving(None) if not engine.role.decodes and is_usable(engine)]
        headers, ask = forwarded(request.headers), self._fleet.discovery.ask
        answers, _ = await asyncio.gather(ask(engines, headers), ask(one_per_port(prefill), headers))  # _: learns names
        lists = [answer for answer in answers if answer.status == 200]
        if not lists:
            silent = error(502, f"decode engine {engines[0].engine}: it did not answer in time", BAD_GATEWAY)
            return respond(answers[0] if answers else silent)
        listing = merge_lists(lists)
        name = request.match_info.get("name")
        return respond(listing if name is None else one_model(listing, name))

    async def _relay(
        self, request: web.Request, engine: Heartbeat, parts: Sequence[Content | memoryview], patience_s: float
    ) -> web.StreamResponse:
        """Pass the request on, and the answer back.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: the engine was lost before the client got anything.
        """
        url, headers = upstream.url_of(engine, request.path_qs), _headers(request)
        headers.update(upstream.rank_of(engine))
        data = upstream.Pieces(parts) if parts else None
        async with (
            asyncio.timeout(patience_s) as patience,
            self._session.request(request.method, url, data=data, headers=headers) as answer,
        ):
            if answer.content_type != "text/event-stream":
                whole = respond(await upstream.whole(answer))
                whole.headers[DECODE_HEADER] = engine.engine
                return whole
            patience.reschedule(None)
            response = web.StreamResponse(status=answer.status, headers=returned(answer.headers))
            response.headers[DECODE_HEADER] = engine.engine
            for name, value in UNBUFFERED.items():
                response.headers.setdefault(name, value)
            await response.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except upstream.LOST as failure:
                message = f"engine {engine.engine} was lost in the middle of its answer: {upstream.why(failure)}"
                await response.write(error_event(error_body(502, message, BAD_GATEWAY), named=True))
            await response.write_eof()
            return response

    async def _engines_of_adapter(
        self, route: Route, body: Mapping[str, object], headers: Mapping[str, str]
    ) -> list[Heartbeat]:
        """The engines that an adapter is loaded into, or unloaded from."""
        model, adapter = body.get("model"), body.get("lora_name")
        if route.path.endswith("unload_lora_adapter") and isinstance(adapter, str):
            model = adapter
        engines = await self._fleet.everywhere(model if isinstance(model, str) else None, headers)
        models = sorted({engine.model for engine in engines})
        if model is None and len(models) > 1:
            message = f"model: which one is the adapter for? One of {', '.join(models[:20])}"
            raise RefusedError(error(400, message, INVALID, "model"))
        return one_per_port(engines)


def _combined(engines: Sequence[Heartbeat], answers: Sequence[Answer]) -> Answer:
    """The answers of several engines as one: a success only if all are, and else an error with what each said."""
    each = {
        engine.engine: {"status": answer.status, "message": answer.body[:2000].decode(errors="replace")}
        for engine, answer in zip(engines, answers, strict=True)
    }
    statuses = sorted({answer.status for answer in answers})
    done = sum(answer.status < 400 for answer in answers)
    status, body = 200, {"engines": each}
    if done < len(answers):
        status = statuses[0] if len(statuses) == 1 else 502
        said = next(f"{name}: {said['message']:.300}" for name, said in each.items() if int(str(said["status"])) >= 400)
        message = f"done by {done} of {len(answers)} engines, and not undone there; {said}"
        body = json.loads(error_body(status, message, BAD_GATEWAY if status == 502 else INVALID)) | body
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _headers(request: web.Request) -> CIMultiDict[str]:
    """A client's headers for a body that is passed on as it came."""
    headers = forwarded(request.headers)
    for name, value in (
        (hdrs.CONTENT_TYPE, request.headers.get(hdrs.CONTENT_TYPE)),
        (REQUEST_ID, request_id_of(request.headers)),
    ):
        if value:
            headers[name] = value
    return headers


def _lost(engine: Heartbeat, failure: BaseException) -> Answer:
    return error(502, f"decode engine {engine.engine}: {upstream.why(failure)}", BAD_GATEWAY)
