"""Child processes: each in a process group of its own, with a log file, ended on any exit.

In a group, not in a session: a session of its own gets a scheduling group of its own from the kernel, which alone made
vLLM engines ten times slower.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbus.errors import LocalClusterError
from kvbus.signals import SIGNALS

TERM_TIMEOUT_S = 10.0
TAIL_LINES = 30
POLL_S = 0.02


class Child:
    """One child process.

    Args:
        name: for messages and for its log file ``<logs>/<name>.log``.
        env: added to this process's environment.
    """

    def __init__(self, name: str, command: Sequence[str], logs: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, logs / f"{name}.log"
        self._asked = False
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvbus.child", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int:
        """Its exit status, waited for."""
        return self._process.wait()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        """Raise LocalClusterError with the end of its log if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise LocalClusterError(
                f"kvbus: {self.name} ended with status {code}; the end of {self.log}:\n{self.tail()}"
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def ask_to_end(self) -> None:
        """Send one SIGTERM, to the child alone: it tells its own children. A second one would cut its end short."""
        if self.alive and not self._asked:
            self._asked = True
            self._process.terminate()

    def kill(self) -> None:
        """End what is left of the group."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def stop(self, timeout_s: float = TERM_TIMEOUT_S) -> None:
        """Ask the child to end, wait, then kill what is left of the group. Idempotent."""
        stop_all([self], timeout_s)


def stop_all(children: Sequence[Child], timeout_s: float = TERM_TIMEOUT_S) -> None:
    """End all of them side by side. Kill those that take too long, and all of them at a second signal to us."""
    for child in children:
        child.ask_to_end()
    deadline = time.monotonic() + timeout_s
    while any(child.alive for child in children) and time.monotonic() < deadline and not SIGNALS.hurry:
        time.sleep(POLL_S)
    for child in children:
        child.kill()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def check_port_free(host: str, port: int) -> None:
    """Raise LocalClusterError if somebody listens there already."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise LocalClusterError(
                f"kvbus: port {port} on {host} cannot be used ({error.strerror}); choose another with --port"
            ) from None
