"""The official OpenAI client against the router: every feature's answer equals a plain engine's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI
from support.engines import assert_came_from_outside, metrics, prompt_tokens

from kvbus.local import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL = "tiny-qwen3"
LINE = "def main():\n    for name in sorted(os.listdir(path)):\n        print(name)\n"
HEAD = LINE * 12
COMPLETION: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {**COMPLETION, "messages": [{"role": "user", "content": HEAD}]}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}

# vLLM 0.32 on CPU dies of a seed with a prompt that is computed in pieces: those with a seed are short.
# name, request; each prompt has a number of its own, so that no prefix cache makes it another test.
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "default max_tokens": {"max_tokens": None},
    "max_tokens 1": {"max_tokens": 1},
    "echo": {"echo": True},
    "echo of the prompt only": {"echo": True, "max_tokens": 0},
    "logprobs": {"logprobs": 3},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "prompt logprobs": {"extra_body": {"prompt_logprobs": 1}},
    "n with a seed": {"prompt": "# six\n" + LINE, "n": 2, "seed": 7, "temperature": 1.0},
    "several prompts": {"prompt": ["# one\n" + HEAD, "# two\n" + LINE, "# three\n" + HEAD]},
    "several prompts and n": {"prompt": ["# four\n" + LINE, "# five\n" + LINE], "n": 2, "seed": 3, "temperature": 1.0},
    "more than fits": {"prompt": [400] * 4000, "max_tokens": 500},
    "token ids": {"prompt": [[*range(300, 420)], [*range(500, 600)]]},
    "stop": {"stop": ["e", "\n"], "max_tokens": 40},
    "stop, kept": {"stop": ["e"], "max_tokens": 40, "extra_body": {"include_stop_str_in_output": True}},
    "min_tokens": {"max_tokens": 9, "extra_body": {"min_tokens": 9}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}},
    "logit_bias": {"logit_bias": {"400": 100}},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "a choice of words": {"extra_body": {"structured_outputs": {"choice": ["left", "right"]}}},
    "response_format": {"extra_body": {"response_format": {"type": "json_object"}}},
    "user": {"user": "somebody"},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "n with a seed": {"messages": [{"role": "user", "content": LINE}], "n": 3, "seed": 5, "temperature": 1.0},
    "stop": {"stop": "e", "max_tokens": 40},
    "json_schema": {
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
    },
    "json_object": {"response_format": {"type": "json_object"}},
    "tools, none called": {"tools": [TOOL], "tool_choice": "none"},
    "tools, as it likes": {"tools": [TOOL]},
    "a named tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_tokens": 60,
    },
    "a required tool": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 90},
    "several turns": {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": LINE},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": HEAD},
        ]
    },
}
# name, path, request, status: what an engine refuses is refused in its words.
REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "over-long prompt": ("completions", {"prompt": [400] * 5000}, 400),
    "negative max_tokens": ("completions", {"max_tokens": -1}, 400),
    "max_tokens 0": ("completions", {"max_tokens": 0}, 400),
    "text for max_tokens": ("completions", {"max_tokens": "many"}, 400),
    "no prompt": ("completions", {"prompt": None}, 400),
    "empty prompt": ("completions", {"prompt": ""}, 400),
    "token that does not exist": ("completions", {"prompt": [4_000_000]}, 400),
    "n 0": ("completions", {"n": 0}, 400),
    "temperature": ("completions", {"temperature": -2}, 400),
    "logprobs": ("completions", {"logprobs": 10_000}, 400),
    "stop": ("completions", {"stop": [""]}, 400),
    "stream_options without a stream": ("chat", {"stream_options": {"include_usage": True}}, 400),
    "top_logprobs without logprobs": ("chat", {"top_logprobs": 3}, 400),
    "no messages": ("chat", {"messages": []}, 400),
    "a role that does not exist": ("chat", {"messages": [{"role": "nobody", "content": 3}]}, 400),
    "a schema that is none": ("chat", {"response_format": {"type": "json_schema"}}, 400),
    "another model": ("chat", {"model": "gpt-4"}, 404),
}


@pytest.fixture
async def clients(cluster: Cluster, reference: str) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    """To the router, and to an engine by itself."""
    async with (
        AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as router,
        AsyncOpenAI(base_url=f"{reference}/v1", api_key="none", max_retries=0) as alone,
    ):
        yield router, alone


def told(answer: Any) -> Any:
    """What an answer says, without what differs between any two: ids and times."""
    content = answer.model_dump(exclude={"id", "created", "kv_transfer_params", "system_fingerprint"})
    if content.get("usage"):
        content["usage"].pop("prompt_tokens_details", None)
    for choice in content["choices"]:
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or []:
            call.pop("id", None)
    return content


def joined(chunks: list[Any]) -> Any:
    """What a stream says in all: how it is cut into chunks is a matter of time."""
    texts: dict[int, str] = {}
    ends: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            calls = "".join(call.function.arguments or "" for call in (delta.tool_calls or [])) if delta else ""
            text = (delta.content or "") + calls if delta else choice.text
            texts[choice.index] = texts.get(choice.index, "") + text
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    usage = chunks[-1].usage
    return texts, ends, (usage.prompt_tokens, usage.completion_tokens) if usage else None


def assert_same(got: Any, expected: Any) -> None:
    """Equal, but for the last bits of log probabilities: prompts are cut into other pieces on prefill."""
    if isinstance(expected, float):
        assert got == pytest.approx(expected, abs=0.05)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


Create = Callable[[AsyncOpenAI], Callable[..., Any]]


async def outcome(create: Callable[..., Any], request: dict[str, Any]) -> Any:
    """What a client gets: an answer, a stream, or a refusal."""
    try:
        answer = await create(**request)
        return joined([chunk async for chunk in answer]) if request.get("stream") else told(answer)
    except APIStatusError as refused:
        return ("refused", refused.status_code, refused.message)


async def compare(clients: tuple[AsyncOpenAI, AsyncOpenAI], create: Create, request: dict[str, Any]) -> None:
    request = {key: value for key, value in request.items() if value is not None}
    for how in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        got, expected = [await outcome(create(client), {**request, **how}) for client in clients]
        print(f"  {'streamed' if how else 'whole'}: {str(expected)[:150]}")
        assert_same(got, expected)
        if not how:
            assert isinstance(expected, dict), expected
            assert expected["choices"]


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_completions(clients: tuple[AsyncOpenAI, AsyncOpenAI], name: str) -> None:
    print(name)
    request = {**COMPLETION, "prompt": f"# {name}\n{HEAD}", **COMPLETIONS[name]}
    await compare(clients, lambda client: client.completions.create, request)


@pytest.mark.parametrize("name", CHATS)
async def test_chats(clients: tuple[AsyncOpenAI, AsyncOpenAI], name: str) -> None:
    print(name)
    await compare(clients, lambda client: client.chat.completions.create, {**CHAT, **CHATS[name]})


@pytest.mark.parametrize("name", REFUSED)
async def test_what_an_engine_refuses_is_refused_in_its_words(
    clients: tuple[AsyncOpenAI, AsyncOpenAI], name: str
) -> None:
    kind, changes, status = REFUSED[name]
    refusals = []
    for client in clients:
        create: Any = client.completions.create if kind == "completions" else client.chat.completions.create
        request = {**(COMPLETION if kind == "completions" else CHAT), **changes}
        request.setdefault("prompt" if kind == "completions" else "messages", HEAD)
        with pytest.raises(APIStatusError) as refused:
            await create(**request)
        refusals.append((refused.value.status_code, refused.value.message))
    print(f"{name}: {refusals[0]}")
    assert refusals[0][0] == refusals[1][0] == status
    if status != 404:
        assert refusals[0] == refusals[1]


async def test_each_feature_takes_its_kv_from_prefill(
    cluster: Cluster, clients: tuple[AsyncOpenAI, AsyncOpenAI]
) -> None:
    """Else the tests above compare a plain engine with a plain engine."""
    decode = cluster.engines["decode-0"].url
    before = await prompt_tokens(decode)
    answer = await clients[0].completions.create(
        **COMPLETION, prompt=["# alpha\n" + HEAD, "# beta\n" + HEAD], logprobs=2, stop=["zzz"]
    )
    assert answer.usage is not None
    assert_came_from_outside(await prompt_tokens(decode) - before, answer.usage.prompt_tokens)


async def test_the_rest_of_the_api(cluster: Cluster, clients: tuple[AsyncOpenAI, AsyncOpenAI]) -> None:
    assert [model.id async for model in clients[0].models.list()] == [MODEL]
    tokens = await clients[0].post("/../tokenize", body={"model": MODEL, "prompt": LINE}, cast_to=dict[str, Any])
    text = await clients[0].post(
        "/../detokenize", body={"model": MODEL, "tokens": tokens["tokens"]}, cast_to=dict[str, Any]
    )
    assert text["prompt"] == LINE
    own = await metrics(cluster.url)
    assert 'kvbus_router_requests_total{outcome="ok"}' in own
    assert 'kvbus_router_engines{role="prefill",state="ready"} 1.0' in own
