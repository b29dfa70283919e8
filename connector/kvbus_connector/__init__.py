"""The vLLM connector of kvbus: ``--kv-transfer-config '{"kv_connector": "KVBusConnector", ...}'``.

Only :mod:`.connector`, :mod:`.nixl_plane`, :mod:`.vllm_nixl`, :mod:`.prometheus` and :mod:`.plugin` import vLLM. The
rest can be read and tested without it.
"""
