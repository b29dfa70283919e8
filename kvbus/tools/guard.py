"""What every command does about errors and signals."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console

from kvbus.errors import KVBusError

err = Console(stderr=True)


def say(text: str) -> None:
    err.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """One clear message instead of a traceback; Ctrl-C and SIGTERM end cleanly."""

    def on_term(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_term)  # also where the shell that started us ignores it
    try:
        yield
    except KVBusError as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(130) from None
