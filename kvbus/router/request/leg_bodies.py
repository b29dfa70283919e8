"""The bodies of the two legs that one client's request becomes. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from kvbus.router.http import Raw
from kvbus.router.request.apis import Body, Dialect

MAX_TRANSFERS = 256

# What only shapes the answer. The prefill engine's answer is thrown away, so it must not refuse or compute these.
# What the prompt may contain stays: some chat templates render tools, tool_choice and response_format.
_ANSWER_FIELDS = frozenset(
    {
        "bad_words",
        "best_of",
        "echo",
        "frequency_penalty",
        "include",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "min_tokens",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "return_tokens_as_token_ids",
        "seed",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "stream_options",
        "suffix",
        "top_logprobs",
    }
)


def new_transfer_id() -> str:
    return secrets.token_hex(16)


def transfers_of(body: Mapping[str, Any], transfer_id: str, dialect: Dialect) -> list[str]:
    """The engines' ids of the transfers of one request: one for each sample of each prompt."""
    samples, prompt = dialect.parameters_of(body).get("n"), body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = len(prompt) if isinstance(prompt, list) and several else 1
    if isinstance(prompt, Raw):
        prompts = max(1, prompt.children)
    names = [
        f"{transfer_id}#{sample}.{number}" if sample or number else transfer_id
        for sample in range(samples if isinstance(samples, int) and 0 < samples <= MAX_TRANSFERS else 1)
        for number in range(min(prompts, MAX_TRANSFERS))
    ]
    return names[:MAX_TRANSFERS]


def prefill_leg(
    body: Mapping[str, Any], transfer_id: str, traceparent: str, dialect: Dialect, history_engine: str = ""
) -> Body:
    """What the prefill engine gets: the same prompt, one token, no stream.

    Args:
        history_engine: a decode engine that may have the KV of the prompt's beginning.
    """
    leg = _prompt_fields(body)
    parameters = leg
    if dialect.parameters and isinstance(body.get(dialect.parameters), dict):
        parameters = leg[dialect.parameters] = _prompt_fields(body[dialect.parameters])
    first, *others = dialect.limits
    parameters.update({first: 1}, **{limit: 1 for limit in others if limit in parameters})
    leg.update(dict.fromkeys(("stream", *dialect.never), False))
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "traceparent": traceparent,
    }
    if history_engine:
        leg["kv_transfer_params"]["history_engine_id"] = history_engine
    return leg


def _prompt_fields(fields: Mapping[str, Any]) -> Body:
    return {key: value for key, value in fields.items() if key not in _ANSWER_FIELDS}


def decode_leg(
    body: Mapping[str, Any],
    transfer_id: str,
    traceparent: str,
    prefill_engine: str,
    attempt: int,
    takeover_s: float,
    history: bool = False,
) -> Body:
    """What the decode engine gets: the client's request, and where its KV comes from.

    Args:
        takeover_s: how long it shall wait for a rebind when the prefill engine is lost, seconds.
        history: the prefill engine may want what this one has of the prompt.
    """
    return {
        **body,
        "kv_transfer_params": {
            **body.get("kv_transfer_params", {}),
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "prefill_engine_id": prefill_engine,
            "attempt": attempt,
            "takeover_s": takeover_s,
            "traceparent": traceparent,
            **({"history": True} if history else {}),
        },
    }
