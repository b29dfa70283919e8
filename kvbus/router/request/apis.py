"""The generation APIs that can be disaggregated, and how their bodies and streams differ. Pure.

vLLM's request takes ``kv_transfer_params`` in each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbus.router.http import Raw

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API.

    Args:
        prompt: the field that holds the prompt.
        limits: the fields that bound how many tokens are sampled; the first one is required.
        parameters: the field that holds the sampling parameters, empty if they are in the body itself.
        named_events: its streams have ``event:`` lines.
        ranked: vLLM sends its requests to the data parallel rank that a header names.
        never: what the prefill leg must not ask for, since the decode engine does it.
    """

    prompt: str
    limits: tuple[str, ...] = ("max_tokens",)
    parameters: str = ""
    named_events: bool = False
    ranked: bool = True
    never: tuple[str, ...] = ()

    def parameters_of(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The sampling parameters; empty if they are no object."""
        found = body.get(self.parameters) if self.parameters else body
        return found if isinstance(found, dict) else {}

    def as_prompt(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body with its prompt under ``messages`` or ``prompt``, as in the other APIs."""
        if self.prompt not in ("input", "token_ids"):
            return body
        prompt = body.get(self.prompt)
        if isinstance(prompt, Raw):
            return {**body, "messages" if prompt.begins == b"[{" else "prompt": prompt}
        turns = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        return {**body, "messages" if turns else "prompt": prompt}


COMPLETIONS = Dialect("prompt")
CHAT = Dialect("messages", ("max_tokens", "max_completion_tokens"))
RESPONSES = Dialect("input", ("max_output_tokens",), named_events=True, ranked=False, never=("store", "background"))
MESSAGES = Dialect("messages", named_events=True)
GENERATE = Dialect("token_ids", parameters="sampling_params")

_MAX_ASKED_BYTES = 1 << 17  # some 32,000 tokens, which take an engine 40 ms
_NO_TEXT = (b'_url"', b'"input_audio"', b'"image', b'"video', b'"audio')
_ASKED = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


def tokenize_question(body: Mapping[str, Any], dialect: Dialect) -> Body | None:
    """The body with which vLLM's ``/tokenize`` finds the token ids of this request's prompt; None if it cannot, or
    would have to fetch pictures or sounds for it."""
    name = {COMPLETIONS: "prompt", CHAT: "messages"}.get(dialect, "")
    if not name:
        return None
    prompt = body.get(name)
    text = bytes(prompt.raw[:_MAX_ASKED_BYTES]) if isinstance(prompt, Raw) else json.dumps(prompt).encode()
    if len(text) >= _MAX_ASKED_BYTES or any(word in text for word in _NO_TEXT):
        return None
    if dialect is COMPLETIONS and text[:1] != b'"':
        return None
    return {each: body[each] for each in ("model", name, *_ASKED) if each in body} if name in body else None


def must_be_alone(body: Mapping[str, Any], dialect: Dialect) -> bool:
    """Whether only an engine that computes the prompt itself can answer this request.

    So it is with log probabilities of the prompt's own tokens, with a beam search, whose many inner requests are no
    transfers, and with what vLLM keeps in one engine: earlier responses, background responses, and turns with tools
    that it runs itself.
    """
    parameters, logprobs = dialect.parameters_of(body), body.get("logprobs")
    return (
        any(parameters.get(name) is not None for name in ("prompt_logprobs", "prompt_logprob_token_ids"))
        or (bool(body.get("echo")) and logprobs is not None and logprobs is not False)
        or body.get("use_beam_search") is True
        or (dialect is RESPONSES and _is_kept_by_one(body))
    )


def _is_kept_by_one(body: Mapping[str, Any]) -> bool:
    tools = body.get("tools")
    run_by_vllm = any(
        tool.get("type") != "function" for tool in (tools if isinstance(tools, list) else ()) if type(tool) is dict
    )
    return bool(body.get("background") or body.get("previous_response_id")) or run_by_vllm
