"""`kvbus up`, `kvbus demo` and `kvbus model`: a cluster on this machine."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from kvbus.cli.guard import clear_errors, say, until_signalled
from kvbus.cli.options import ModelDir, Port, model_folder, run_folder
from kvbus.signals import run

SHOW_TRANSFERS = {"local_prefill_tokens": 0}  # who tries this asks short questions, and wants to see them transferred


def up(
    context: typer.Context,
    prefill: Annotated[int, typer.Option(help="How many prefill engines.", min=1)] = 1,
    decode: Annotated[int, typer.Option(help="How many decode engines.", min=1)] = 1,
    model: ModelDir = None,
    nats_url: Annotated[str | None, typer.Option(help="Use this NATS server instead of starting one.")] = None,
    port: Port = 8000,
) -> None:
    """Keep a local cluster running until Ctrl-C: NATS, engines, router. Arguments after [bold]--[/bold] go to vLLM.

    Examples:

    [bold]kvbus up[/bold]

    [bold]kvbus up --prefill 2 --model ./my-model --port 9000 -- --max-model-len 4096[/bold]
    """
    from kvbus.local import Cluster

    with clear_errors():
        cluster = Cluster(
            model_folder(model),
            run_folder(),
            prefill=prefill,
            decode=decode,
            nats_url=nats_url,
            port=port,
            arguments=context.args,
            extra=SHOW_TRANSFERS,
            say=say,
        )
        with cluster, until_signalled():
            say(f"ready: [bold]{cluster.url}/v1[/bold], model [bold]{cluster.served_name}[/bold]; Ctrl-C ends it")
            example = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20}'
            say(f"look: kvbus trace (the last request), kvbus top --nats-url {cluster.nats_url}")
            say(f"try: curl {cluster.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{example}'")
            while True:
                cluster.check()
                time.sleep(0.5)


def prepare_model() -> None:
    """Make the demo model (SmolLM2-135M-Instruct) in $KVBUS_CACHE, if it is not there; print its folder."""
    with clear_errors():
        typer.echo(model_folder(None))


def demo(model: ModelDir = None) -> None:
    """Run the main job once: one prefill and one decode engine, three chat questions, figures for each."""
    from kvbus.local import Cluster, run_demo

    with clear_errors():
        started = time.monotonic()
        arguments = ["--max-model-len", "2048"]
        cluster = Cluster(model_folder(model), run_folder(), arguments=arguments, extra=SHOW_TRANSFERS, say=say)
        with cluster:
            say(f"ready after {time.monotonic() - started:.0f} s")
            run(run_demo(cluster, Console()))
        say("done; nothing is left running")
