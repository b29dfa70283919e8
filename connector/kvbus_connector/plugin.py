"""The entry point of vLLM's plugin group ``vllm.general_plugins``: makes the connector's name known in each process."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading

from . import reason
from .identity import engine_secret

CONNECTOR_NAME = "KVBusConnector"


def register() -> None:
    """Register the connector; vLLM calls this several times per process.

    With ``KVBUS_DUMP_ON_SIGUSR1=1`` it also lets SIGUSR1 write the stacks of all threads to stderr.
    """
    if os.environ.get("KVBUS_DUMP_ON_SIGUSR1") == "1" and threading.current_thread() is threading.main_thread():
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    reason.arrange()
    engine_secret()  # before vLLM starts the other processes of this engine
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kvbus_connector.connector", CONNECTOR_NAME)
