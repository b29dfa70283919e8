"""Draws `kvbus top` and `kvbus pending` for the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvbus.tools.caches import CacheRow
from kvbus.tools.lines import printable
from kvbus.tools.pending import PendingRow
from kvbus.tools.traffic import MIB, WINDOW_S, EngineRow, Snapshot, WaitRow

WIDE_CHARS = 140  # from here on names have room beside columns of full width
LATE_HEARTBEAT_S = 1.5
_STATE_STYLES = {"ready": "green", "starting": "cyan", "draining": "yellow"}


@dataclass(frozen=True, slots=True)
class TopView:
    """All of `kvbus top`.

    ``max_lines``: engines that do not fit are only counted; None shows all. ``nobody``: why there may be none.
    """

    snapshot: Snapshot
    namespace: str
    where: str
    connected: bool
    max_lines: int | None = None
    nobody: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = list(self._head())
        yield from head
        yield Text()
        yield _waits(self.snapshot.waits)
        yield Text()
        rows = self.snapshot.engines
        if not rows:
            yield Text(self.nobody or "no engine is on the bus", style="dim")
            return
        room = len(rows)
        if self.max_lines is not None:
            lines_above = sum(len(text.wrap(console, options.max_width)) for text in head) + len(self.snapshot.waits)
            room = max(1, self.max_lines - lines_above - 5)  # two empty lines, two heads of tables, what is left out
        yield _engines(rows[:room], options.max_width)
        if len(rows) > room:
            yield Text(f"and {len(rows) - room} more engines", style="dim")

    def _head(self) -> Iterable[Text]:
        got = self.snapshot
        there = [row for row in got.engines if not row.state.startswith("gone")]
        yield Text(
            f"kvbus top: namespace {self.namespace} at {self.where}, listening for {got.listened_s:.0f} s", style="bold"
        )
        rates = f"{got.transfers_per_s:.1f} transfers/s, {got.mib_per_s:.1f} MiB/s"
        totals = f"{got.transfers:,} transfers, {got.written_bytes / MIB:,.0f} MiB, {got.failures:,} failed"
        yield Text(f"{len(there)} engines ({_roles(there)}); {rates}; so far {totals}")
        if got.undecodable:
            yield Text(f"{got.undecodable:,} messages could not be decoded; see kvbus tap", style="yellow")
        if not self.connected:
            yield Text("the NATS server is away; this is what was known before", style="bold red")


def pending_table(rows: Iterable[PendingRow]) -> RenderableType:
    """Transfer ids and engines are folded, not shortened: users search for them."""
    table = _table()
    table.add_column("age s", justify="right", no_wrap=True)
    table.add_column("waiting for", no_wrap=True)
    table.add_column("transfer", overflow="fold")
    table.add_column("try", justify="right", no_wrap=True)
    table.add_column("prefill → decode", overflow="fold")
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.age_s:.1f}",
            row.stage.value,
            Text(_clean(row.transfer_id)),
            _number(row.attempt),
            Text(f"{_clean(row.source_engine) or '?'} → {_clean(row.sink_engine) or '?'}"),
            _number(row.blocks),
            _number(row.prompt_tokens),
        )
    return table


def cache_table(rows: Iterable[CacheRow], prompt_tokens: int | None) -> RenderableType:
    """Who has how much, and how much of a prompt of so many tokens."""
    table = _table()
    table.add_column("engine", overflow="fold")
    table.add_column("role", no_wrap=True)
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True)
    if prompt_tokens is not None:
        table.add_column(f"of the {prompt_tokens:,} tokens", justify="right")
    for row in rows:
        told = "-" if row.blocks is None else f"{row.blocks:,}"
        cells: list[RenderableType] = [Text(_clean(row.engine)), row.role, f"{row.total_blocks:,}", told]
        if prompt_tokens is not None:
            share = f" ({row.tokens / max(1, prompt_tokens):.0%})" if row.tokens is not None else ""
            cells.append("-" if row.tokens is None else f"{row.tokens:,}{share}")
        table.add_row(*cells)
    return table


def shorten(text: str, width: int) -> str:
    """Leave out the middle: names differ in their ends as often as in their beginnings."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def _waits(rows: Iterable[WaitRow]) -> Table:
    table = _table()
    table.add_column(f"last {WINDOW_S:.0f} s, each rank's", no_wrap=True)
    for name, width in (("count", 7), ("p50 ms", 9), ("p90 ms", 9), ("max ms", 9)):
        table.add_column(name, justify="right", no_wrap=True, width=width)
    for row in rows:
        figures = (f"{each:,.1f}" if row.count else "-" for each in (row.p50_ms, row.p90_ms, row.max_ms))
        table.add_row(row.what, f"{row.count:,}", *figures)
    return table


