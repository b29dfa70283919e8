"""Options that several commands have, and what their values mean.

A number is finite and between bounds, else it is refused with the value and what is allowed.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbus.cli.guard import say

NatsUrl = Annotated[str, typer.Option(help="The NATS server, such as nats://host:4222.", envvar="KVBUS_NATS_URL")]
Namespace = Annotated[str, typer.Option(help="Engines of other namespaces are not seen.")]
Port = Annotated[int, typer.Option(help="The router's port.", min=1, max=65535)]
ModelDir = Annotated[Path | None, typer.Option("--model", help="A model's folder. Default: SmolLM2-135M-Instruct.")]

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


def model_folder(folder: Path | None) -> Path:
    """The folder that a user named, if it has a model; else that of the demo model, which is made if need be."""
    from kvbus.local import check_model_dir, smollm2

    return check_model_dir(folder) if folder is not None else smollm2(say)


def run_folder() -> Path:
    """A new folder for the logs and traces of a run."""
    from kvbus.local import cache_dir

    folder = cache_dir() / "runs" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
