"""Options with a number: finite and between bounds, else refused with the value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import typer

DAY_S = 86400.0


def number(*names: str, help: str, min: float, max: float = math.inf) -> Any:
    """An option with a number from ``min`` to ``max``."""
    allowed = f"{min:g} to {max:g}" if max < math.inf else f"at least {min:g}"

    def check(value: float) -> float:
        if not (math.isfinite(value) and min <= value <= max):  # nan is neither below nor above anything
            raise typer.BadParameter(f"{value:g}; allowed: {allowed}")
        return value

    return typer.Option(*names, help=f"{help} ({allowed})", callback=check)


def seconds(*names: str, help: str, min: float = 0.1) -> Any:
    """An option in seconds, a day at most."""
    return number(*names, help=help, min=min, max=DAY_S)
