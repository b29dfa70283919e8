"""``kvbus trace``, ``why`` and ``report`` as people and scripts call them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.tools import sources
from kvbus.tools.view import TraceView, views_of
from kvbus.tools.waterfall import MAX_OTHERS, waterfall
from kvbus.trace import SpanData, read_otlp
from kvbus.trace.otlp_json import to_otlp

RECORDED = Path(__file__).parents[2] / "traces" / "recorded"
EARLY = RECORDED / "push-early.json"


def kvbus(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "100", "TERM": "dumb"})


def early() -> TraceView:
    return views_of(read_otlp(EARLY.read_text(), "x"))[0]


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_a_trace_is_drawn_and_explained(path: Path) -> None:
    drawn = kvbus("trace", path)
    assert drawn.exit_code == 0, drawn.stderr
    assert "TTFT" in drawn.stdout
    assert "why: " in drawn.stdout
    assert "note:" not in drawn.stdout
    told = kvbus("why", path)
    assert told.stdout.count("\n") == 1
    found = json.loads(kvbus("trace", path, "--json").stdout)
    assert found["problems"] == []
    assert abs(sum(stage["ms"] for stage in found["stages"]) - found["ttft_ms"]) < 0.1
    assert json.loads(kvbus("why", path, "--json").stdout)["text"] == told.stdout.strip()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    """A long request id, long engine ids, a thousand spans: no line is wider than the terminal."""
    view = early()
    assert view.root is not None
    many = [
        SpanData(
            f"{'s' * 60}{number}", view.trace_id, f"{number:016x}", view.root.span_id, view.start_ns, view.start_ns + 5
        )
        for number in range(1, 1001)
    ]
    about = {**view.root.attributes, "kvbus.request_id": "r" * 256, "kvbus.decode_engine": "d" * 128}
    root = SpanData(
        "request", view.trace_id, view.root.span_id, "", view.start_ns, view.root.end_ns, 2, attributes=about
    )
    [wide] = views_of([root, *view.stages, *view.others, *many])
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(waterfall(wide, width))
    console.file.close()
    lines = console.export_text().splitlines()
    assert max(len(line) for line in lines) <= width
    assert f"... and {len(wide.others) - MAX_OTHERS} more spans" in "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_pictures(tmp_path: Path, ending: str) -> None:
    trace, report = tmp_path / f"trace.{ending}", tmp_path / f"report.{ending}"
    assert kvbus("trace", EARLY, "--svg", trace).exit_code == 0
    assert kvbus("report", *sorted(RECORDED.glob("*.json")), "--plot", report).exit_code == 0
    for path in (trace, report):
        assert path.stat().st_size > 5000
    assert ending != "svg" or "prefill.compute" in trace.read_text()


def test_a_report_over_files() -> None:
    files = sorted(RECORDED.glob("*.json"))
    told = kvbus("report", *files)
    assert told.exit_code == 0
    assert "outcomes: 3 pushed, 1 recomputed" in told.stdout
    found = json.loads(kvbus("report", *files, "--json").stdout)
    assert found["traces"] == 4
    assert abs(sum(stage["share"] for stage in found["stages"]) - 1) < 0.001


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("trace", "nowhere.jsonl"), "nowhere.jsonl: No such file or directory"),
        (("why", "zzz", "--file", EARLY), "no trace, transfer or request has the id 'zzz'; it holds 1 traces"),
        (("trace", "last", "--jaeger", "http://127.0.0.1:9"), "Jaeger does not answer"),
        (("trace", "last", "--jaeger", "jaeger:16686"), "not a URL such as http://jaeger:16686"),
        (("trace", "abc", "--jaeger", "http://127.0.0.1:9"), "'abc' is no trace id"),
        (("trace", EARLY, "--svg", "picture.xyz"), "picture.xyz: cannot be written"),
        (("trace", EARLY, "--svg", "/no/such/folder/x.svg"), "/no/such/folder/x.svg: cannot be written"),
        (("report", RECORDED.parent / "README.md"), "README.md, line 1: not JSON"),
        (("collect", "--nats-url", "nats://h"), "collect: nowhere to send traces: set OTEL_EXPORTER_OTLP_ENDPOINT"),
        (("collect", "--nats-url", "nats://h", "--trace-file", "/dev/null/x"), "--trace-file /dev/null/x: "),
        (("collect", "--nats-url", "h"), "nats_url='h'; allowed: a URL such as nats://host:4222"),
        (("report", "/dev/null"), "/dev/null: there are no spans in it"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: tuple[str | Path, ...], says: str) -> None:
    told = kvbus(*arguments)
    assert told.exit_code == 1
    assert says in told.stderr
    assert "Traceback" not in told.stderr


def test_without_a_cluster_it_says_where_to_get_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "cache_dir", lambda: tmp_path)
    told = kvbus("trace")
    assert told.exit_code == 1
    assert "start one (kvbus up), or name a file" in told.stderr
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "traces.jsonl").write_text(json.dumps(to_otlp(early().spans)))
    assert kvbus("trace").exit_code == 0


@pytest.mark.parametrize("keep", ["stages", "root", "no prefill.compute"])
def test_a_trace_with_missing_spans_is_drawn_with_a_note(tmp_path: Path, keep: str) -> None:
    view = early()
    assert view.root is not None
    kept = {
        "stages": view.stages,
        "root": (view.root,),
        "no prefill.compute": [span for span in view.spans if span.name != "prefill.compute"],
    }[keep]
    path = tmp_path / "holes.json"
    path.write_text(json.dumps(to_otlp(list(kept))))
    drawn = kvbus("trace", path)
    assert drawn.exit_code == 0, drawn.stderr
    assert "note:" in drawn.stdout


class Jaeger(BaseHTTPRequestHandler):
    """What Jaeger's query port answers, of its ``/api/v3``."""

    def do_GET(self) -> None:
        last = self.path.startswith("/api/v3/traces?") and "service_name=kvbus-router" in self.path
        if last or self.path == f"/api/v3/traces/{early().trace_id}":
            body = json.dumps({"result": to_otlp(early().spans)})
        elif self.path == f"/api/v3/traces/{'0' * 32}":
            body = "<html>"
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def jaeger() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Jaeger)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_jaeger_is_asked(jaeger: str) -> None:
    assert early().trace_id in kvbus("trace", "last", "--jaeger", jaeger).stdout
    assert early().trace_id in kvbus("trace", early().trace_id, "--jaeger", jaeger).stdout
    assert "there is no such trace" in kvbus("trace", "1" * 32, "--jaeger", jaeger).stderr
    assert "not JSON" in kvbus("trace", "0" * 32, "--jaeger", jaeger).stderr
