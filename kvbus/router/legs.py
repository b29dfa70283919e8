"""The two requests that one client's request becomes. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

MAX_TRANSFERS = 256

Body = dict[str, Any]

# What only shapes the answer. The prefill engine's is thrown away, so it must not refuse for it, nor compute it.
# Whatever may be in the prompt stays: some chat templates render tools, tool_choice and response_format.
_OF_THE_ANSWER = frozenset(
    {
        "bad_words",
        "best_of",
        "echo",
        "frequency_penalty",
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
        "stop_token_ids",
        "stream_options",
        "suffix",
        "top_logprobs",
    }
)


def new_transfer_id() -> str:
    return secrets.token_hex(16)


def transfers_of(body: Mapping[str, Any], transfer_id: str) -> list[str]:
    """What the engines call the transfers of one request: one for each sample of each prompt."""
    samples, prompt = body.get("n"), body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = len(prompt) if isinstance(prompt, list) and several else 1
    names = [
        f"{transfer_id}#{sample}.{number}" if sample or number else transfer_id
        for sample in range(samples if isinstance(samples, int) and 0 < samples <= MAX_TRANSFERS else 1)
        for number in range(min(prompts, MAX_TRANSFERS))
    ]
    return names[:MAX_TRANSFERS]


def must_be_alone(body: Mapping[str, Any]) -> bool:
    """Whether only an engine that computes the prompt itself can answer: with log probabilities of the prompt's own
    tokens, or by a beam search, whose many inner requests are no transfers."""
    logprobs = body.get("logprobs")
    echoes_logprobs = bool(body.get("echo")) and logprobs is not None and logprobs is not False
    return body.get("prompt_logprobs") is not None or echoes_logprobs or body.get("use_beam_search") is True


def prefill_leg(body: Mapping[str, Any], transfer_id: str, traceparent: str) -> Body:
    """What the prefill engine gets: the same prompt, one token, no stream."""
    leg = {key: value for key, value in body.items() if key not in _OF_THE_ANSWER}
    leg["stream"] = False
    leg["max_tokens"] = 1
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "traceparent": traceparent,
    }
    return leg


def decode_leg(
    body: Mapping[str, Any],
    transfer_id: str,
    traceparent: str,
    prefill_engine: str,
    attempt: int = 1,
    takeover_s: float = 0.0,
) -> Body:
    """What the decode engine gets: the client's request, and where its KV comes from.

    Args:
        takeover_s: how long it shall wait for the router's word when the prefill engine is lost, seconds.
    """
    return {
        **body,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "prefill_engine_id": prefill_engine,
            "attempt": attempt,
            "takeover_s": takeover_s,
            "traceparent": traceparent,
        },
    }
