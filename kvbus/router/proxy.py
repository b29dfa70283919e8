"""Requests that engines answer as they are: by one of them, by the one that keeps a response, by every one of a model.

The one rule: what an engine says reaches the client, whatever it is; the router speaks only where no engine did, or
where several spoke. One adapter between the server's side and the engines'; lives in one event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from random import Random

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict

from kvbus.router.fleet import (
    CHARS_PER_TOKEN,
    RETRY_AFTER_S,
    Asker,
    Fleet,
    Loads,
    choose_one,
    is_usable,
    key_of,
    merge_models,
    one_model,
)
from kvbus.router.http import (
    BAD_GATEWAY,
    INVALID,
    MODEL,
    NOT_FOUND,
    REQUEST_ID,
    UNAVAILABLE,
    Answer,
    BadRequestError,
    Content,
    Reader,
    error,
    error_body,
    error_event,
    looked_at,
    parse,
    request_id_of,
    upstream,
)
from kvbus.router.request import DECODE_HEADER, UNBUFFERED
from kvbus.router.routes import Route
from kvbus.router.settings import Settings
from kvbus.wire import Heartbeat, State

ASIDE_S = 30.0  # for what needs no forward pass: a frozen engine must not hold a client for ever
HOLDER_S = 5.0
_RESPONSE_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")


class Passing:
    """See the module's docstring."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        fleet: Fleet,
        asker: Asker,
        reader: Reader,
        loads: Loads,
        settings: Settings,
        chance: Random,
    ) -> None:
        self._session, self._fleet, self._asker, self._reader = session, fleet, asker, reader
        self._loads, self._settings, self._chance = loads, settings, chance

    async def to_one(self, route: Route, request: web.Request) -> web.StreamResponse:
        """To an engine that serves the model that the request names; if that is lost before it answers, to another.

        Raises:
            BadRequestError: there is none.
        """
        content = await self._reader.content(request)
        model, parts = await looked_at(content, request.headers.get("Content-Type", ""))
        engines = await self._fleet.find(model, request.headers)
        request[MODEL] = engines[0].model
        patience_s = self._settings.first_token_s if route.computes else ASIDE_S
        tokens = len(content) // CHARS_PER_TOKEN if route.computes else 0
        failed = self._fleet.nobody(None)
        for _ in range(2):
            trusted = [engine for engine in engines if not self._loads.is_suspect(engine)] or engines
            engine = choose_one(trusted, self._loads.decode, self._chance)
            if engine is None:
                break
            try:
                with self._loads.counted(engine, tokens):
                    said = await self._relay(request, engine, parts, patience_s)
                if upstream.engine_failed(said.status):
                    self._loads.suspect(engine)
                else:
                    self._loads.trust(engine)
                return said
            except upstream.LOST as failure:
                self._loads.suspect(engine)
                failed = _lost(engine, failure)
                engines = [other for other in engines if other is not engine]
        return respond(failed)

    async def to_holder(self, request: web.Request) -> web.StreamResponse:
        """To the engine that keeps the response whose id is in the path."""
        engines = self._keepers(None)
        if not engines:
            return respond(self._fleet.nobody(None))
        engine = await self.holder(request.match_info["response_id"], engines, request.headers) or engines[0]
        try:
            return await self._relay(request, engine, [], self._settings.first_token_s)
        except upstream.LOST as failure:
            return respond(_lost(engine, failure))

    async def holder(
        self, response_id: str, engines: Sequence[Heartbeat], headers: Mapping[str, str]
    ) -> Heartbeat | None:
        """The one of ``engines`` that keeps this response, as a client with these headers may see; None: none does.

        vLLM keeps responses in the memory of its API server, and only if told to. So all are asked: another router, or
        this one before it was restarted, may have sent the request.

        Raises:
            BadRequestError: it is no id, or one that may have it does not answer.
        """
        if not _RESPONSE_ID.fullmatch(response_id):  # it becomes a part of a path
            raise BadRequestError(error(404, f"there is no response {response_id!r:.200}", NOT_FOUND))
        if len(engines) == 1:
            return engines[0]
        path = f"/v1/responses/{response_id}"
        asked = upstream.forwarded(headers)

        async def status_of(engine: Heartbeat) -> int:
            try:
                async with (
                    asyncio.timeout(HOLDER_S),
                    self._session.get(upstream.url_of(engine, path), headers=asked) as answer,
                ):
                    return answer.status
            except upstream.LOST:
                return 0

        statuses = await asyncio.gather(*(status_of(engine) for engine in engines))
        for engine, status in zip(engines, statuses, strict=True):
            if status == 200:
                return engine
        if silent := [engine.engine for engine, status in zip(engines, statuses, strict=True) if not status]:
            message = f"engine {silent[0]} may keep the response {response_id!r:.200} and does not answer"
            raise BadRequestError(error(502, message, BAD_GATEWAY))
        return None

    async def pinned(self, response_id: str, model: str | None, headers: Mapping[str, str]) -> Heartbeat | None:
        """The engine that must go on from this response; None: whichever is asked will say that it has none.

        Raises:
            BadRequestError: it takes nothing new, or does not answer.
        """
        engine = await self.holder(response_id, self._keepers(model), headers)
        if engine is not None and not is_usable(engine):
            message = f"engine {engine.engine}, which keeps the response {response_id!r:.200}, is draining"
            raise BadRequestError(error(503, message, UNAVAILABLE, headers={"Retry-After": RETRY_AFTER_S}))
        return engine

    async def to_every(self, route: Route, request: web.Request) -> web.StreamResponse:
        """To every engine of a model, prefill and decode: a LoRA adapter is of use where both have it."""
        content = await self._reader.content(request)
        body = await parse(content)
        engines = await self._of_adapter(route, body, request.headers)
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
        await self._asker.ask(engines, upstream.forwarded(request.headers))
        return respond(in_all(engines, answers))

    async def models(self, request: web.Request) -> web.StreamResponse:
        """What the decode engines list to this client, as one list, or one model of it."""
        engines = _one_for_each_port(self._fleet.decoding(None))
        if not engines:
            return respond(self._fleet.nobody(None))
        prefilling = [engine for engine in self._fleet.serving(None) if not engine.role.decodes and is_usable(engine)]
        answers, _ = await asyncio.gather(
            self._asker.ask(engines, upstream.forwarded(request.headers)),
            self._asker.ask(_one_for_each_port(prefilling), upstream.forwarded(request.headers)),  # for its names only
        )
        lists = [answer for answer in answers if answer.status == 200]
        if not lists:
            silent = error(502, f"decode engine {engines[0].engine}: it did not answer in time", BAD_GATEWAY)
            return respond(answers[0] if answers else silent)
        listing = merge_models(lists)
        name = request.match_info.get("name")
        return respond(listing if name is None else one_model(listing, name))

    async def _relay(
        self, request: web.Request, engine: Heartbeat, parts: Sequence[Content | memoryview], patience_s: float
    ) -> web.StreamResponse:
        """Raises one of :data:`upstream.LOST` as long as the client has nothing."""
        url, headers = upstream.url_of(engine, request.path_qs), _headers(request)
        headers.update(upstream.rank_of(engine))
        patience = asyncio.timeout(patience_s)
        async with (
            patience,
            self._session.request(
                request.method, url, data=upstream.Pieces(parts) if parts else None, headers=headers
            ) as answer,
        ):
            if answer.content_type != "text/event-stream":
                said = respond(await upstream.whole(answer))
                said.headers[DECODE_HEADER] = engine.engine
                return said
            patience.reschedule(None)
            response = web.StreamResponse(status=answer.status, headers=upstream.returned(answer))
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

    async def _of_adapter(
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
            raise BadRequestError(error(400, message, INVALID, "model"))
        return _one_for_each_port(engines)

    def _keepers(self, model: str | None) -> list[Heartbeat]:
        """Those that may keep responses, also when they are to leave."""
        decoding = [engine for engine in self._fleet.serving(model) if engine.role.decodes and engine.address]
        return _one_for_each_port([engine for engine in decoding if engine.state is not State.STARTING])


def respond(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


def in_all(engines: Sequence[Heartbeat], answers: Sequence[Answer]) -> Answer:
    """What several engines say, as one answer: well only if all did well, and else what each of them said."""
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
    """A client's headers for a body that goes on as it came."""
    headers = upstream.forwarded(request.headers)
    for name, value in (
        (hdrs.CONTENT_TYPE, request.headers.get(hdrs.CONTENT_TYPE)),
        (REQUEST_ID, request_id_of(request.headers)),
    ):
        if value:
            headers[name] = value
    return headers


def _one_for_each_port(engines: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Data parallel ranks share one."""
    ports = {(engine.address, engine.role): engine for engine in engines}
    return sorted(ports.values(), key=key_of)


def _lost(engine: Heartbeat, failure: BaseException) -> Answer:
    return error(502, f"decode engine {engine.engine}: {upstream.why(failure)}", BAD_GATEWAY)
