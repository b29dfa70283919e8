"""What a run of ``kvbus scale`` has found, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvbus.sim.scale.plan import Scale
from kvbus.sim.scale.sampler import Sample


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened.

    Attributes:
        load: the client's figures, times in ms; ``windows`` the same for each minute, ``errors`` some of its errors.
        prefill_way: how long a request took from the client to its prefill engine, ms.
        counts, bus: the engines' counters.
        leftovers: how many requests the engines still remembered at the end.
        delivered: messages per second, by what is told on their subjects.
    """

    plan: Scale
    load: dict[str, Any]
    windows: list[dict[str, Any]]
    prefill_way: dict[str, float]
    counts: dict[str, int]
    bus: dict[str, int]
    leftovers: int
    errors: list[str]
    samples: list[Sample]
    delivered: dict[str, float] = field(default_factory=dict)

    @property
    def achieved_rate(self) -> float:
        """Requests answered through the router, per second."""
        how: dict[str, int] = self.load["how"]
        answered = sum(number for what, number in how.items() if not what.startswith(("failed", "not sent")))
        return round(answered / (60 * self.plan.minutes), 1)

    def cpu_ms(self, name: str) -> float:
        """CPU for each request answered, ms; ``name`` is of a sample's figure.

        It says more than latencies do where other programs use the machine, too.
        """
        return round(10 * self.mean(name) / max(self.achieved_rate, 0.1), 3)

    @property
    def messages_per_request(self) -> dict[str, float]:
        """Those delivered, by kind; heartbeats and pulses come whether or not there are requests."""
        rate = max(self.achieved_rate, 0.1)
        return {kind: round(number / rate, 2) for kind, number in self.delivered.items()}

    def mean(self, name: str) -> float:
        values: list[float] = [getattr(each, name) for each in self.samples]
        return round(sum(values) / max(1, len(values)), 1)


def quantiles_ms(values: Sequence[float]) -> dict[str, float]:
    """The quantiles that are reported, in ms, of values in seconds."""
    ordered = sorted(values) or [0.0]
    last = len(ordered) - 1
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(1e3 * ordered[min(last, int(share * len(ordered)))], 2) for name, share in shares.items()}


def as_json(outcome: Outcome) -> str:
    cpu_ms = {name: outcome.cpu_ms(f"{name}_cpu") for name in ("router", "nats", "engines", "load")}
    figures = {"achieved_rate": outcome.achieved_rate, "messages_per_request": outcome.messages_per_request}
    return json.dumps({**asdict(outcome), **figures, "cpu_ms_per_request": cpu_ms})


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """The summary, line by line."""
    load, samples = outcome.load, outcome.samples

    def times(of: dict[str, float]) -> str:
        return f"{of['p50']:.1f} / {of['p99']:.1f} / {of['max']:.0f}"

    def memory(name: str) -> str:
        return f"{getattr(samples[0], name):.0f} -> {getattr(samples[-1], name):.0f}" if samples else "unknown"

    return [
        ("requests/s answered", f"{outcome.achieved_rate:.1f}"),
        ("how they ended", ", ".join(f"{number} {how}" for how, number in load["how"].items())),
        ("TTFT less the engine's own time, ms p50 / p99 / max", times(load["overhead"])),
        ("the same without a router (floor)", times(load["direct"])),
        ("from the client to the prefill engine, ms", times(outcome.prefill_way)),
        ("TTFT, ms", times(load["ttft"])),
        ("client behind its own plan, ms", times(load["late"])),
        ("router, % of a core", f"{outcome.mean('router_cpu'):.0f}"),
        ("router, ms of CPU for each request", f"{outcome.cpu_ms('router_cpu'):.2f}"),
        ("router, MiB start -> end", memory("router_mib")),
        ("nats-server, % of a core", f"{outcome.mean('nats_cpu'):.0f}"),
        ("nats-server, MiB start -> end", memory("nats_mib")),
        ("messages/s published / delivered", f"{outcome.mean('published'):.0f} / {outcome.mean('delivered'):.0f}"),
        ("messages delivered for each request", _kinds(outcome.messages_per_request)),
        ("simulated engines, % of a core", f"{outcome.mean('engines_cpu'):.0f}"),
        ("simulated engines, MiB start -> end", memory("engines_mib")),
        ("client, % of a core", f"{outcome.mean('load_cpu'):.0f}"),
        ("machine, % of all cores", f"{outcome.mean('machine_cpu'):.0f}"),
        ("requests still remembered by engines", str(outcome.leftovers)),
    ]


def _kinds(messages: dict[str, float]) -> str:
    kinds = ", ".join(f"{number:.1f} {kind}" for kind, number in messages.items() if number >= 0.05)
    return f"{sum(messages.values()):.1f}: {kinds}"
