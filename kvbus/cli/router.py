"""`kvbus router`: the router alone, as in production."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvbus.cli.guard import clear_errors
from kvbus.cli.options import Namespace, NatsUrl, Port, seconds
from kvbus.config import Config
from kvbus.errors import ConfigError


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def router(
    nats_url: NatsUrl,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Port = 8000,
    namespace: Namespace = "default",
    max_in_flight: Annotated[int, typer.Option(help="Requests at once for each decode engine; others wait.")] = 512,
    max_queue: Annotated[int, typer.Option(help="How many may wait; to others the router answers 429.")] = 1024,
    max_wait_s: Annotated[float, seconds(help="How long one may wait; after that the router answers 503.")] = 30,
    max_body_mib: Annotated[int, typer.Option(help="The largest request.")] = 32,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy whose X-Forwarded-For and API keys count; repeatable."),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="What of its own the router says on stderr.")] = LogLevel.INFO,
    access_log: Annotated[
        str, typer.Option(help="off, text or json: a line on stdout for each request that has ended.")
    ] = "off",
    max_bodies_mib: Annotated[
        int, typer.Option(help="All requests that are being served, together; to others the router answers 503.")
    ] = 512,
    body_timeout_s: Annotated[float, seconds(help="How long a client may take to send its request.")] = 60,
    first_token_s: Annotated[
        float, seconds(help="How long an engine may take for a stream's first token before another takes over.")
    ] = 600,
    answer_s: Annotated[float, seconds(help="Likewise for an answer that is not streamed.")] = 3600,
    max_takeovers: Annotated[
        int, typer.Option(help="How many engines may be lost in one request before the client gets an error.")
    ] = 3,
    notice_s: Annotated[
        float, seconds(help="Once told to stop, how long it goes on taking requests: balancers must notice.", min=0)
    ] = 5,
    grace_s: Annotated[
        float, seconds(help="Once told to stop, how long running requests may take until they are broken off.", min=0)
    ] = 45,
    max_connections: Annotated[int, typer.Option(help="Clients' connections; further ones get 503.", min=1)] = 8192,
    keep_alive_s: Annotated[
        float, seconds(help="How long a client's connection may be at rest; longer than your balancer keeps them.")
    ] = 75,
    trace_file: Annotated[
        Path | None, typer.Option(help="Keep the last traces (32 to 64 MiB of them) in this file, as OTLP JSON.")
    ] = None,
    engine_api_key: Annotated[
        str,
        typer.Option(
            envvar="KVBUS_ENGINE_API_KEY",
            help="Of engines with --api-key: lets the router ask them for their models itself. Best by the variable.",
        ),
    ] = "",
) -> None:
    """Run the router alone: an OpenAI API in front of the engines that it finds on the bus.

    SIGTERM drains it: not ready at once, no new connections after --notice-s, running requests end, status 0. Ctrl-C
    does so without the notice. A second one breaks off what runs: status 143 or 130.

    Traces also go where the standard variables say, such as OTEL_EXPORTER_OTLP_ENDPOINT=http://jaeger:4317;
    OTEL_TRACES_SAMPLER=parentbased_traceidratio and OTEL_TRACES_SAMPLER_ARG=0.01 sample one request in a hundred.

    Example: [bold]kvbus router --nats-url nats://127.0.0.1:4222 --port 8000[/bold]
    """
    import uvloop

    from kvbus.router.process import run_router
    from kvbus.router.settings import Settings

    level = logging.getLevelNamesMapping()[log_level.name]
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    with clear_errors():
        config = Config(nats_url=nats_url, namespace=namespace)
        settings = Settings(
            max_in_flight=max_in_flight,
            max_queue=max_queue,
            max_wait_s=max_wait_s,
            body_timeout_s=body_timeout_s,
            max_body_mib=max_body_mib,
            max_bodies_mib=max_bodies_mib,
            access_log=access_log,
            trusted_proxies=tuple(trusted_proxy or ()),
            first_token_s=first_token_s,
            answer_s=answer_s,
            max_takeovers=max_takeovers,
            notice_s=notice_s,
            grace_s=grace_s,
            max_connections=max_connections,
            keep_alive_s=keep_alive_s,
        )
        if not (engine_api_key.isascii() and engine_api_key.isprintable()):
            raise ConfigError("--engine-api-key", "(not shown)", "printable ASCII characters")
        status = uvloop.run(run_router(config, host, port, settings, trace_file, engine_api_key))
    raise typer.Exit(status)