_Column = tuple[str, int, Literal["left", "right"]]
_WIDE: tuple[_Column, ...] = (
    ("role", 7, "left"),
    ("state", 14, "left"),
    ("requests", 8, "right"),
    ("queued tokens", 13, "right"),
    ("KV used, free/total", 26, "left"),
    ("cached", 6, "right"),
    ("heartbeat", 9, "right"),
    ("transfers/s", 11, "right"),
    ("MiB/s", 8, "right"),
    ("failed", 6, "right"),
)
_NARROW: tuple[_Column, ...] = (
    ("", 1, "left"),
    ("state", 5, "left"),
    ("reqs", 5, "right"),
    ("queued", 6, "right"),
    ("KV free/total", 15, "left"),
    ("beat", 5, "right"),
    ("tr/s", 5, "right"),
    ("MiB/s", 6, "right"),
    ("fail", 4, "right"),
)


def _engines(rows: Iterable[EngineRow], width: int) -> Table:
    """The engine's name and model share what the other columns leave."""
    rows, wide = list(rows), width >= WIDE_CHARS
    columns = _WIDE if wide else _NARROW
    rest = width - sum(each for _, each, _ in columns) - len(columns)
    longest = max((len(_clean(row.engine)) for row in rows), default=0)
    engine_width = max(6, min(rest, longest, 64))
    model_width = min(rest - engine_width - 1, max((len(_clean(row.model)) for row in rows), default=0))
    table = _table()
    table.add_column("engine", no_wrap=True, width=engine_width)
    for name, column_width, justify in columns:
        table.add_column(name, no_wrap=True, width=column_width, justify=justify)
    with_model = wide and model_width >= len("model")
    if with_model:
        table.add_column("model", no_wrap=True, width=model_width)
    for row in rows:
        cells = _cells(row, wide)
        model = [Text(shorten(_clean(row.model), model_width))] if with_model else []
        table.add_row(Text(shorten(_clean(row.engine), engine_width)), *cells, *model)
    return table


def _cells(row: EngineRow, wide: bool) -> list[Text]:
    late = row.heartbeat_age_s > LATE_HEARTBEAT_S
    return [
        Text(row.role if wide else row.role[:1].upper()),
        Text(row.state if wide else row.state.partition(":")[0][:5], style=_STATE_STYLES.get(row.state, "red")),
        Text(_count(row.requests, 8 if wide else 5)),
        Text(_count(row.queued_tokens, 13 if wide else 6)),
        _kv(row.free_blocks, row.total_blocks, wide),
        *([Text("-" if row.hit_rate is None else f"{row.hit_rate:.0%}")] if wide else []),
        Text(f"{_figure(row.heartbeat_age_s, 10)} s", style="yellow" if late else ""),
        Text(_figure(row.transfers_per_s)),
        Text(_figure(row.mib_per_s)),
        Text(_count(row.failures, 4), style="red" if row.failures else ""),
    ]


def _kv(free: int, total: int, wide: bool) -> Text:
    """A bar of the blocks in use, then the numbers."""
    if not total:
        return Text("-")
    used, cells = max(0.0, 1 - free / total), 8 if wide else 5
    full = min(cells, round(cells * used) or int(used > 0))
    style = "red" if used > 0.95 else "yellow" if used > 0.8 else "green"
    digits = 8 if wide else 4
    return Text.assemble(
        ("█" * full, style), ("░" * (cells - full), "dim"), f" {_count(free, digits)}/{_count(total, digits)}"
    )


def _count(number: int, digits: int) -> str:
    """At most ``digits`` characters, as long as they reach: 1234, 12k, 3M."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if len(text := f"{number}{unit}") <= digits:
            return text
        number = round(number / 1000)
    return "many"[:digits]


def _figure(value: float, whole_from: float = 1000) -> str:
    return f"{value:.1f}" if value < whole_from else _count(round(value), 5)


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _roles(rows: list[EngineRow]) -> str:
    roles = [row.role for row in rows]
    return ", ".join(f"{roles.count(role)} {role}" for role in ("prefill", "decode", "both") if role in roles) or "none"


def _clean(text: str) -> str:
    return printable(text, spaces=True)


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold dim", collapse_padding=True)
