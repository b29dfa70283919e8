"""`kvbus cache`: its options, and how what it finds is written."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvbus.cli.live import any_terminal, shown
from kvbus.cli.options import Namespace, NatsUrl
from kvbus.config import Config
from kvbus.errors import ConfigError
from kvbus.signals import run

if TYPE_CHECKING:
    from kvbus.tools.caches import CacheView


@any_terminal
def cache(
    nats_url: NatsUrl,
    prompt: Annotated[str, typer.Argument(help="A text, as of a completion; without one, only blocks are shown.")] = "",
    tokens: Annotated[
        Path | None,
        typer.Option(help="Instead of a text, its token ids: a file with a JSON list; - is standard input."),
    ] = None,
    namespace: Namespace = "default",
    model: Annotated[str, typer.Option(help="The prompt's model, where engines have several.")] = "",
    lora: Annotated[str, typer.Option(help="The LoRA adapter that computes the prompt.")] = "",
    salt: Annotated[str, typer.Option(help="The client's cache_salt.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how much each engine has in its prefix cache, and how much of a prompt.

    Engines tell it that have [bold]cache_events[/bold]; of a prompt only whole blocks count.
    For a text, an engine is asked for its token ids.
    A chat's prompt is what the chat template makes of it: give its token ids.

    Examples:

    [bold]kvbus cache --nats-url nats://127.0.0.1:4222[/bold]

    [bold]kvbus cache --nats-url nats://127.0.0.1:4222 "You are a helpful assistant."[/bold]

    [bold]kvbus cache --nats-url nats://127.0.0.1:4222 --tokens ids.json --json | jq .engines[/bold]
    """
    from kvbus.bus import NatsBus
    from kvbus.tools import caches
    from kvbus.wire import Subjects

    if prompt and tokens is not None:
        raise ConfigError("--tokens", str(tokens), "a text or --tokens, not both")
    config = Config(nats_url=nats_url, namespace=namespace)
    asked: str | list[int] | None = prompt or None
    if tokens is not None:
        asked = caches.read_ids(_read(tokens))
    bus, subjects = NatsBus(config.servers, "kvbus-cache"), Subjects(config.namespace)
    view = run(caches.cache(bus, subjects, where=shown(config), prompt=asked, model=model, lora=lora, salt=salt))
    if json_output:
        typer.echo(json.dumps({"namespace": config.namespace, **asdict(view)}))
    else:
        _print(view)


def _read(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--tokens", str(path), f"a file that can be read ({error})") from None


def _print(view: CacheView) -> None:
    from kvbus.tools.tables import cache_table

    Console(highlight=False).print(cache_table(view.engines, view.prompt_tokens))
    if not view.complete:
        typer.echo("not all engines have told all of their caches")
    if all(row.blocks is None for row in view.engines):
        typer.echo("no engine tells what is in its cache: start them with --set cache_events=true")
