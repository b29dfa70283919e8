"""Where traces come from: files, the newest run of ``kvbus up``, or Jaeger."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from kvbus.errors import TraceError
from kvbus.local import TRACES, cache_dir
from kvbus.tools.view import TraceView, views_of
from kvbus.trace import SpanData, read_otlp

LAST = "last"
TIMEOUT_S = 10.0
LOOK_BACK_S = 3600
SERVICE = "kvbus-router"


def read_files(paths: Iterable[Path]) -> list[TraceView]:
    """Traces in files, oldest first.

    Raises:
        TraceError: a file cannot be read, or holds none.
    """
    spans: list[SpanData] = []
    for path in paths:
        try:
            found = read_otlp(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise TraceError(str(path), error.strerror or type(error).__name__) from None
        except UnicodeDecodeError:
            raise TraceError(str(path), "not text, so not OTLP JSON") from None
        if not found:
            raise TraceError(str(path), "there are no spans in it")
        spans += found
    return views_of(spans)


def newest_run() -> Path:
    """The trace file of the newest local cluster.

    Raises:
        TraceError: there is none.
    """
    runs = cache_dir() / "runs"
    files = sorted(runs.glob(f"*/{TRACES}"), key=lambda path: path.stat().st_mtime)
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise TraceError(
            str(runs), "no local cluster has kept traces yet; start one (kvbus up), or name a file or --jaeger URL"
        )
    return files[-1]


def find(what: str, source: Path | None, jaeger: str | None) -> TraceView:
    """The trace that ``what`` means: ``last``, the beginning of an id, or a file, of which it is the last one.

    Raises:
        TraceError: there is no such trace, or its source cannot be read.
    """
    if jaeger is not None:
        views = _last_of_jaeger(jaeger) if what == LAST else _from_jaeger(jaeger, what)
        where = jaeger
    else:
        path = source or (Path(what) if _is_path(what) else newest_run())
        views, where = read_files([path]), str(path)
        if source is None and _is_path(what):
            what = LAST
    if what == LAST:
        rooted = [view for view in views if view.root is not None] or views
        if not rooted:
            raise TraceError(where, f"no traces of {SERVICE} in the last hour")
        return rooted[-1]
    found = [view for view in views if view.has_id(what)]
    if not found:
        raise TraceError(where, f"no trace, transfer or request has the id {what!r:.100}; it holds {len(views)} traces")
    if len(found) > 1:
        ids = ", ".join(view.trace_id for view in found[:5])
        raise TraceError(where, f"{what!r:.100} begins the ids of {len(found)} traces: {ids}")
    return found[0]


def _is_path(what: str) -> bool:
    named_so = what.endswith((".json", ".jsonl", ".jsonl.1")) or what.startswith(("/", "./", "../"))
    return named_so or Path(what).is_file()


def _from_jaeger(url: str, trace_id: str) -> list[TraceView]:
    if len(trace_id) != 32 or not all(each in "0123456789abcdef" for each in trace_id):
        raise TraceError(url, f"{trace_id!r:.100} is no trace id; Jaeger finds traces by all of their 32 hex digits")
    return views_of(_ask(url, f"/api/v3/traces/{trace_id}"))


def _last_of_jaeger(url: str) -> list[TraceView]:
    now = time.time()
    times = {
        name: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        for name, at in (("min", now - LOOK_BACK_S), ("max", now + 60))
    }
    query = {
        "query.service_name": SERVICE,
        "query.start_time_min": times["min"],
        "query.start_time_max": times["max"],
        "query.num_traces": "20",
    }
    return views_of(_ask(url, "/api/v3/traces?" + urllib.parse.urlencode(query)))


def _ask(url: str, path: str) -> list[SpanData]:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise TraceError(url, "not a URL such as http://jaeger:16686")
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        reason = "there is no such trace" if error.code == 404 else f"Jaeger answered {error.code}"
        raise TraceError(url, reason) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise TraceError(url, f"Jaeger does not answer: {reason}; is this its query port (16686)?") from None
    try:
        return read_otlp(text, url) if text.strip() else []
    except TraceError as error:
        raise TraceError(url, f"{error.reason}; is this Jaeger's query port (16686)?") from None
