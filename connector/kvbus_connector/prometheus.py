"""kvbus's counters on vLLM's own ``/metrics``: ``vllm:kvbus_*``, labelled as vLLM's are, without ids of requests.

Both halves hand vLLM what was added since the last step; its front end, another process, adds it up here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbus.metrics import Counters

# Metric -> what it counts, and the name of its own label, empty if it has none.
METRICS = {
    "transfers": ("Transfers whose WRITEs have ended, on each prefill rank.", "outcome"),
    "written_bytes": ("Bytes of KV written into decode engines.", ""),
    "late_side": ("Which side the match of a transfer waited for.", "side"),
    "receives_given_up": ("Receives that a decode engine gave up, after the fence.", ""),
    "computed_locally": ("Requests that named a prefill and were computed on decode without asking for it.", ""),
    "recomputed": ("Requests that were computed on decode after a receive had failed.", ""),
    "rebinds": ("Requests that a router gave to another prefill engine.", "outcome"),
    "peers_refused": ("Engines that do not fit this one; the log names the differing field.", ""),
    "writes_overdue": ("WRITEs that ran longer than max_write_s; their decode engine was disconnected.", ""),
    "rejected": ("Messages and events that changed nothing.", "reason"),
    "bus_disconnects": ("Times that the NATS server was lost.", ""),
    "publish_dropped": ("Messages that were not sent because the bus was away.", ""),
    "errors": ("Errors of kvbus's own; the log has the traceback.", "where"),
}
_NAMES = {
    "transfers_done": ("transfers", "done"),
    "transfers_failed": ("transfers", "failed"),
    "bytes_written": ("written_bytes", ""),
    "late_side_prefill": ("late_side", "prefill"),
    "late_side_decode": ("late_side", "decode"),
    "receives_abandoned": ("receives_given_up", ""),
    "computed_locally": ("computed_locally", ""),
    "recomputed": ("recomputed", ""),
    "rebinds": ("rebinds", "done"),
    "rebinds_refused": ("rebinds", "refused"),
    "peers_refused": ("peers_refused", ""),
    "writes_overdue": ("writes_overdue", ""),
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


def metric_of(counter: str) -> tuple[str, str] | None:
    """The metric, and its label's value, that a counter of kvbus belongs to."""
    if counter.startswith("rejected: "):
        return "rejected", counter.removeprefix("rejected: ")
    return _NAMES.get(counter)


class Meter:
    """What was added to some counters since it was last asked."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def read(self, counters: Sequence[Counters]) -> BusStats | None:
        """None if nothing was."""
        total: Counter[str] = Counter()
        for each in counters:
            total.update(each.snapshot())
        if total == self._seen:
            return None
        added = {name: value - self._seen.get(name, 0) for name, value in total.items()}
        self._seen = dict(total)
        return BusStats({name: value for name, value in added.items() if value})


class BusStats(KVConnectorStats):  # type: ignore[misc]
    """Counter -> what was added; in the form that vLLM ships."""

    def aggregate(self, other: BusStats) -> BusStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def is_empty(self) -> bool:
        return not self.data


class BusPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Adds the stats up in ``vllm:kvbus_*``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[PromCounter]
        self._counters = {
            name: counter(
                name=f"vllm:kvbus_{name}", documentation=text, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (text, label) in METRICS.items()
        }
        for name, (_, label) in METRICS.items():
            if not label:  # so that it is there, with 0, before anything happens
                for values in per_engine_labelvalues.values():
                    self._counters[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, added in transfer_stats_data.items():
            if (found := metric_of(name)) is not None:
                metric, own = found
                self._counters[metric].labels(*values, *([own] if METRICS[metric][1] else [])).inc(added)
