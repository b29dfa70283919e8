"""Why an engine cannot start, as the last line that its user sees.

vLLM is several processes: what a worker finds wrong is followed by some 200 lines of tracebacks of the others. So the
process that finds it leaves one line in a file, whose name all inherit, and the one that began prints it when it ends.

The one rule: whoever made up the file's name prints the line: the API server, or ``kvbus engine`` around it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from kvbus.errors import KVBusError
from kvbus.last_words import ASKED, VARIABLE, new_file, read_once

logger = logging.getLogger(__name__)

MAX_CHARS = 2000
CHILDREN_S, TRACKER_S = 10.0, 5.0


@functools.cache
def arrange() -> None:
    """Let an engine's first process print the reason when it ends, unless ``kvbus engine`` does; before vLLM starts
    others. One that was started by an unrelated program in which vLLM was loaded, too, is an engine's first."""
    if multiprocessing.parent_process() is not None:
        return
    if asked := os.environ.pop(ASKED, ""):
        os.environ[VARIABLE] = asked
        return
    path, pid = new_file(), os.getpid()
    os.environ[VARIABLE] = path

    def tell() -> None:
        if os.getpid() == pid and (reason := read_once(path)):  # a forked child inherits this hook, too
            _end_children()
            _let_tracker_speak()
            print(reason, file=sys.stderr, flush=True)  # noqa: T201

    atexit.register(tell)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Log what ends the start, and leave it for :func:`arrange`; the first one counts."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, KVBusError) else f"kvbus: this engine cannot start: {type(error).__name__}: "
        reason = f"{kind}{' '.join(str(error).split())}"[:MAX_CHARS]
        logger.error("%s", reason)
        path = os.environ.get(VARIABLE, "")
        with contextlib.suppress(OSError), open(path, "x", opener=_private) as file:
            file.write(reason)
        raise


def _end_children() -> None:
    """End what this process has started, which would speak after us and hold the resource tracker's pipe; then
    multiprocessing does what it would do after us: it frees what the tracker must not free first."""
    children, deadline = multiprocessing.active_children(), time.monotonic() + CHILDREN_S
    for child in children:
        child.terminate()
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]


def _let_tracker_speak() -> None:
    """Let multiprocessing's resource tracker say what was leaked before us; it ends when its pipe is closed."""
    tracker: Any = getattr(resource_tracker, "_resource_tracker", None)
    fd, pid = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
    if fd is None or pid is None:
        return
    tracker._fd = tracker._pid = None
    deadline = time.monotonic() + TRACKER_S  # others may hold the pipe, too
    with contextlib.suppress(OSError):
        os.close(fd)
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.01)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
