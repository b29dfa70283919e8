"""Who this engine is on the bus, and which request of another engine a request belongs to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbus.config import Config
from kvbus.errors import ConfigError
from kvbus.wire import HISTORY_SUFFIX, Heartbeat, Pairs, Role, State

_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}
# vLLM's request ids: an index for each of ``n`` samples in front, an index for each prompt of a completions request
# behind the API's id, and last eight random hex digits that differ between engines.
_SAMPLE = re.compile(r"(\d+)_(.+)", re.DOTALL)
_RANDOM = re.compile(r"(.+)-[0-9a-f]{8}", re.DOTALL)
_PROMPT = re.compile(r"(cmpl-.+)-(\d+)", re.DOTALL)
# vLLM's instance ids: a time in ns, under Ray with the data parallel rank behind it.
_INSTANCE = re.compile(r"(\d{1,18}|[1-8]\d{18})(?:_dp\d+)?", re.ASCII)


SECRET = "KVBUS_ENGINE_SECRET"
MIN_SECRET_CHARS = 32
MAX_NAME_CHARS = 256
MAX_REQUEST_ID_CHARS = 400


@dataclass(frozen=True, slots=True)
class TransferName:
    """What both engines call one request.

    ``base`` is common to all requests that one API call became; ``transfer_id`` tells them apart.
    """

    base: str
    transfer_id: str


def fits(request_id: str) -> bool:
    """Whether messages can carry a request's id, which clients may choose (``X-Request-Id``)."""
    return len(request_id) <= MAX_REQUEST_ID_CHARS


def name_transfer(request_id: str, params: Mapping[str, Any]) -> TransferName:
    """Name a request by its ``kv_transfer_params["transfer_id"]``; without one, by its id less what is per engine.

    Names that are too long for a message become a digest, the same on both engines.
    """
    sample, prompt, base = "0", "0", request_id
    if match := _RANDOM.fullmatch(base):
        base = match[1]
    if match := _SAMPLE.fullmatch(base):
        sample, base = match[1], match[2]
    if match := _PROMPT.fullmatch(base):
        base, prompt = match[1], match[2]
    given = params.get("transfer_id")
    if isinstance(given, str) and given:
        base = given
    if len(base) > MAX_NAME_CHARS:
        base = hashlib.blake2b(base.encode(errors="replace"), digest_size=16).hexdigest()
    return TransferName(base, base if sample == prompt == "0" else f"{base}#{sample}.{prompt}")


def history_name(request: Any) -> str:
    """The id of the transfer of a request's history."""
    return name_transfer(request.request_id, request.kv_transfer_params).transfer_id + HISTORY_SUFFIX


def digest_of(request: Any, count: int) -> str:
    """A digest of the first ``count`` of a request's token ids and of its LoRA adapter's name, which both engines must
    agree on; of the name alone for a prompt of embeddings, and empty if there is none either.

    It catches a router that mixes requests up, and parameters that were invented or replayed: KV that one adapter
    computed is never another's.
    """
    token_ids, lora = request.prompt_token_ids, getattr(request, "lora_request", None)
    if token_ids is None and lora is None:
        return ""
    digest = hashlib.blake2b(array("I", (token_ids or ())[:count]).tobytes(), digest_size=8)
    if lora is not None:
        digest.update(b"\0" + str(lora.lora_name).encode(errors="replace"))
    return digest.hexdigest()


def is_of_tokens(request: Any) -> bool:
    """Whether its KV depends on nothing but what the digest has: its tokens and its LoRA adapter."""
    tokens, items = request.prompt_token_ids, getattr(request, "mm_features", None)
    return tokens is not None and not items and getattr(request, "prompt_embeds", None) is None


def traceparent_of(request: Any) -> str:
    """The W3C trace context of a request, empty if it has none."""
    headers = getattr(request, "trace_headers", None) or {}
    found = headers.get("traceparent") or (request.kv_transfer_params or {}).get("traceparent")
    return found if isinstance(found, str) and len(found) <= 128 else ""


def engine_secret() -> bytes:
    """What the processes of one engine share, and nobody else: see :mod:`kvbus.bus.keys`.

    The first of them, the API server, makes it up when vLLM loads its plugins; the others inherit its environment.
    Where they do not (an engine over several hosts), it is set by hand, the same for all of them.

    Raises:
        ConfigError: it is so short that it can be guessed.
    """
    secret = os.environ.setdefault(SECRET, secrets.token_hex(32))
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(SECRET, f"{len(secret)} characters", f"at least {MIN_SECRET_CHARS} that nobody can guess")
    return secret.encode()


def role_of(kv_role: str) -> Role:
    return _ROLES[kv_role]


def compat_of(vllm_config: Any, vllm_version: str, config: Config) -> Pairs:
    """What must be equal in engines that exchange KV; shown by name where it is not."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    served = model.served_model_name
    shape = model.hf_config.to_dict()
    for key in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        shape.pop(key, None)
    architecture = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return (
        ("model", str(served[0] if isinstance(served, list) else served)[:256]),
        ("architecture", f"{'/'.join(shape.get('architectures') or ['?'])}:{architecture}"),
        ("dtype", str(model.dtype)),
        ("kv_cache_dtype", str(cache.cache_dtype)),
        ("block_size", str(cache.block_size)),
        ("vllm", vllm_version),
        ("write_lease_s", str(config.write_lease_s)),
        ("max_write_s", str(config.max_write_s)),
        ("bus", "sealed"),  # an older kvbus has no keys, and believes nobody who has
    )


def incarnation_of(instance_id: str) -> int:
    """A number from vLLM's ``instance_id``, the ns at which the configuration was made: all processes of one engine
    share it, and a restarted one has a larger one. One that is no time gives a number too, but no later one."""
    if match := _INSTANCE.fullmatch(instance_id):
        return int(match[1])
    return int.from_bytes(hashlib.blake2b(instance_id.encode(errors="replace"), digest_size=8).digest()) >> 1


def data_parallel_of(parallel: Any) -> tuple[bool, int]:
    """Whether other data parallel ranks share this engine's HTTP port, and its number among them, which is what vLLM's
    header ``X-data-parallel-rank`` takes.

    In an engine of a dense model vLLM sets ``data_parallel_size`` to 1, since its ranks have nothing to do with each
    other; ``elastic_ep_max_dp_size`` still says how many there are.
    """
    ranks = max(parallel.data_parallel_size, parallel.elastic_ep_max_dp_size or 1)
    if ranks == 1 or parallel.data_parallel_external_lb:
        return False, 0
    return True, parallel.data_parallel_rank_local if parallel.data_parallel_hybrid_lb else parallel.data_parallel_index


def heartbeat_of(vllm_config: Any, vllm_version: str, config: Config) -> Heartbeat:
    """The first heartbeat of this engine; the later ones differ in what changes."""
    transfer = vllm_config.kv_transfer_config
    compat = compat_of(vllm_config, vllm_version, config)
    data_parallel, rank = data_parallel_of(vllm_config.parallel_config)
    return Heartbeat(
        engine=transfer.engine_id,
        incarnation=incarnation_of(vllm_config.instance_id),
        number=0,
        role=role_of(transfer.kv_role),
        state=State.STARTING,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        model=dict(compat)["model"],
        compat=compat,
        data_parallel=data_parallel,
        data_parallel_rank=rank,
    )
