"""The command ``kvbus``."""

from __future__ import annotations

import logging
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvbus import __version__
from kvbus.config import REGISTRATIONS, Config
from kvbus.errors import ConfigError
from kvbus.signals import run
from kvbus.tools import live_commands, trace_commands
from kvbus.tools.guard import Namespace, NatsUrl, clear_errors, err, say, until_told
from kvbus.tools.options import number, seconds

BENCH_ARMS = ("kvbus", "push", "pull", *REGISTRATIONS)

app = typer.Typer(
    help="kvbus: push-based KV-cache transfer between vLLM's prefill and decode engines, coordinated over NATS.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Port = Annotated[int, typer.Option(help="The router's port.", min=1, max=65535)]
ModelDir = Annotated[Path | None, typer.Option("--model", help="A model's folder. Default: SmolLM2-135M-Instruct.")]


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _log(level: int) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")


def _run_folder() -> Path:
    from kvbus.local.model import cache_dir

    folder = cache_dir() / "runs" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _model(folder: Path | None) -> Path:
    from kvbus.local.model import check_model_dir, smollm2

    return check_model_dir(folder) if folder is not None else smollm2(say)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"kvbus {__version__}")
        raise typer.Exit


@app.command()
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

    from kvbus.router.running import run_router
    from kvbus.router.settings import Settings

    _log(logging.getLevelNamesMapping()[log_level.name])
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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
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
    from kvbus.local.cluster import Cluster

    with clear_errors():
        cluster = Cluster(
            _model(model),
            _run_folder(),
            prefill=prefill,
            decode=decode,
            nats_url=nats_url,
            port=port,
            arguments=context.args,
            say=say,
        )
        with cluster, until_told():
            say(f"ready: [bold]{cluster.url}/v1[/bold], model [bold]{cluster.served_name}[/bold]; Ctrl-C ends it")
            example = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20}'
            say(f"look: kvbus trace (the last request), kvbus top --nats-url {cluster.nats_url}")
            say(f"try: curl {cluster.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{example}'")
            while True:
                cluster.check()
                time.sleep(0.5)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
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
    from kvbus.local.engine import EnginePlan, default_engine_id, run_engine
    from kvbus.messages import Role
    from kvbus.subjects import check_token

    with clear_errors():
        if role not in list(Role):
            raise ConfigError("ROLE", role, ", ".join(Role))
        name = check_token("--engine-id", engine_id or default_engine_id(Role(role)))
        config = Config.from_words(settings or (), nats_url=nats_url, namespace=namespace)
        status = run_engine(EnginePlan(Role(role), model, config, name, host, port, drain_s, context.args), say)
    raise typer.Exit(status)


@app.command("model")
def prepare_model() -> None:
    """Make the demo model (SmolLM2-135M-Instruct) in $KVBUS_CACHE, if it is not there; print its folder."""
    with clear_errors():
        typer.echo(_model(None))


@app.command()
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
    from kvbus.subjects import Subjects, check_token

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


@app.command()
def demo(model: ModelDir = None) -> None:
    """Run the main job once: one prefill and one decode engine, three chat questions, figures for each."""
    from kvbus.local.cluster import Cluster
    from kvbus.local.demo import run_demo

    with clear_errors():
        started = time.monotonic()
        cluster = Cluster(_model(model), _run_folder(), arguments=["--max-model-len", "2048"], say=say)
        with cluster:
            say(f"ready after {time.monotonic() - started:.0f} s")
            run(run_demo(cluster, Console()))
        say("done; nothing is left running")


@app.command()
def soak(
    minutes: Annotated[float, number(help="How long.", min=0.05)] = 1.0,
    rate: Annotated[float, number(help="Requests per second.", min=0.1)] = 5.0,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 16,
    runs: Annotated[int, typer.Option(help="How many runs, each with engines booted anew.", min=1)] = 1,
    pin: Annotated[bool, typer.Option(help="Bind each engine to a core of its own.")] = False,
    seed: Annotated[int, typer.Option(help="Of prompts and arrival times.")] = 1,
    model: ModelDir = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object for each run.")] = False,
) -> None:
    """Load a local cluster of real engines and compare every answer with a single engine's. Default: a tiny model.

    Example: [bold]kvbus soak --minutes 10 --rate 5[/bold]
    """
    from kvbus.local.model import cache_dir, tiny
    from kvbus.local.soak import Soak, as_json, run_soak

    with clear_errors():
        folder = model if model is not None else tiny(cache_dir() / "tiny-qwen3")
        bad = False
        for turn in range(runs):
            plan = Soak(minutes, rate, prompt_tokens, max_tokens, pin, seed)
            outcome = run(run_soak(folder, _run_folder(), plan, say))
            bad = bad or outcome.stalled or bool(outcome.figures.failed or outcome.figures.wrong)
            if json_output:
                typer.echo(as_json(outcome))
            else:
                got = outcome.figures
                typer.echo(
                    f"run {turn + 1}/{runs}: {got.requests} requests, {got.failed} failed, {got.wrong} wrong, "
                    f"{'STALLED' if outcome.stalled else 'no stall'}; TTFT p50 {got.ttft_p50:.0f} ms, p90 "
                    f"{got.ttft_p90:.0f}, max {got.ttft_max:.0f}; TPOT p50 {got.tpot_p50:.1f} ms; "
                    f"hand-off p50 {outcome.hand_off_p50_ms:.1f} ms; memory "
                    f"{outcome.rss_quarter_mib:.0f} -> {outcome.rss_end_mib:.0f} MiB; idle CPU "
                    f"{outcome.idle_cpu_percent:.1f} % of a core; free blocks {outcome.free_blocks}"
                )
        raise typer.Exit(int(bad))


