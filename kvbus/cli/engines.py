"""`kvbus engine` and `kvbus drain`: one engine, from its start to its end."""

from __future__ import annotations

from typing import Annotated

import typer

from kvbus.cli.guard import clear_errors, err, say
from kvbus.cli.options import Namespace, NatsUrl, seconds
from kvbus.config import Config
from kvbus.errors import ConfigError
from kvbus.signals import run


def engine(
    context: typer.Context,
    role: Annotated[str, typer.Argument(help="prefill, decode or both.")],
    nats_url: NatsUrl,
    model: Annotated[
        str, typer.Option(help="A model's folder, or its id on the Hugging Face hub.", envvar="KVBUS_MODEL")
    ],
    namespace: Namespace = "default",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the connector, such as registration=jit; again."),
    ] = None,
    engine_id: Annotated[
        str | None, typer.Option(help="Its name on the bus. Default: the role and the host's name.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="The port of its API.", min=1, max=65535)] = 8000,
    drain_s: Annotated[float, seconds(help="How long it may take to finish when stopped, seconds.", min=0)] = 45.0,
) -> None:
    """Run one vLLM engine with kvbus's connector. Arguments after [bold]--[/bold] go to vLLM.

    SIGTERM or Ctrl-C lets it finish what it has: routers send nothing new, and it ends when nobody needs its KV.

    Example: [bold]kvbus engine prefill --nats-url nats://host:4222 --model ./my-model -- --max-model-len 4096[/bold]
    """
    from kvbus.local import EnginePlan, default_engine_id, run_engine
    from kvbus.wire import Role, check_token

    with clear_errors():
        if role not in list(Role):
            raise ConfigError("ROLE", role, ", ".join(Role))
        name = check_token("--engine-id", engine_id or default_engine_id(Role(role)))
        config = Config.from_words(settings or (), nats_url=nats_url, namespace=namespace)
        status = run_engine(EnginePlan(Role(role), model, config, name, host, port, drain_s, context.args), say)
    raise typer.Exit(status)


def drain(
    engine: Annotated[str, typer.Argument(help="Its engine id, as `kvbus up` or the router's /ready shows it.")],
    nats_url: NatsUrl,
    namespace: Namespace = "default",
    timeout: Annotated[float, seconds(help="How long to wait until it is empty, seconds.")] = 300.0,
    undo: Annotated[bool, typer.Option("--undo", help="Take it back: it gets requests again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also if it is the last one of its kind.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Let an engine finish what it has and get nothing new, before it is stopped. Ends when the engine is empty.

    Ended or interrupted, this command leaves the engine draining, until --undo. Exit status 3: it is the last ready
    engine of its kind for its model, and was not drained; 4: not empty in time.

    Examples:

    [bold]kvbus drain prefill-0 --nats-url nats://127.0.0.1:4222[/bold]

    [bold]kvbus drain prefill-0 --undo --nats-url nats://127.0.0.1:4222[/bold]
    """
    import json

    from kvbus.bus import NatsBus
    from kvbus.local import drain as draining
    from kvbus.wire import Subjects, check_token

    with clear_errors():
        check_token("ENGINE", engine)
        config = Config(nats_url=nats_url, namespace=namespace)
        bus, subjects = NatsBus(config.servers, "kvbus-drain"), Subjects(config.namespace)
        try:
            if undo:
                outcome, report = run(draining.take_back(bus, subjects, engine, say))
            else:
                outcome, report = run(draining.drain(bus, subjects, engine, timeout, say, force=force))
        except draining.DrainError as failed:
            if json_output:
                known = failed.report.as_json(failed.outcome) if failed.report is not None else {"engine": engine}
                typer.echo(json.dumps({**known, "outcome": failed.outcome.word, "why": str(failed)}))
            err.print(str(failed), style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(failed.outcome.status) from None
        if json_output:
            typer.echo(json.dumps(report.as_json(outcome)))
