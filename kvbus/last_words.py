"""The file in which an engine's processes leave why it cannot start: see ``kvbus_connector.reason``."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from pathlib import Path

VARIABLE = "KVBUS_REASON_FILE"  # for the processes of one engine
ASKED = "KVBUS_REASON_FILE_OF_PARENT"  # for its first one, from a parent that prints what is in it


def new_file() -> str:
    """A name that nobody can guess; the file is made by whoever has a reason."""
    return str(Path(tempfile.gettempdir()) / f"kvbus-reason-{secrets.token_hex(16)}")


def read_once(path: str) -> str:
    """The reason, empty if there is none; the file is gone afterwards."""
    file, reason = Path(path), ""
    with contextlib.suppress(OSError):
        reason = file.read_text(errors="replace")
        file.unlink()
    return reason
