"""kvbus's counters on vLLM's own ``/metrics``: ``vllm:kvbus_*``, labelled as vLLM's are, without ids of requests.

Both halves hand vLLM what was added since the last step; its front end, another process, adds it up here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbus.metrics import Counters, durations, plain

from .board import Board


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
        """For vLLM's log: durations as their means."""
        number: dict[str, int] = {}
        seconds: dict[str, float] = {}
        for name, count, mean_s in durations(self.data):
            number[name] = number.get(name, 0) + count
            seconds[name] = seconds.get(name, 0.0) + count * mean_s
        return plain(self.data) | {f"{name}_mean_ms": round(seconds[name] / number[name] * 1e3, 3) for name in number}

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
        self._board = Board(
            metric_types[PromCounter], metric_types[Histogram], labelnames, list(per_engine_labelvalues.values())
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._board.add(transfer_stats_data, self.per_engine_labelvalues[engine_idx])
