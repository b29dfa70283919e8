"""The command ``kvbus``: the list of its commands. Each file here is the commands of one kind.

Here are options, what is written to the terminal and exit statuses; what a command does is in the room that it imports,
inside the command: ``kvbus --help`` is to be quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvbus import __version__
from kvbus.cli import caches, cluster, engines, live, measure, router, simulate, traces

app = typer.Typer(
    help="kvbus: push-based KV-cache transfer between vLLM's prefill and decode engines, coordinated over NATS.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"kvbus {__version__}")
        raise typer.Exit


FOR_VLLM = {"allow_extra_args": True, "ignore_unknown_options": False}  # what follows "--"

app.command()(router.router)
app.command(context_settings=FOR_VLLM)(cluster.up)
app.command(context_settings=FOR_VLLM)(engines.engine)
app.command("model")(cluster.prepare_model)
app.command()(engines.drain)
app.command()(cluster.demo)
app.command()(measure.soak)
app.command()(measure.bench)
app.command()(simulate.sim)
app.command()(simulate.scale)
app.command()(traces.trace)
app.command()(traces.why)
app.command()(traces.report)
app.command()(traces.collect)
app.command()(live.tap)
app.command()(live.top)
app.command()(live.pending)
app.command()(caches.cache)
