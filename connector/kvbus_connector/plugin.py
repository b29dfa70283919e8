"""The entry point of vLLM's plugin group ``vllm.general_plugins``: makes the connector's name known in each process."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import signal
import threading

from . import reason
from .identity import engine_secret

CONNECTOR_NAME = "KVBusConnector"
STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
WANTED_LAYOUT = "KVBUS_SSM_CONV_STATE_LAYOUT"


def register() -> None:
    """Register the connector; vLLM calls this several times per process.

    With ``KVBUS_DUMP_ON_SIGUSR1=1`` it also lets SIGUSR1 write the stacks of all threads to stderr.
    """
    if os.environ.get("KVBUS_DUMP_ON_SIGUSR1") == "1" and threading.current_thread() is threading.main_thread():
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    reason.arrange()
    engine_secret()  # before vLLM starts the other processes of this engine
    note_state_layout()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kvbus_connector.connector", CONNECTOR_NAME)


@functools.cache
def note_state_layout() -> None:
    """Remember what the user named, before vLLM sets what suits this CPU; the engine's other processes inherit both."""
    if multiprocessing.parent_process() is None:
        os.environ[WANTED_LAYOUT] = os.environ.get(STATE_LAYOUT, "DS")


def choose_state_layout() -> None:
    """Let the convolution states of Mamba layers lie in the one layout that NIXL can cut by rank, unless the user has
    named another; vLLM does so for its own connectors only, and otherwise chooses what suits the CPU."""
    os.environ[STATE_LAYOUT] = os.environ.get(WANTED_LAYOUT, os.environ.get(STATE_LAYOUT, "DS"))
