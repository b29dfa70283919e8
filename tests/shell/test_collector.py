"""The router's traces: who is sampled, what becomes of everybody's marks, and where spans go."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.fronts import SUBJECTS, TOKEN_EVENT, Front, fronted
from support.kept import Kept
from support.waiting import eventually

from kvbus.bus import MemoryBus
from kvbus.local import free_port
from kvbus.tools.view import problems, views_of
from kvbus.trace import MarkName, SpanData, read_otlp
from kvbus.trace.clocks import FRESH_NS, Clocks
from kvbus.trace.file import TraceFile
from kvbus.trace.marks import host_clock
from kvbus.trace.otlp import CLOSE_TIMEOUT_S, OtlpExport, Sampler, export_from_environment, parse_traceparent
from kvbus.wire import ClockReply, Marks, Role, encode
from kvbus.wire.fields import MarkList

CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = CLIENTS[:-1] + "0"


def say(front: Front, engine: str, role: Role, transfer_id: str, marks: MarkList, host: str = "") -> None:
    message = Marks(transfer_id, engine, role, 0, host or host_clock(), marks)
    front.broker.route(SUBJECTS.marks(message.engine), encode(message))


async def pushed(
    front: Front, headers: dict[str, str] | None = None, host: str = "", skew_ns: int = 0
) -> dict[str, str]:
    """One request, with the marks that its engines would make; returns the headers of its prefill leg."""
    for name in "PD":
        front[name].hold.clear()
        front[name].stream = [TOKEN_EVENT]
    before = len(front["P"].requests)
    body = {"model": "m", "stream": True}

    async def post() -> None:
        async with front.client.post("/v1/chat/completions", json=body, headers=headers or {}) as answer:
            assert answer.status == 200
            await answer.read()

    asking = asyncio.create_task(post())
    await eventually(lambda: len(front["P"].requests) > before and front["D"].requests)
    _, leg, got = front["P"].requests[-1]
    transfer_id = leg["kv_transfer_params"]["transfer_id"]
    now = time.monotonic_ns() - skew_ns
    names = ("PREFILL_ARRIVED", "PREFILL_SCHEDULED", "PREFILL_DONE")
    prefill = [(0, MarkName[name].value, now + 1000 * number, "7") for number, name in enumerate(names)]
    ranks = ("REGISTERED", "COMPLETED", "POSTING", "POSTED")
    prefill += [(1, MarkName[name].value, now + 5000 + 1000 * number, "") for number, name in enumerate(ranks)]
    say(front, "P", Role.PREFILL, transfer_id, tuple(prefill), host)
    names = ("LANDED", "RECEIVED", "RESUMED")
    decode = [(1, MarkName[name].value, now + 20_000 + 1000 * number, "") for number, name in enumerate(names)]
    say(front, "D", Role.DECODE, transfer_id, tuple(decode), host)
    for name in "PD":
        front[name].hold.set()
    await asking
    return got


async def test_a_request_becomes_one_trace_that_adds_up() -> None:
    kept = Kept()
    async with fronted("P", "D", span_sinks=[kept]) as front:
        leg = await pushed(front, {"X-Request-Id": "r" * 256})
        await eventually(lambda: kept.spans)
        [view] = views_of(kept.spans)
        assert problems(view) == []
        assert view.stages[0].name == "route"
        assert len(view.stages) == 9
        context = parse_traceparent(leg["traceparent"])
        assert context is not None
        assert view.root is not None
        assert f"{context.span_id:016x}" == view.root.span_id
        assert view.about("kvbus.request_id", "") == "r" * 256
        assert await front.metric('kvbus_router_stage_seconds_count{stage="match.wait"}') == 1.0
    assert kept.closed


async def test_the_clients_trace_goes_on_and_its_decision_holds() -> None:
    kept = Kept()
    async with fronted("P", "D", span_sinks=[kept]) as front:
        leg = await pushed(front, {"traceparent": NOT_SAMPLED})
        assert leg["traceparent"].endswith("-00")
        assert leg["traceparent"][:36] == NOT_SAMPLED[:36]
        leg = await pushed(front, {"traceparent": CLIENTS})
        assert leg["traceparent"][:36] == CLIENTS[:36]
        assert leg["traceparent"] != CLIENTS
        await eventually(lambda: kept.spans)
    [view] = views_of(kept.spans)
    assert view.root is not None
    assert view.root.parent_id == CLIENTS[36:52]
    assert view.trace_id == CLIENTS[3:35]


@pytest.mark.parametrize("junk", ["", "junk", CLIENTS.replace("0af7", "zzzz")])
async def test_a_junk_trace_context_is_none(junk: str) -> None:
    assert Sampler().begin(junk).ids.parent == ""
    assert Sampler().begin(junk).sampled


def test_the_standard_variables_say_who_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")
    sampler = Sampler()
    sampled = sum(sampler.begin(None).sampled for _ in range(4000))
    assert 300 < sampled < 500
    assert sampler.begin(CLIENTS).sampled
    assert not sampler.begin(NOT_SAMPLED).sampled


async def test_without_a_sink_nothing_is_traced_and_the_clients_context_passes() -> None:
    async with fronted("P", "D") as front:
        assert "traceparent" not in await pushed(front)
        assert front["P"].params[-1]["traceparent"] == ""
        assert (await pushed(front, {"traceparent": CLIENTS}))["traceparent"] == CLIENTS


async def test_another_hosts_clock_is_measured_and_its_error_told() -> None:
    kept, skew_ns = Kept(), 7_000_000_000
    async with fronted("P", "D", span_sinks=[kept]) as front:
        bus = MemoryBus(front.broker)

        def clock(_: str, payload: bytes) -> bytes:
            now = time.monotonic_ns() - skew_ns
            return encode(ClockReply("P", "elsewhere", now, now))

        await bus.serve(SUBJECTS.clock("P"), clock)
        async with bus:
            await pushed(front, host="elsewhere", skew_ns=skew_ns)
            await eventually(lambda: kept.spans)
    [view] = views_of(kept.spans)
    assert len(view.stages) == 9
    assert view.ttft_ms < 6000
    transfer = next(stage for stage in view.stages if stage.name == "write.transfer")
    assert abs(float(transfer.attributes["kvbus.clock_offset_ms"]) - skew_ns / 1e6) < 500
    assert float(transfer.attributes["kvbus.clock_error_ms"]) > 0


async def test_a_client_that_leaves_has_a_trace_too() -> None:
    kept = Kept()
    async with fronted("P", "D", span_sinks=[kept]) as front:
        for name in "PD":
            front[name].hold.clear()
        asking = front.ask(stream=True)
        await eventually(lambda: front["P"].requests and front["D"].requests)
        asking.cancel()
        await eventually(lambda: kept.spans)
    [view] = views_of(kept.spans)
    assert view.root is not None
    assert (view.about("kvbus.outcome", ""), view.root.error) == ("failed", "client left")


async def test_what_a_peer_may_not_say_is_not_heard() -> None:
    kept = Kept()
    async with fronted("P", "D", span_sinks=[kept]) as front:
        for name in "PD":
            front[name].hold.clear()
        asking = front.ask(stream=True)
        await eventually(lambda: front["P"].requests and front["D"].requests)
        transfer_id = front["P"].params[0]["transfer_id"]
        lies = tuple((1, name, 1, "999") for name in ("arrived", "first token", "ended", "whatever"))
        say(front, "P", Role.PREFILL, transfer_id, lies)
        say(front, "P.>", Role.PREFILL, transfer_id, ((1, "landed", 1, ""),))
        for _ in range(20):
            say(front, "P", Role.PREFILL, transfer_id, tuple((1, "posting", 1, "") for _ in range(200)))
        asking.cancel()
        await eventually(lambda: kept.spans)
        assert front.node.counters["marks_dropped"] >= 1000
    [view] = views_of(kept.spans)
    assert (view.about("kvbus.reason", ""), view.about("kvbus.bytes", 0)) == ("client left", 0)
    assert view.ttft_ms < 10_000


@pytest.mark.slow
async def test_a_sink_that_fails_loses_its_traces_only(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Kept):
        def write(self, spans: Sequence[SpanData]) -> None:
            super().write(spans)
            raise OSError("no space left on device")

    full, kept = Full(), Kept()
    async with fronted("P", "D", span_sinks=[full, kept]) as front:
        await pushed(front)
        await eventually(lambda: kept.spans)
        await pushed(front)
        await eventually(lambda: front.node.counters["trace_errors"] == 2 and len(views_of(kept.spans)) == 2)
    assert caplog.text.count("traces are lost: no space left on device") == 1


def test_the_sharpest_measurement_of_a_while_counts() -> None:
    clocks = Clocks("here")
    assert clocks.offset("there") is None
    assert clocks.is_stale("there", 0)
    clocks.hear("there", 1000, 5500, 5600, 2100)  # 100 ns in the answer, 1000 on the way
    assert (clocks.offset("there").ns, clocks.offset("there").error_ns) == (-4000, 500)  # type: ignore[union-attr]
    clocks.hear("there", 3000, 9000, 9000, 9000)
    assert clocks.offset("there").error_ns == 500, "a wider one changes nothing"  # type: ignore[union-attr]
    assert not clocks.is_stale("there", 5000)
    assert clocks.is_stale("there", FRESH_NS + 5000)
    clocks.hear("there", FRESH_NS + 5000, 0, 0, FRESH_NS + 7000)
    assert clocks.offset("there").error_ns == 1000, "but an old one goes"  # type: ignore[union-attr]
    assert clocks.offset("here").ns == 0  # type: ignore[union-attr]
    assert not clocks.is_stale("here", 10**18)


def span(number: int) -> SpanData:
    return SpanData(
        "request", f"{number:032x}", f"{number:016x}", "", 1000, 2000 + number, 2, attributes={"a": 1, "b": True}
    )


def test_the_file_is_bounded_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "traces.jsonl"
    file = TraceFile(path, max_bytes=4000)
    for number in range(1, 40):
        file.write([span(number)])
    file.close()
    older = path.with_name("traces.jsonl.1")
    assert path.stat().st_size < 5000 > older.stat().st_size
    found = read_otlp(older.read_text() + path.read_text(), "x")
    assert found[-1] == span(39)
    assert [each.trace_id for each in found] == [f"{number:032x}" for number in range(40 - len(found), 40)]
    assert sorted(each.name for each in path.parent.iterdir()) == ["traces.jsonl", "traces.jsonl.1"]
    assert json.loads(path.read_text().splitlines()[0])["resourceSpans"]


def test_spans_reach_an_exporter_as_they_are() -> None:
    exporter = InMemorySpanExporter()
    export = OtlpExport(exporter)
    child = SpanData(
        "match.wait", f"{7:032x}", f"{8:016x}", f"{7:016x}", 1500, 1600, engine="P", service="kvbus-prefill"
    )
    export.write([span(7), child])
    export.close()
    one, two = exporter.get_finished_spans()
    assert (one.name, one.start_time, one.end_time, dict(one.attributes or {})) == (
        "request",
        1000,
        2007,
        {"a": 1, "b": True},
    )
    assert two.parent is not None
    assert (two.parent.span_id, two.context.span_id, two.context.trace_id) == (7, 8, 7)
    assert two.resource.attributes["service.name"] == "kvbus-prefill"
    assert two.resource.attributes["kvbus.engine"] == "P"


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_an_endpoint_that_is_away_is_said_once_and_holds_nobody(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Jaeger down: spans are lost, requests and Ctrl-C are not."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    export = export_from_environment()
    assert export is not None
    started = time.monotonic()
    export.write([span(number) for number in range(1, 200)])
    assert time.monotonic() - started < CLOSE_TIMEOUT_S, "an export would try for 10 s"
    export.close()
    assert time.monotonic() - started < 2 * CLOSE_TIMEOUT_S + 4
    assert "the last spans could not be exported within 2 s" in caplog.text
    assert caplog.text.count("Transient error") <= 1


class Receiver(BaseHTTPRequestHandler):
    """An OTLP endpoint over HTTP."""

    names: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        spans = [each for found in request.resource_spans for scope in found.scope_spans for each in scope.spans]
        assert self.path == "/v1/traces"
        self.names.extend(each.name for each in spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_spans_go_over_http_too(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        export = export_from_environment()
        assert export is not None
        export.write([span(number) for number in range(1, 41)])
        export.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert Receiver.names == ["request"] * 40


def test_no_endpoint_no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert export_from_environment() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke")
    assert export_from_environment() is None