@app.command()
def bench(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians over them are shown.", min=1)] = 3,
    arms: Annotated[str, typer.Option(help=f"What to compare, by commas: {', '.join(BENCH_ARMS)}.")] = (
        "kvbus,push,pull"
    ),
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 1024,
    rate: Annotated[float, number(help="Requests per second of the second workload.", min=0.1)] = 5.0,
    requests: Annotated[int, typer.Option(help="Requests of each workload in each round.", min=1)] = 60,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 16,
    decode_blocks: Annotated[int | None, typer.Option(help="Give decode only so many KV blocks.", min=1)] = None,
    model: ModelDir = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time to first token against vLLM's own NIXL connectors, one request at a time and at a rate.

    Examples:

    [bold]kvbus bench --rounds 3 --rate 5[/bold]

    [bold]kvbus bench --arms eager,jit --decode-blocks 200 --max-tokens 100[/bold] (when to take decode's blocks)
    """
    from rich.table import Table

    from kvbus.local import bench as benchmark
    from kvbus.local.model import cache_dir, tiny

    with clear_errors():
        chosen = [arm.strip() for arm in arms.split(",")]
        for arm in chosen:
            if arm not in benchmark.ARMS:
                raise ConfigError("--arms", arm, ", ".join(benchmark.ARMS))
        folder = model if model is not None else tiny(cache_dir() / "tiny-qwen3")
        loads = [
            benchmark.Workload(prompt_tokens, None, requests, max_tokens),
            benchmark.Workload(prompt_tokens, rate, requests, max_tokens),
        ]
        results = benchmark.run_bench(folder, _run_folder(), chosen, loads, rounds, say, decode_blocks)
        if json_output:
            typer.echo(benchmark.as_json(results))
            return
        names = ("TTFT p50 ms", "TTFT p90 ms", "TPOT p50 ms", "failed", "preemptions", f"TTFT p50 / {chosen[0]}")
        table = Table("workload", "arm", *names)
        for each in benchmark.summarize(results):
            figures = (f"{each.ttft_p50:.0f}", f"{each.ttft_p90:.0f}", f"{each.tpot_p50:.1f}")
            table.add_row(
                each.workload, each.arm, *figures, str(each.failed), str(each.preemptions), f"{each.ratio:.2f}"
            )
        Console().print(table)


@app.command()
def sim(
    transfers: Annotated[
        int | None,
        typer.Option(help="How many requests, over lives of 200 each. Default: 10,000; in real time 1,000.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first life; the next ones count on.")] = 1,
    faults: Annotated[
        str, typer.Option(help="all, none, bus, partition, kill, restart, rebind, abort or forge.")
    ] = "all",
    bus: Annotated[
        str,
        typer.Option(
            help="virtual: played, in virtual time; a seed gives the same life again. nats: the real shells over a "
            "nats-server that is started, killed and frozen, in real time (a life takes about 20 s). memory: likewise "
            "without a server. In real time a seed gives the same requests and faults, but not the same schedule."
        ),
    ] = "virtual",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Chaos: the real protocol code among played engines, with faults, its laws checked at every step.

    Examples:

    [bold]kvbus sim[/bold]

    [bold]kvbus sim --faults partition --transfers 1000[/bold]

    [bold]kvbus sim --bus nats[/bold]
    """
    import json

    from rich.progress import Progress
    from rich.table import Table

    from kvbus.sim.run import run_lives

    logging.getLogger("kvbus").setLevel(logging.CRITICAL)  # faults are what it is about
    wanted = transfers or (10_000 if bus == "virtual" else 1_000)
    started = time.monotonic()
    with clear_errors(), Progress(console=err, transient=True) as bar:
        task = bar.add_task("transfers", total=wanted)
        account = run_lives(seed, wanted, faults, lambda done: bar.update(task, completed=done), bus)
    took_s = time.monotonic() - started
    figures = {"transfers": account.transfers, "violations": 0, "worst_wait_s": round(account.worst_wait_s, 1)}
    if json_output:
        typer.echo(json.dumps({**figures, "took_s": round(took_s, 1), "counts": dict(account.counts)}))
        return
    table = Table("what", "how many", title=f"{account.transfers} transfers, seed {seed}, faults: {faults}, bus: {bus}")
    for what, how_many in [*figures.items(), *account.counts.most_common()]:
        table.add_row(what, f"{how_many:,}")
    Console().print(table)
    say(f"no law was broken; {took_s:.0f} s")


@app.command()
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
    the memory that KV is written into are played.

    Example: [bold]kvbus scale --engines 64 --rate 50 --minutes 10[/bold]
    """
    from rich.table import Table

    from kvbus.sim.scale import Scale, as_json, rows, run_scale

    with clear_errors():
        plan = Scale(engines, rate, minutes, min(processes, engines), max_tokens=max_tokens, seed=seed)
        outcome = run(run_scale(plan, _run_folder(), say))
    if json_output:
        typer.echo(as_json(outcome))
        return
    table = Table("what", "figure", title=f"{engines} engines, {rate:g} requests/s, {minutes:g} min")
    for what, figure in rows(outcome):
        table.add_row(what, figure)
    Console().print(table)


trace_commands.register(app)
live_commands.register(app)

if __name__ == "__main__":
    app()
