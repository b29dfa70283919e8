"""The router's HTTP application.

The one rule: what a client gets is what the decode engine says, byte for byte, unless the prefill engine refuses before
the first byte: then it is what the prefill engine says. A prefill engine that does not answer refuses nothing: the
decode engine computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kvbus.bus import NatsBus
from kvbus.config import Config
from kvbus.errors import LocalClusterError
from kvbus.membership import Membership
from kvbus.messages import FIRST_ATTEMPT, Cancel, Heartbeat
from kvbus.node import Node
from kvbus.router.choose import Pair, choose, choose_decode
from kvbus.router.legs import decode_leg, new_transfer_id, prefill_leg, traceparent_for, transfers_of
from kvbus.subjects import Subjects

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 5.0
TRANSFER_HEADER = "X-KVBus-Transfer-Id"
PREFILL_HEADER = "X-KVBus-Prefill"
DECODE_HEADER = "X-KVBus-Decode"
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"})
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "accept-encoding"}
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server"}


class PrefillRefusedError(Exception):
    """The prefill engine answered with an error."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.status, self.body, self.content_type = status, body, content_type
        super().__init__(f"prefill: status {status}")


def error_body(message: str, kind: str, status: int) -> bytes:
    """An error in OpenAI's form."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def error(status: int, message: str, kind: str) -> web.Response:
    return web.Response(status=status, body=error_body(message, kind, status), content_type="application/json")


class Router:
    """The front door over a node's membership. Lives in one event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._outstanding: Counter[str] = Counter()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.cleanup_ctx.append(self._life)
        return app

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with self._node, aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            yield

    async def _health(self, request: web.Request) -> web.Response:
        members = self._node.membership
        pair = choose(members.peers(), None, {})
        body = {
            "status": "ok" if pair else "no compatible pair of ready engines",
            "bus_connected": self._node.bus.connected,
            "prefill_engines": [peer.engine for peer in members.peers(prefill=True, ready=True)],
            "decode_engines": [peer.engine for peer in members.peers(decode=True, ready=True)],
        }
        return web.json_response(body, status=200 if pair else 503)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        ready = self._node.membership.peers(decode=True, ready=True)
        if not ready:
            return error(503, "no decode engine is ready", "service_unavailable")
        try:
            async with self._session.get(f"http://{ready[0].address}/v1/models") as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
        except aiohttp.ClientError as failure:
            return error(502, f"decode engine {ready[0].engine}: {failure}", "bad_gateway")

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except ValueError as failure:
            return error(400, f"the body is not JSON: {failure}", "invalid_request_error")
        if not isinstance(body, dict):
            return error(400, f"the body is not a JSON object but {type(body).__name__}", "invalid_request_error")
        engines = self._node.membership.peers()
        model = body.get("model")
        pair = choose(engines, model if isinstance(model, str) else None, self._outstanding)
        if pair is not None:
            with self._counted(pair.prefill.engine, pair.decode.engine):
                return await self._forward(request, body, pair)
        alone = choose_decode(engines, model if isinstance(model, str) else None, self._outstanding)
        if alone is None:
            return self._no_engine(engines, model)
        with self._counted(alone.engine):
            return await self._forward_alone(request, body, alone)

    def _no_engine(self, engines: list[Heartbeat], model: object) -> web.Response:
        served = sorted({peer.model for peer in engines})
        if isinstance(model, str) and served and model not in served:
            return error(404, f"the model {model!r} does not exist; served: {', '.join(served)}", "NotFoundError")
        missing = "no decode engine is ready"
        if not self._node.bus.connected:
            missing = "the bus is not connected, so no engine is known"
        return error(503, missing, "service_unavailable")

    @contextlib.contextmanager
    def _counted(self, *engines: str) -> Any:
        self._outstanding.update(engines)
        try:
            yield
        finally:
            self._outstanding.subtract(engines)

    async def _forward_alone(self, request: web.Request, body: dict[str, Any], engine: Heartbeat) -> web.StreamResponse:
        """No prefill engine is there for it: the decode engine computes the prompt."""
        logger.warning("kvbus: no prefill engine is ready; %s computes the prompt itself", engine.engine)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _NOT_FORWARDED}
        nothing = asyncio.create_task(asyncio.sleep(0))
        try:
            return await self._decode(request, engine, body, headers, nothing, {DECODE_HEADER: engine.engine})
        except aiohttp.ClientError as failure:
            return error(502, f"decode engine {engine.engine}: {failure}", "bad_gateway")

    async def _forward(self, request: web.Request, body: dict[str, Any], pair: Pair) -> web.StreamResponse:
        transfer_id = new_transfer_id()
        traceparent = traceparent_for(request.headers.get("traceparent"))
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _NOT_FORWARDED}
        headers["X-Request-Id"] = request.headers.get("X-Request-Id") or transfer_id
        headers["traceparent"] = traceparent
        marks = {
            TRANSFER_HEADER: transfer_id,
            PREFILL_HEADER: pair.prefill.engine,
            DECODE_HEADER: pair.decode.engine,
        }
        prefill = asyncio.create_task(
            self._prefill(pair, request.path, prefill_leg(body, transfer_id, traceparent), headers),
            name=f"prefill-{transfer_id}",
        )
        served = False
        try:
            leg = decode_leg(body, transfer_id, traceparent, pair.prefill.engine)
            response = await self._decode(request, pair.decode, leg, headers, prefill, marks)
            served = response.status < 400
            return response
        except PrefillRefusedError as refused:
            return web.Response(
                status=refused.status, body=refused.body, content_type=refused.content_type, headers=marks
            )
        except aiohttp.ClientError as failure:
            return error(502, f"decode engine {pair.decode.engine}: {failure}", "bad_gateway")
        finally:
            if not served:
                self._release(pair, transfers_of(body, transfer_id))
            if not prefill.done():
                prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    def _release(self, pair: Pair, transfer_ids: list[str]) -> None:
        """Tell the prefill engine that nobody takes this KV; a decode engine may have refused, or died, before its
        connector heard of the request. What the decode engine itself says of it is not disturbed."""
        subject, sink = self._node.subjects.cancels(pair.prefill.engine), pair.decode
        for each in transfer_ids:
            cancel = Cancel(
                each, FIRST_ATTEMPT, sink.engine, sink.incarnation, each, "decode did not serve the request"
            )
            self._node.publish(subject, cancel)

    async def _prefill(self, pair: Pair, path: str, leg: dict[str, Any], headers: Mapping[str, str]) -> None:
        engine = pair.prefill
        try:
            async with self._session.post(f"http://{engine.address}{path}", json=leg, headers=headers) as answer:
                content = await answer.read()
                if answer.status >= 400:
                    raise PrefillRefusedError(answer.status, content, answer.content_type)
        except aiohttp.ClientError as failure:
            why = failure or type(failure).__name__
            logger.warning("kvbus: prefill engine %s does not answer: %s; decode goes on alone", engine.engine, why)

    async def _decode(
        self,
        request: web.Request,
        engine: Heartbeat,
        leg: dict[str, Any],
        headers: Mapping[str, str],
        prefill: asyncio.Task[None],
        marks: Mapping[str, str],
    ) -> web.StreamResponse:
        url = f"http://{engine.address}{request.path}"
        async with contextlib.AsyncExitStack() as stack:
            answer = await _unless_refused(
                prefill, stack.enter_async_context(self._session.post(url, json=leg, headers=headers))
            )
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _NOT_RETURNED}
            if answer.content_type != "text/event-stream":
                content = await _unless_refused(prefill, answer.read())
                return web.Response(status=answer.status, body=content, headers={**kept, **marks})
            # An engine sends its headers before the first token: hold them until something follows.
            chunk = await _unless_refused(prefill, answer.content.readany())
            response = web.StreamResponse(status=answer.status, headers={**kept, **marks})
            await response.prepare(request)
            while chunk:
                await response.write(chunk)
                chunk = await answer.content.readany()
            await response.write_eof()
            return response


async def _unless_refused(prefill: asyncio.Task[None], step: Any) -> Any:
    """Do a step of the decode leg; raise PrefillRefusedError as soon as the prefill leg does, dropping the step."""
    task = asyncio.ensure_future(step)
    try:
        await asyncio.wait({task, prefill}, return_when=asyncio.FIRST_COMPLETED)
        if prefill.done() and not task.done():
            prefill.result()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def run_router(config: Config, host: str, port: int) -> None:
    """Serve until cancelled.

    Raises:
        LocalClusterError: the port cannot be used.
    """
    node = Node(
        NatsBus(config.servers, "kvbus-router"),
        Subjects(config.namespace),
        name="kvbus-router",
        membership=Membership(dead_after_s=config.dead_after_s),
    )
    runner = web.AppRunner(Router(node).app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as failure:
            raise LocalClusterError(
                f"kvbus: port {port} on {host} cannot be used ({failure.strerror}); choose another with --port"
            ) from None
        logger.info("kvbus: the router listens on http://%s:%d", host, port)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
