"""`kvbus tap`, `kvbus top` and `kvbus pending`: their options, and how what they find is written."""

from __future__ import annotations

import functools
import io
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvbus.cli.guard import clear_errors, err, say
from kvbus.cli.options import Namespace, NatsUrl, seconds
from kvbus.config import Config
from kvbus.signals import run

if TYPE_CHECKING:
    from kvbus.tools.traffic import Snapshot


def any_terminal(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command write question marks for characters that the terminal cannot show."""

    @functools.wraps(command)
    def guarded(**options: Any) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        with clear_errors():
            command(**options)

    return guarded


@any_terminal
def tap(
    nats_url: NatsUrl,
    namespace: Namespace = "default",
    kind: Annotated[str, typer.Option(help="Only these kinds, by commas, such as reg,completed,done.")] = "",
    transfer: Annotated[str, typer.Option(help="Only messages about this transfer.")] = "",
    limit: Annotated[int | None, typer.Option(help="End after so many messages.", min=1)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Heartbeats, pulses and their echoes, too.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a line, every field whole.")] = False,
) -> None:
    """Print what is said on the bus, a line for each message: time, subject, kind, fields. It only listens.

    Long values are shortened; [bold]--json[/bold] has them whole. Subjects lack the namespace.
    Answers to requests (metadata, drain, rebind) go to who asked: not seen here.

    Examples:

    [bold]kvbus tap --nats-url nats://127.0.0.1:4222[/bold]

    [bold]kvbus tap --nats-url nats://127.0.0.1:4222 --transfer ID --json | jq .kind[/bold]
    """
    from kvbus.bus import NatsBus
    from kvbus.tools import lines, watch
    from kvbus.wire import Subjects

    config = Config(nats_url=nats_url, namespace=namespace)
    subjects = Subjects(config.namespace)
    prefix = subjects.everything.removesuffix(">")
    selection = lines.Selection(lines.parse_kinds(kind), transfer, everything)

    def show(wall_s: float, subject: str, said: lines.Decoded) -> None:
        if json_output:
            typer.echo(lines.json_line(wall_s, subject, said))
        else:
            clock = f"{time.strftime('%H:%M:%S', time.localtime(wall_s))}.{int(wall_s * 1000) % 1000:03}"
            typer.echo(lines.line(clock, subject.removeprefix(prefix), said))

    bus = NatsBus(config.servers, "kvbus-tap")
    run(watch.tap(bus, subjects, selection, where=shown(config), limit=limit, show=show, say=_plain))


@any_terminal
def top(
    nats_url: NatsUrl,
    namespace: Namespace = "default",
    interval: Annotated[float, seconds(help="Seconds from picture to picture.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, of what --interval seconds showed.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object; implies --once.")] = False,
) -> None:
    """Show engines, transfers and match waits, live. It only listens, but for asking engines for a heartbeat at once.

    Rates are of the last 10 seconds, and of what an engine wrote into others.
    Waits are of the last minute: which side was late, and how long the other waited.
    A narrow terminal gets fewer columns.

    Examples:

    [bold]kvbus top --nats-url nats://127.0.0.1:4222[/bold]

    [bold]kvbus top --nats-url nats://127.0.0.1:4222 --interval 10 --json[/bold]
    """
    from rich.live import Live

    from kvbus.bus import NatsBus
    from kvbus.tools import watch
    from kvbus.tools.tables import TopView
    from kvbus.wire import Subjects

    config = Config(nats_url=nats_url, namespace=namespace)
    where, console, once = shown(config), Console(highlight=False), once or json_output
    bus, subjects = NatsBus(config.servers, "kvbus-top"), Subjects(config.namespace)

    def draw_with(draw: Callable[[TopView], object]) -> None:
        def show(snapshot: Snapshot, connected: bool, nobody: str) -> None:
            if json_output:
                typer.echo(json.dumps({"namespace": config.namespace, **asdict(snapshot)}))
            else:
                draw(TopView(snapshot, config.namespace, where, connected, console.height if live else None, nobody))

        run(watch.top(bus, subjects, where=where, interval_s=interval, once=once, show=show))

    live = console.is_terminal and not once
    if not live:
        draw_with(console.print)
        return
    with Live(f"listening to {where} …", console=console, auto_refresh=False, vertical_overflow="crop") as screen:
        draw_with(lambda picture: screen.update(picture, refresh=True))


@any_terminal
def pending(
    nats_url: NatsUrl,
    namespace: Namespace = "default",
    listen_s: Annotated[float, seconds("--for", help="How long to listen, seconds.")] = 5.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List transfers that have begun and not ended, oldest first: what waits for what. It only listens.

    [bold]It knows only what was said while it listened.[/bold]
    A half that looks alone may not be: listen for longer than your prefills take.
    Ages count from the first word that was heard.
    What ends without a word stays in the list: by a block lease, or a killed engine.

    Examples:

    [bold]kvbus pending --nats-url nats://127.0.0.1:4222[/bold]

    [bold]kvbus pending --nats-url nats://127.0.0.1:4222 --for 60 --json[/bold]
    """
    from rich.progress import Progress

    from kvbus.bus import NatsBus, NobodyError
    from kvbus.tools import watch
    from kvbus.tools.tables import pending_table
    from kvbus.wire import Subjects

    config = Config(nats_url=nats_url, namespace=namespace)
    bus, subjects = NatsBus(config.servers, "kvbus-pending"), Subjects(config.namespace)
    if not err.is_terminal:
        _plain(f"listening for {listen_s:g} s")
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"listening for {listen_s:g} s", total=listen_s)
        rows, unkept, nobody = run(
            watch.pending(
                bus,
                subjects,
                where=shown(config),
                listen_s=listen_s,
                progress=lambda passed: bar.update(task, completed=passed),
            )
        )
    if json_output:
        typer.echo(json.dumps({"listened_s": listen_s, "pending": [asdict(row) for row in rows], "unkept": unkept}))
    else:
        if unkept:
            _plain(f"{unkept} messages were not looked at: they were too many")
        if rows:
            Console(highlight=False).print(pending_table(rows))
        else:
            typer.echo("nothing is pending")
    if nobody:
        raise NobodyError(nobody)


def shown(config: Config) -> str:
    """The NATS servers, for people."""
    from kvbus.bus import without_credentials

    return ", ".join(without_credentials(server) for server in config.servers)


def _plain(text: str) -> None:
    """Say a text whose brackets are no markup."""
    say(escape(text))
