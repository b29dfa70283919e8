"""Which of NIXL's backends can be loaded here, and what the others lack. Imports no NIXL: the caller asks it.

A plugin file that is there may need libraries that are not: NIXL says only ``NIXL_ERR_NOT_FOUND``.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvbus.errors import ConfigError

_LDD_TIMEOUT_S = 10.0
_MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_VERSION = re.compile(r"version `(\S+)' not found")


def check_backends(
    wanted: Sequence[str], installed: Iterable[str], loads: Callable[[str], bool], folders: Sequence[Path]
) -> None:
    """Raise :class:`ConfigError` naming the first of ``wanted`` that cannot be loaded, and why, and which can.

    Args:
        installed: backends for which NIXL found a plugin file.
        loads: whether NIXL can load one of these.
        folders: where the plugin files may be.
    """
    there = list(installed)
    for name in wanted:
        if name in there and loads(name):
            continue
        allowed = f"what NIXL can load here: {', '.join(each for each in there if loads(each)) or 'nothing'}"
        raise ConfigError("backends", list(wanted), f"{allowed}; {_why_not(name, folders)}")


def _why_not(name: str, folders: Sequence[Path]) -> str:
    plugin = next((path for folder in folders if (path := folder / f"libplugin_{name}.so").is_file()), None)
    if plugin is None:
        return f"there is no plugin {name}"
    lacks = missing_libraries(plugin)
    return f"{name} lacks {', '.join(lacks)}" if lacks else f"{name} is there, but NIXL does not load it"


def missing_libraries(library: Path) -> list[str]:
    """The shared libraries that ``library`` needs and that are not there, or are too old."""
    try:
        done = subprocess.run(
            ["ldd", str(library)], capture_output=True, text=True, timeout=_LDD_TIMEOUT_S, check=False
        )
        found = [*_MISSING.findall(done.stdout), *_VERSION.findall(done.stderr + done.stdout)]
    except (OSError, subprocess.TimeoutExpired):
        found = []
    if found:
        return list(dict.fromkeys(found))
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_LAZY)
    except OSError as error:
        return [str(error)]
    return []
