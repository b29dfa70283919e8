"""Which vLLM this connector is tested with, and what of it is checked at start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbus.errors import ConfigError, KVBusError

TESTED_VLLM = "0.32"
"""Major and minor version; ``pyproject.toml`` asks for the same."""


class VllmMismatchError(KVBusError):
    """The installed vLLM is not one that this connector works with."""

    def __init__(self, installed: str, missing: str = "") -> None:
        self.installed, self.missing = installed, missing
        lacks = f" and lacks {missing}" if missing else ""
        super().__init__(f"kvbus: the installed vLLM is {installed}{lacks}; this kvbus works with vLLM {TESTED_VLLM}.*")


def check_version(installed: str) -> None:
    """Raise :class:`VllmMismatchError` unless ``installed`` is a :data:`TESTED_VLLM` release."""
    if installed.split(".")[:2] != TESTED_VLLM.split("."):
        raise VllmMismatchError(installed)


def check_internals(installed: str, owners: Mapping[str, tuple[Any, tuple[str, ...]]]) -> None:
    """Raise :class:`VllmMismatchError` naming the first of vLLM's internals that is not there.

    Args:
        owners: for each owner's name the owner and the names of its attributes that are used.
    """
    for owner_name, (owner, names) in owners.items():
        for name in names:
            if not hasattr(owner, name):
                raise VllmMismatchError(installed, f"{owner_name}.{name}")


def check_vllm_config(vllm_config: Any) -> None:
    """Refuse what this connector cannot do yet, naming the setting, its value and what is allowed."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(name, getattr(parallel, name), "1")
    transfer = vllm_config.kv_transfer_config
    from_device = vllm_config.device_config.device_type
    if transfer.kv_buffer_device != from_device:
        raise ConfigError("kv_buffer_device", transfer.kv_buffer_device, f"{from_device}, where the KV cache is")
    if transfer.enable_permute_local_kv:
        raise ConfigError("enable_permute_local_kv", True, "false")
