"""``kvbus trace``, ``kvbus why`` and ``kvbus report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvbus.cli.guard import clear_errors, say, until_signalled
from kvbus.cli.options import Namespace, NatsUrl
from kvbus.signals import run

What = Annotated[
    str, typer.Argument(help="last, the beginning of a trace or transfer id, a request id, or a file of traces.")
]
Source = Annotated[Path | None, typer.Option("--file", help="Look in this file. Default: the newest local cluster's.")]
Jaeger = Annotated[str | None, typer.Option(help="Ask Jaeger instead, such as http://localhost:16686.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def trace(
    what: What = "last",
    source: Source = None,
    jaeger: Jaeger = None,
    svg: Annotated[Path | None, typer.Option(help="Draw it as a picture; .svg, .png or .pdf.")] = None,
    json_output: Json = False,
) -> None:
    """Draw a request's way to its first token, and say what it cost where.

    Examples:

    [bold]kvbus trace[/bold] (the last request of the newest local cluster)

    [bold]kvbus trace 4bf92f35 --svg trace.svg[/bold]

    [bold]kvbus trace last --jaeger http://localhost:16686[/bold]
    """
    from kvbus.tools.sources import find
    from kvbus.tools.waterfall import waterfall

    with clear_errors():
        view = find(what, source, jaeger)
        if svg is not None:
            from kvbus.tools.plots import draw_trace

            draw_trace(view, svg)
        console = Console(markup=False)
        if json_output:
            console.print_json(data=_as_json(view))
        else:
            console.print(waterfall(view, console.width), soft_wrap=False)


def why(what: What = "last", source: Source = None, jaeger: Jaeger = None, json_output: Json = False) -> None:
    """Say in one line what a request's time to first token was lost to.

    Example: [bold]kvbus why last[/bold]
    """
    from kvbus.tools.sources import find
    from kvbus.tools.why import why as verdict_on

    with clear_errors():
        view = find(what, source, jaeger)
        verdict = verdict_on(view)
        if json_output:
            found = {"text": verdict.text, "stage": verdict.stage, "advice": verdict.advice, "ttft_ms": view.ttft_ms}
            Console(markup=False).print_json(data={"trace_id": view.trace_id, **found})
        else:
            typer.echo(verdict.text)


def report(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of traces. Default: the newest local cluster's.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it as a picture, too; .svg, .png or .pdf.")] = None,
    json_output: Json = False,
) -> None:
    """Aggregate many traces: where the time to first token goes, and on which side to add an engine.

    Examples:

    [bold]kvbus report[/bold]

    [bold]kvbus report monday.jsonl tuesday.jsonl --plot report.svg[/bold]
    """
    import dataclasses

    from kvbus.errors import TraceError
    from kvbus.tools.report import report_of
    from kvbus.tools.sources import newest_run, read_files

    with clear_errors():
        paths = files or [newest_run()]
        views = read_files(paths)
        found = report_of(views)
        if not found.traces:
            raise TraceError(str(paths[0]), "no trace in it has a root span and stages")
        if plot is not None:
            from kvbus.tools.plots import draw_report

            draw_report(found, views, plot)
        console = Console(markup=False)
        if json_output:
            console.print_json(data=dataclasses.asdict(found))
            return
        table = Table(
            "stage", "requests", "mean", "p50", "p90", "p99", "max", "share", title=f"{found.traces} requests, ms"
        )
        for each in (*found.stages, found.ttft):
            figures = (each.mean, each.p50, each.p90, each.p99, each.largest)
            style = "bold" if each is found.ttft else ""
            cells = [f"{figure:.2f}" for figure in figures]
            table.add_row(each.name, str(each.count), *cells, f"{each.share:.1%}", style=style)
        console.print(table)
        late = Table("waited for", "requests", "p50", "p90", "p99", "max", title="how long the earlier side waited, ms")
        for each in found.late_sides:
            late.add_row(
                each.name, str(each.count), *(f"{x:.2f}" for x in (each.p50, each.p90, each.p99, each.largest))
            )
        console.print(late)
        console.print("outcomes: " + ", ".join(f"{count} {name}" for name, count in found.outcomes.items()))
        console.print("longest stage: " + ", ".join(f"{name} in {count}" for name, count in found.longest.items()))
        if found.history:
            outcomes = ", ".join(f"{count} {name}" for name, count in found.history.items())
            tokens = f"{found.history_tokens:,} tokens came from decode, {found.missed_tokens:,} were computed again"
            console.print(f"history: {outcomes}; {tokens}")
        if found.unusable:
            console.print(f"{found.unusable} traces without a root span or stages were left out", style="yellow")


def collect(
    nats_url: NatsUrl,
    namespace: Namespace = "default",
    trace_file: Annotated[Path | None, typer.Option(help="Keep the last traces in this file, as OTLP JSON.")] = None,
) -> None:
    """Make traces of requests that another router sends. (kvbus router does so by itself: do not run both.)

    Requests must carry a sampled traceparent, in both legs' kv_transfer_params or, with vLLM's
    --otlp-traces-endpoint, as a header. A trace begins at the engines and ends with decode's first token.

    Example: [bold]OTEL_EXPORTER_OTLP_ENDPOINT=http://jaeger:4317 kvbus collect --nats-url nats://host:4222[/bold]
    """
    from kvbus.config import Config
    from kvbus.trace import run_collector

    with clear_errors(), until_signalled():
        run(run_collector(Config(nats_url=nats_url, namespace=namespace), trace_file, say))


def _as_json(view: Any) -> dict[str, Any]:
    from kvbus.tools.view import MS, problems
    from kvbus.tools.why import why as verdict_on

    root = view.root
    return {
        "trace_id": view.trace_id,
        "ttft_ms": view.ttft_ms,
        "stages": [
            {
                "name": stage.name,
                "engine": stage.engine,
                "start_ms": (stage.start_ns - view.start_ns) / MS,
                "ms": stage.duration_ns / MS,
                "attributes": dict(stage.attributes),
            }
            for stage in view.stages
        ],
        "attributes": dict(root.attributes) if root is not None else {},
        "spans": len(view.spans),
        "why": verdict_on(view).text,
        "problems": problems(view),
    }
