"""Which of kvbus's counts become which metric, ``vllm:kvbus_*``, and adds them up in those. Needs no vLLM.

Every label value that is known beforehand is there with 0 from the start: ``increase()`` of a counter that appears
with 1 is 0, and an alert on it would miss the first fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbus.metrics import BUCKETS_US, durations, plain

# Metric -> what it counts, and the name of its own label, empty if it has none.
METRICS = {
    "transfers": ("Transfers whose WRITEs have ended, on each prefill rank.", "outcome"),
    "written_bytes": ("Bytes of KV written into decode engines.", ""),
    "late_side": ("Which side the match of a transfer waited for.", "side"),
    "receives_given_up": ("Receives that a decode engine gave up, after the fence.", ""),
    "computed_locally": ("Requests that named a prefill and were computed on decode without asking for it.", ""),
    "history_tokens": ("Tokens of prompts whose KV prefill took from decode's prefix cache.", ""),
    "history": ("Prompts of which a router said that decode has the beginning, by what became of it.", "outcome"),
    "short_tails": ("Requests that decode computed itself since its prefix cache had nearly all of the prompt.", ""),
    "first_tokens": ("Requests that went on from the token that prefill had sampled.", ""),
    "recomputed": ("Requests that were computed on decode after a receive had failed.", ""),
    "rebinds": ("Requests that a router gave to another prefill engine.", "outcome"),
    "peers_refused": ("Engines that do not fit this one; the log names the differing field.", ""),
    "writes_overdue": ("WRITEs that ran longer than max_write_s; their decode engine was disconnected.", ""),
    "cache_blocks": ("Blocks of the prefix cache that the bus was told of, by what became of them.", "what"),
    "cache_events_lost": ("Times that vLLM's KV events came faster than they were told.", ""),
    "rejected": ("Messages and events that changed nothing.", "reason"),
    "bus_disconnects": ("Times that the NATS server was lost.", ""),
    "publish_dropped": ("Messages that were not sent because the bus was away.", ""),
    "errors": ("Errors of kvbus's own; the log has the traceback.", "where"),
}
# The same for what is measured in seconds: histograms.
TIMES = {
    "match_wait_seconds": ("How long one side of a transfer waited for the other, by the side waited for.", "side"),
    "write_seconds": ("How long the WRITEs of a transfer took, on each prefill rank.", ""),
}
_NAMES = {
    "transfers_done": ("transfers", "done"),
    "transfers_failed": ("transfers", "failed"),
    "bytes_written": ("written_bytes", ""),
    "late_side_prefill": ("late_side", "prefill"),
    "late_side_decode": ("late_side", "decode"),
    "receives_abandoned": ("receives_given_up", ""),
    "computed_locally": ("computed_locally", ""),
    "short_tails": ("short_tails", ""),
    "history_tokens": ("history_tokens", ""),
    "history: taken": ("history", "taken"),
    "history: lost": ("history", "lost"),
    "history: no source": ("history", "no source"),
    "history: too late": ("history", "too late"),
    "history: does not pay": ("history", "does not pay"),
    "history: nothing is missing": ("history", "nothing is missing"),
    "history: finished before it was scheduled": ("history", "finished"),
    "first_tokens": ("first_tokens", ""),
    "recomputed": ("recomputed", ""),
    "cache: stored": ("cache_blocks", "stored"),
    "cache: removed": ("cache_blocks", "removed"),
    "cache: events lost": ("cache_events_lost", ""),
    "rebinds": ("rebinds", "done"),
    "rebinds_refused": ("rebinds", "refused"),
    "peers_refused": ("peers_refused", ""),
    "writes_overdue": ("writes_overdue", ""),
    "rejected: full": ("rejected", "full"),
    "rejected_messages": ("rejected", "malformed"),
    "rejected_notification": ("rejected", "malformed notification"),
    "disconnects": ("bus_disconnects", ""),
    "publish_dropped": ("publish_dropped", ""),
    "callback_errors": ("errors", "callback"),
    "node_errors": ("errors", "node"),
    "task_errors": ("errors", "task"),
    "writer_errors": ("errors", "writer"),
    "writer_queue_full": ("rejected", "writer's queue is full"),
    "connect_failed": ("errors", "connecting"),
    "nats_errors": ("errors", "nats"),
}
_TIMED = {
    "match_wait_prefill": ("match_wait_seconds", "prefill"),
    "match_wait_decode": ("match_wait_seconds", "decode"),
    "write": ("write_seconds", ""),
}


def metric_of(counter: str) -> tuple[str, str] | None:
    """The metric, and its label's value, that a counter of kvbus belongs to."""
    if counter.startswith("rejected: "):
        return "rejected", counter.removeprefix("rejected: ")
    return _NAMES.get(counter)


class Board:
    """The metrics themselves.

    Args:
        counter, histogram: classes like those of ``prometheus_client``; vLLM gives others under Ray.
        labelnames: vLLM's own.
        engines: for each engine of this front end the values of these.
    """

    def __init__(
        self,
        counter: Callable[..., Any],
        histogram: Callable[..., Any],
        labelnames: Sequence[str],
        engines: Sequence[Sequence[object]],
    ) -> None:
        def about(name: str, text: str, label: str) -> dict[str, Any]:
            labels = [*labelnames, *([label] if label else [])]
            return {"name": f"vllm:kvbus_{name}", "documentation": text, "labelnames": labels}

        buckets = [bound_us / 1e6 for bound_us in BUCKETS_US]
        self._metrics = {name: counter(**about(name, *told)) for name, told in METRICS.items()}
        self._metrics |= {name: histogram(**about(name, *told), buckets=buckets) for name, told in TIMES.items()}
        for values in engines:
            for metric, own in (*_NAMES.values(), *_TIMED.values()):
                self._of(metric, own, values)

    def add(self, added: Mapping[str, int], values: Sequence[object]) -> None:
        """Counts that were added at the engine whose labels have these values. What is not to be shown is passed by."""
        for name, count in plain(added).items():
            if (found := metric_of(name)) is not None:
                self._of(*found, values).inc(count)
        for name, count, mean_s in durations(added):
            if name in _TIMED:
                metric = self._of(*_TIMED[name], values)
                for _ in range(count):
                    metric.observe(mean_s)

    def _of(self, metric: str, own: str, values: Sequence[object]) -> Any:
        return self._metrics[metric].labels(*values, *([own] if own else []))
