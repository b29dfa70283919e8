"""Pictures of traces, as SVG or whatever the file's ending says. The only matplotlib import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbus.errors import TraceError
from kvbus.tools.report import Report
from kvbus.tools.view import MS, TraceView
from kvbus.tools.why import why

COLORS = {
    "route": "#7fb2d9",
    "prefill.queue": "#e8c547",
    "history.ask": "#b7b7a4",
    "history.match": "#8d99ae",
    "history.write": "#6b705c",
    "prefill.compute": "#5aa469",
    "match.wait": "#b565a7",
    "write.queue": "#f2a65a",
    "write.post": "#6c8ebf",
    "write.transfer": "#3b5b92",
    "decode.resume": "#c08497",
    "lost": "#c0392b",
    "decode.queue": "#76d7c4",
    "decode.compute": "#e67e22",
    "decode.first_token": "#9bc53d",
}
OTHER = "#b0b0b0"
MAX_OTHERS = 16


def draw_trace(view: TraceView, path: Path) -> None:
    """The waterfall of one trace.

    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    plt = _matplotlib(path)
    others = [span for span in view.others if span.end_ns > view.start_ns][:MAX_OTHERS]
    rows = [*view.stages, *others]
    figure, axes = plt.subplots(figsize=(11, 1.8 + 0.32 * len(rows)), layout="constrained")
    for row, span in enumerate(rows):
        start, length = (span.start_ns - view.start_ns) / MS, max(span.duration_ns / MS, view.ttft_ms / 500)
        height = 0.7 if row < len(view.stages) else 0.3
        axes.barh(row, length, left=start, height=height, color=COLORS.get(span.name, OTHER))
        axes.text(min(start + length, view.ttft_ms), row, f" {span.duration_ns / MS:.2f}", va="center", fontsize=8)
    axes.set_yticks(
        range(len(rows)), [f"{span.name[:28]}  {(span.engine or span.service)[:16]}" for span in rows], fontsize=8
    )
    axes.invert_yaxis()
    axes.axvline(view.ttft_ms, color="black", linewidth=0.8, linestyle="--")
    axes.text(view.ttft_ms, -0.7, f"first token {view.ttft_ms:.1f} ms ", ha="right", fontsize=8)
    axes.set_xlim(0, view.ttft_ms * 1.15)
    axes.set_xlabel("ms since the request arrived")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"trace {view.trace_id}: {view.about('kvbus.outcome', '?')}\n{why(view).text}"[:240], fontsize=9)
    _save(plt, figure, path)


def draw_report(report: Report, views: Sequence[TraceView], path: Path) -> None:
    """The TTFT budget by stage, and every request's stages, slowest last.

    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    plt = _matplotlib(path)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    names = [stage.name for stage in report.stages]
    for offset, quantile in enumerate(("p50", "p90", "p99")):
        values = [getattr(stage, quantile) for stage in report.stages]
        left.barh([row + 0.25 * offset for row in range(len(names))], values, height=0.24, label=quantile)
    left.set_yticks([row + 0.25 for row in range(len(names))], names, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("ms")
    left.set_title(f"stages of {report.traces} requests", fontsize=10)
    left.legend(fontsize=8)
    ordered = sorted((view for view in views if view.stages), key=lambda view: view.ttft_ms)
    base = [0.0] * len(ordered)
    for name in names:
        heights = [sum(each.duration_ns for each in view.stages if each.name == name) / MS for view in ordered]
        right.bar(range(len(ordered)), heights, bottom=base, width=1.0, color=COLORS.get(name, OTHER), label=name)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    right.set_xlabel("requests, by TTFT")
    right.set_ylabel("ms")
    right.set_title("TTFT of each request", fontsize=10)
    right.legend(fontsize=7)
    _save(plt, figure, path)


def _matplotlib(path: Path) -> Any:
    try:
        import matplotlib
    except ImportError:
        raise TraceError(str(path), "pictures need matplotlib: pip install 'kvbus[pictures]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(plt: Any, figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TraceError(str(path), f"cannot be written: {error}") from None
    finally:
        plt.close(figure)
