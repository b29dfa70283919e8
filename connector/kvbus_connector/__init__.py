"""The vLLM connector of kvbus: ``--kv-transfer-config '{"kv_connector": "KVBusConnector", ...}'``.

Only :mod:`.connector` and :mod:`.nixl_plane` import vLLM and NIXL; the rest can be read and tested without them.
"""
