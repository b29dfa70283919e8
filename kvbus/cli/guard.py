"""How every command handles errors and signals, and where it writes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator

import typer
from rich.console import Console

from kvbus.errors import KVBusError
from kvbus.signals import SIGNALS

_OUTPUT_ENDED = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)

err = Console(stderr=True)


def say(text: str) -> None:
    err.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Print one clear message instead of a traceback. Ctrl-C exits with 130, SIGTERM with 143."""
    SIGNALS.install()
    try:
        yield
    except KVBusError as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ENDED:
            raise
        raise typer.Exit(_output_ended(error)) from None
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(SIGNALS.status) from None


def _output_ended(error: OSError) -> int:
    """The exit status when standard output takes no more. A closed pipe is no error: its reader has what it wants."""
    # What is still buffered would fail once more, with a traceback, when the interpreter flushes it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    err.print(f"kvbus: standard output: {os.strerror(error.errno or 0)}", style="red", markup=False, highlight=False)
    return 1


@contextlib.contextmanager
def until_signalled() -> Iterator[None]:
    """Run the body until Ctrl-C or SIGTERM; either ends it in good order, with status 0."""
    try:
        yield
    except KeyboardInterrupt:
        say("stopping")
