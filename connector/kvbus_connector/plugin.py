"""The entry point of vLLM's plugin group ``vllm.general_plugins``: makes the connector's name known in each process."""

from __future__ import annotations

CONNECTOR_NAME = "KVBusConnector"


def register() -> None:
    """Register the connector; vLLM calls this several times per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kvbus_connector.connector", CONNECTOR_NAME)
