"""`kvbus sim` and `kvbus scale`: the real protocol code among simulated engines."""

from __future__ import annotations

import logging
import time
from typing import Annotated

import typer
from rich.console import Console

from kvbus.cli.guard import clear_errors, err, say
from kvbus.cli.options import number, run_folder
from kvbus.signals import run


def sim(
    transfers: Annotated[
        int | None,
        typer.Option(help="How many requests, in runs of 200 each. Default: 10,000; in real time 1,000.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first run; the next ones count on.")] = 1,
    faults: Annotated[
        str, typer.Option(help="all, none, bus, partition, kill, restart, rebind, abort or forge.")
    ] = "all",
    bus: Annotated[
        str,
        typer.Option(
            help="virtual: simulated, in virtual time; a seed gives the same run again. nats: the real shells over a "
            "nats-server that is started, killed and frozen, in real time (a run takes about 20 s). memory: likewise "
            "without a server. In real time a seed gives the same requests and faults, but not the same schedule."
        ),
    ] = "virtual",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The real protocol code among simulated engines, with faults; its invariants are checked at every step.

    Of three requests in ten the decode engine has the beginning, and writes it into the prefill engine (history).

    Examples:

    [bold]kvbus sim[/bold]

    [bold]kvbus sim --faults partition --transfers 1000[/bold]

    [bold]kvbus sim --bus nats[/bold]
    """
    import json

    from rich.progress import Progress
    from rich.table import Table

    from kvbus.sim.run import run_many

    logging.getLogger("kvbus").setLevel(logging.CRITICAL)  # faults are what it is about
    wanted = transfers or (10_000 if bus == "virtual" else 1_000)
    started = time.monotonic()
    with clear_errors(), Progress(console=err, transient=True) as bar:
        task = bar.add_task("transfers", total=wanted)
        summary = run_many(seed, wanted, faults, lambda done: bar.update(task, completed=done), bus)
    took_s = time.monotonic() - started
    figures = {"transfers": summary.transfers, "violations": 0, "worst_wait_s": round(summary.worst_wait_s, 1)}
    if json_output:
        typer.echo(json.dumps({**figures, "took_s": round(took_s, 1), "counts": dict(summary.counts)}))
        return
    table = Table("what", "how many", title=f"{summary.transfers} transfers, seed {seed}, faults: {faults}, bus: {bus}")
    for what, how_many in [*figures.items(), *summary.counts.most_common()]:
        table.add_row(what, f"{how_many:,}")
    Console().print(table)
    say(f"no invariant was broken; {took_s:.0f} s")


def scale(
    engines: Annotated[int, typer.Option(help="How many engines, half of them for prefill.", min=2)] = 64,
    rate: Annotated[float, number(help="Requests per second.", min=0.1)] = 500.0,
    minutes: Annotated[float, number(help="How long, after a warm-up of 10 s.", min=0.05)] = 10.0,
    processes: Annotated[int, typer.Option(help="Processes that the engines are dealt to.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer, 5 ms apart.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Of arrival times and of what engines take.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What one router and one nats-server cost with many engines, without a GPU.

    The router, the nats-server, the engines' connections and every message on the bus are real. What vLLM computes and
    the memory that KV is written into are simulated.

    Example: [bold]kvbus scale --engines 64 --rate 50 --minutes 10[/bold]
    """
    from rich.table import Table

    from kvbus.sim.scale.plan import Scale
    from kvbus.sim.scale.report import as_json, rows
    from kvbus.sim.scale.run import run_scale

    with clear_errors():
        plan = Scale(engines, rate, minutes, min(processes, engines), max_tokens=max_tokens, seed=seed)
        outcome = run(run_scale(plan, run_folder(), say))
    if json_output:
        typer.echo(as_json(outcome))
        return
    table = Table("what", "figure", title=f"{engines} engines, {rate:g} requests/s, {minutes:g} min")
    for what, figure in rows(outcome):
        table.add_row(what, figure)
    Console().print(table)
