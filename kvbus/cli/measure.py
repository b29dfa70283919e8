"""`kvbus soak` and `kvbus bench`: real engines under load."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from kvbus.cli.guard import clear_errors, say
from kvbus.cli.options import ModelDir, number, run_folder
from kvbus.config import REGISTRATIONS
from kvbus.errors import ConfigError
from kvbus.signals import run

BENCH_ARMS = ("kvbus", "push", "pull", "bidirectional", "single", "transfer", "nohistory", *REGISTRATIONS)


class BenchLoad(StrEnum):
    PROMPTS = "prompts"
    TURNS = "turns"


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
    from kvbus.local import Soak, as_json, cache_dir, run_soak, tiny

    with clear_errors():
        folder = model if model is not None else tiny(cache_dir() / "tiny-qwen3")
        bad = False
        for turn in range(runs):
            plan = Soak(minutes, rate, prompt_tokens, max_tokens, pin, seed)
            outcome = run(run_soak(folder, run_folder(), plan, say))
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


def bench(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians over them are shown.", min=1)] = 3,
    arms: Annotated[str, typer.Option(help=f"What to compare, by commas: {', '.join(BENCH_ARMS)}.")] = (
        "kvbus,push,pull"
    ),
    workload: Annotated[BenchLoad, typer.Option(help="Prompts one at a time and at a rate, or conversations.")] = (
        BenchLoad.PROMPTS
    ),
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt; of turns, of the first.", min=1)] = 1024,
    rate: Annotated[float, number(help="Requests per second; of turns, about.", min=0.1)] = 5.0,
    requests: Annotated[int, typer.Option(help="Requests of each workload in each round.", min=1)] = 60,
    turns: Annotated[int, typer.Option(help="Turns of each conversation.", min=2)] = 6,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each turn adds to the conversation.", min=1)] = 30,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 16,
    prefill: Annotated[int, typer.Option(help="How many prefill engines; only of kvbus.", min=1)] = 1,
    prefill_blocks: Annotated[int | None, typer.Option(help="Give each only so many KV blocks.", min=1)] = None,
    decode_blocks: Annotated[int | None, typer.Option(help="Give decode only so many KV blocks.", min=1)] = None,
    model: ModelDir = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time to first token against vLLM's own NIXL connectors, one request at a time and at a rate.

    Examples:

    [bold]kvbus bench --rounds 3 --rate 5[/bold]

    [bold]kvbus bench --arms eager,jit --decode-blocks 200 --max-tokens 100[/bold] (when to take decode's blocks)

    [bold]kvbus bench --workload turns --arms kvbus,transfer,single[/bold] (conversations: short tails computed on
    decode, all of them transferred, one engine)

    [bold]kvbus bench --workload turns --arms nohistory,kvbus --new-tokens 150 --max-tokens 400[/bold] (answers that
    prefill computes again, or gets from decode)
    """
    from rich.table import Table

    from kvbus.local import Turns, cache_dir, tiny
    from kvbus.local import bench as benchmark

    with clear_errors():
        chosen = [arm.strip() for arm in arms.split(",")]
        for arm in chosen:
            if arm not in benchmark.ARMS:
                raise ConfigError("--arms", arm, ", ".join(benchmark.ARMS))
            if prefill > 1 and arm not in benchmark.EXTRA:
                raise ConfigError("--prefill", prefill, f"1 with {arm}; more with {', '.join(benchmark.EXTRA)}")
        layout = benchmark.Layout(prefill, prefill_blocks, decode_blocks)
        folder = model if model is not None else tiny(cache_dir() / "tiny-qwen3")
        loads: list[benchmark.Workload | Turns] = [
            benchmark.Workload(prompt_tokens, None, requests, max_tokens),
            benchmark.Workload(prompt_tokens, rate, requests, max_tokens),
        ]
        if workload is BenchLoad.TURNS:
            sessions = -(-requests // turns)
            loads = [Turns(sessions, turns, prompt_tokens, new_tokens, max_tokens, sessions / rate)]
        results = benchmark.run_bench(folder, run_folder(), chosen, loads, rounds, say, layout)
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
