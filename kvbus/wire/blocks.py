"""Block lists of a request, one per KV group, and their form on the wire: runs ``(first, count)`` in list order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Run = tuple[int, int]
BlockRuns = tuple[tuple[Run, ...], ...]


def to_runs(groups: Iterable[Sequence[int]]) -> BlockRuns:
    """Compress block ids into runs, keeping their order: ``[[4, 5, 6, 2]] -> (((4, 3), (2, 1)),)``."""
    return tuple(_runs_of(group) for group in groups)


def _runs_of(block_ids: Sequence[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((int(block_id), 1))
    return tuple(runs)


def from_runs(groups: BlockRuns) -> list[list[int]]:
    """The inverse of :func:`to_runs`."""
    return [[block for first, count in runs for block in range(first, first + count)] for runs in groups]


def count(groups: BlockRuns) -> int:
    """Number of blocks over all groups."""
    return sum(length for runs in groups for _, length in runs)


def highest(groups: BlockRuns) -> int:
    """The highest block id, -1 if there is none."""
    return max((first + length - 1 for runs in groups for first, length in runs), default=-1)
