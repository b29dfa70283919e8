"""``python -m kvbus.child COMMAND...``: becomes the command, and ends when the process that started it is gone.

A parent that is killed cannot end its children; Linux can tell them. It watches the *thread* that started the child, so
start children from one that lives as long as they shall.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
