"""A trace as a waterfall in a terminal, and its TTFT budget."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbus.tools.view import MS, TraceView, problems
from kvbus.tools.why import why
from kvbus.trace import SpanData

MAX_OTHERS = 40
NARROWEST_BAR = 10
STAGE, ENGINE, FIGURE, PERCENT = 20, 10, 8, 5
COLUMNS = STAGE + ENGINE + FIGURE + PERCENT + 9  # what all but the bar take, with what is between them
COLORS = {
    "route": "cyan",
    "prefill.queue": "yellow",
    "history.ask": "bright_black",
    "history.match": "bright_black",
    "history.write": "white",
    "prefill.compute": "green",
    "match.wait": "magenta",
    "write.queue": "bright_yellow",
    "write.post": "bright_blue",
    "write.transfer": "blue",
    "decode.resume": "bright_magenta",
    "lost": "red",
    "decode.queue": "bright_cyan",
    "decode.compute": "bright_red",
    "decode.first_token": "bright_green",
}


def waterfall(view: TraceView, width: int) -> RenderableType:
    """Draw a trace in ``width`` columns: stages first, then what else there is, as far as it fits."""
    end_ns = max((span.end_ns for span in (*view.stages, *view.others)), default=view.start_ns + 1)
    end_ns = max(view.first_token_ns, min(end_ns, view.first_token_ns + (view.first_token_ns - view.start_ns) // 4))
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False)
    bar = max(NARROWEST_BAR, width - COLUMNS)
    table.add_column("stage", width=STAGE, no_wrap=True)
    table.add_column("engine", width=ENGINE, no_wrap=True)
    table.add_column("", width=bar, no_wrap=True)
    table.add_column("ms", justify="right", width=FIGURE, no_wrap=True)
    table.add_column("%", justify="right", width=PERCENT, no_wrap=True)
    for stage in view.stages:
        share = f"{100 * stage.duration_ns / MS / view.ttft_ms:.1f}" if view.ttft_ms else ""
        table.add_row(
            stage.name, _engine(stage), _bar(stage, view.start_ns, end_ns, bar), _ms(stage.duration_ns), share
        )
    total = Text("TTFT", style="bold"), Text(""), Text(""), Text(f"{view.ttft_ms:.2f}", style="bold"), Text("100.0")
    table.add_row(*total)
    for span in view.others[:MAX_OTHERS]:
        drawn = _bar(span, view.start_ns, end_ns, bar, "·" if span.start_ns > view.first_token_ns else "─")
        table.add_row(
            Text(_short(span.name), style="dim"), Text(_engine(span), style="dim"), drawn, _ms(span.duration_ns), ""
        )
    parts: list[RenderableType] = [_title(view, width), table]
    if len(view.others) > MAX_OTHERS:
        parts.append(Text(f"... and {len(view.others) - MAX_OTHERS} more spans", style="dim"))
    parts.append(Text(f"why: {why(view).text}", style="bold"))
    parts += [Text(f"note: {problem}", style="yellow") for problem in problems(view)]
    return Group(*parts)


def _title(view: TraceView, width: int) -> Text:
    facts = [f"trace {view.trace_id}"]
    if view.transfer_id:
        facts.append(f"transfer {view.transfer_id}")
    if request_id := str(view.about("kvbus.request_id", "")):
        facts.append(f"request {request_id if len(request_id) <= 40 else request_id[:39] + '…'}")
    ways = f"{view.about('kvbus.prefill_engine', '-')} -> {view.about('kvbus.decode_engine', '-')}"
    outcome = f"{view.about('kvbus.outcome', '?')}, attempt {view.about('kvbus.attempts', 1)}, {ways}"
    lines, line = [], ""
    for fact in [*facts, outcome]:
        if line and len(line) + len(fact) + 3 > width:
            lines.append(line)
            line = ""
        line = f"{line} · {fact}" if line else fact
    return Text("\n".join([*lines, line]), style="dim")


def _bar(span: SpanData, start_ns: int, end_ns: int, width: int, fill: str = "█") -> Text:
    scale = width / max(1, end_ns - start_ns)
    begin = min(width - 1, max(0, int((span.start_ns - start_ns) * scale)))
    finish = min(width, max(begin + 1, round((span.end_ns - start_ns) * scale)))
    bar = Text(" " * begin)
    return bar.append(fill * (finish - begin), style=COLORS.get(span.name, "dim"))


def _short(name: str) -> str:
    name = name.removeprefix("kvbus.")
    return name if len(name) <= STAGE else name[: STAGE - 1] + "…"


def _engine(span: SpanData) -> str:
    name = span.engine or span.service.removeprefix("kvbus-")
    return name if len(name) <= ENGINE else name[: ENGINE - 1] + "…"


def _ms(ns: int) -> str:
    return f"{ns / MS:.2f}" if ns < 1e9 else f"{ns / MS:.0f}"
