"""OpenAI's and Anthropic's clients, with a key, under every name, against the router: equal to one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from anthropic import NotFoundError as AnthropicNotFoundError
from openai import APIStatusError, AsyncOpenAI, AuthenticationError, NotFoundError
from support.adapter import adapter
from support.engines import ARGUMENTS, TRANSFER_ALL, assert_came_from_outside, post, prompt, prompt_tokens, say

from kvbus.local import Cluster
from kvbus.local.cluster import Engine, EngineSpec, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL, ALIAS, KEY = "tiny-qwen3", "second-name", "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
LINE = "def main():\n    for name in sorted(os.listdir(path)):\n        print(name)\n"
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}


class Two:
    """The router, and one engine by itself, started alike."""

    def __init__(self, cluster: Cluster, alone: str, adapters: Path) -> None:
        self.cluster, self.urls, self.adapters = cluster, (cluster.url, alone), adapters

    @property
    def decode(self) -> str:
        return self.cluster.engines["decode-0"].url

    @asynccontextmanager
    async def openai(self) -> AsyncIterator[list[AsyncOpenAI]]:
        """To the router, and to the other."""
        async with AsyncExitStack() as stack:
            clients = (AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) for url in self.urls)
            yield [await stack.enter_async_context(client) for client in clients]

    @asynccontextmanager
    async def anthropic(self) -> AsyncIterator[list[AsyncAnthropic]]:
        async with AsyncExitStack() as stack:
            clients = (AsyncAnthropic(base_url=url, auth_token=KEY, max_retries=0) for url in self.urls)
            yield [await stack.enter_async_context(client) for client in clients]

    @asynccontextmanager
    async def plain(self) -> AsyncIterator[tuple[str, str]]:
        yield self.urls


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("clients")
    adapters = folder / "adapters"
    for seed, name in enumerate(("early", "later")):
        adapter(adapters / name, model, seed)
    arguments = [*ARGUMENTS, "--served-model-name", MODEL, ALIAS, "--api-key", KEY, "--enable-scale-out"]
    arguments += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"early={adapters / 'early'}"]
    alone = Engine(EngineSpec("alone", model, MODEL, arguments=arguments, environment=ENVIRONMENT), folder)
    try:
        with Cluster(
            model, folder, arguments=arguments, extra=TRANSFER_ALL, environment=ENVIRONMENT, say=say
        ) as cluster:
            wait_until(lambda: alone.healthy, [alone.child], "booting an engine by itself", say)
            yield Two(cluster, alone.url, adapters)
    finally:
        alone.child.stop()


async def responses(client: AsyncOpenAI, stream: bool, text: str, **more: Any) -> Any:
    request = {"model": MODEL, "input": text, "max_output_tokens": 12, "temperature": 0, **more}
    answer = await client.responses.create(**request, stream=stream)
    if not stream:
        return answer.output_text, answer.status, answer.usage.input_tokens, answer.usage.output_tokens
    events = [event async for event in answer]
    done = events[-1].response
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return text, done.status, done.usage.input_tokens, done.usage.output_tokens


async def chat(client: AsyncOpenAI, stream: bool, text: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    request: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **more}
    if not stream:
        choice = (await client.chat.completions.create(**request)).choices[0]
        return choice.message.content, choice.finish_reason
    chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason


async def completion(client: AsyncOpenAI, stream: bool, text: str, **more: Any) -> Any:
    request: dict[str, Any] = {"model": MODEL, "prompt": text, "max_tokens": 12, "temperature": 0, **more}
    if not stream:
        choice = (await client.completions.create(**request)).choices[0]
        return choice.text, choice.finish_reason
    chunks = [chunk async for chunk in await client.completions.create(**request, stream=True)]
    return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason


async def messages(client: AsyncAnthropic, stream: bool, text: str, **more: Any) -> Any:
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 12,
        "system": "Be short.",
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": text}],
        **more,
    }
    if not stream:
        answer = await client.messages.create(**request)
    else:
        async with client.messages.stream(**request) as streaming:
            answer = await streaming.get_final_message()
    words = [block.text for block in answer.content if block.type == "text"]
    return words, answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens


async def generate(url: str, stream: bool, text: str, **more: Any) -> Any:
    body = {
        "model": MODEL,
        "token_ids": prompt(200, seed=len(text)),
        "sampling_params": {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": 1},
        **more,
    }
    status, answer = await post(f"{url}/inference/v1/generate", body, **HEADERS)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


ASKING = {
    "chat": (chat, "openai"),
    "completion": (completion, "openai"),
    "responses": (responses, "openai"),
    "messages": (messages, "anthropic"),
    "generate": (generate, "plain"),
}


async def both(two: Two, name: str, stream: bool, text: str, **more: Any) -> tuple[Any, Any]:
    ask, kind = ASKING[name]
    async with getattr(two, kind)() as clients:
        got, expected = [await ask(client, stream, text, **more) for client in clients]
    print(f"  {name}, {'streamed' if stream else 'whole'}: {expected}")
    return got, expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKING)
async def test_every_api_equals_one_engine_and_takes_its_kv_from_prefill(two: Two, name: str, stream: bool) -> None:
    """R16, R5."""
    before = await prompt_tokens(two.decode)
    got, expected = await both(two, name, stream, f"# {name} {stream}\n{LINE * 6}")
    assert got == expected
    spent = await prompt_tokens(two.decode) - before
    assert spent.external > 90, spent
    assert_came_from_outside(spent, spent.external)


async def test_models_are_listed_with_a_key_and_not_without(two: Two) -> None:
    """R4, R5."""
    async with two.openai() as (router, alone):
        assert [card.id async for card in router.models.list()] == [card.id async for card in alone.models.list()]
        assert {MODEL, ALIAS, "early"} <= {card.id async for card in router.models.list()}
        assert (await router.models.retrieve("early")).id == "early"
        with pytest.raises(AuthenticationError):
            [card async for card in router.with_options(api_key="wrong").models.list()]
        with pytest.raises(AuthenticationError):
            await chat(router.with_options(api_key="wrong"), False, LINE)


async def test_an_adapter_by_its_name_equals_one_engine(two: Two) -> None:
    """R4: and is neither the model nor another adapter, though all have the same prompt; whatever caches hold."""
    text, answers = f"# adapters\n{LINE * 6}", {}
    for name in (ALIAS, "early", MODEL, "early"):
        before = await prompt_tokens(two.decode)
        got, expected = await both(two, "chat", False, text, model=name)
        assert got == expected
        answers[name] = got
        spent = await prompt_tokens(two.decode) - before
        print(f"  {name}: {spent}")
        if len(answers) > 2:
            continue
        assert spent.external > 90, spent
    assert answers[ALIAS] == answers[MODEL] != answers["early"]
    got, expected = await both(two, "messages", True, text, model="early")
    assert got == expected


async def test_an_adapter_that_is_loaded_later(two: Two) -> None:
    """R4: through the router into all engines, and used at once; and one that is loaded into decode only."""
    async with two.openai() as (router, alone):
        with pytest.raises(NotFoundError, match="does not exist; served: "):
            await chat(router, False, LINE, model="later")
        load = {"lora_name": "later", "lora_path": str(two.adapters / "later")}
        status, said = await post(f"{two.cluster.url}/v1/load_lora_adapter", load, **HEADERS)
        assert (status, {name: each["status"] for name, each in said["engines"].items()}) == (
            200,
            {"prefill-0": 200, "decode-0": 200},
        )
        await alone.post("/load_lora_adapter", body=load, cast_to=str)
        before = await prompt_tokens(two.decode)
        got, expected = await both(two, "chat", True, f"# later\n{LINE * 6}", model="later")
        assert got == expected
        spent = await prompt_tokens(two.decode) - before
        assert spent.external > 90, spent
        status, said = await post(f"{two.cluster.url}/v1/load_lora_adapter", load, **HEADERS)
        assert (status, "already been loaded" in said["error"]["message"]) == (400, True)
        only = {**load, "lora_name": "only-decode"}
        await alone.with_options(base_url=f"{two.decode}/v1").post("/load_lora_adapter", body=only, cast_to=str)
        before = await prompt_tokens(two.decode)
        assert await chat(router, False, f"# later\n{LINE * 6}", model="only-decode") == got
        spent = await prompt_tokens(two.decode) - before
        assert (spent.external, spent.computed > 90) == (0, True), spent
        status, said = await post(f"{two.cluster.url}/v1/unload_lora_adapter", {"lora_name": "later"}, **HEADERS)
        assert status == 200, said
        with pytest.raises(NotFoundError):
            await chat(router, False, LINE, model="later")


async def test_responses_that_an_engine_keeps(two: Two) -> None:
    """R16: they are read, gone on from, and cancelled."""
    async with two.openai() as (router, alone):
        texts = []
        for client in (router, alone):
            first = await client.responses.create(model=MODEL, input=LINE, max_output_tokens=8, temperature=0)
            assert (await client.responses.retrieve(first.id)).output_text == first.output_text
            second = await client.responses.create(
                model=MODEL, input="go on", previous_response_id=first.id, max_output_tokens=8, temperature=0
            )
            texts.append((first.output_text, second.output_text, second.usage and second.usage.input_tokens))
            later = await client.responses.create(
                model=MODEL, input=LINE, background=True, max_output_tokens=3000, extra_body={"ignore_eos": True}
            )
            assert later.status == "queued"
            assert (await client.responses.cancel(later.id)).status == "cancelled"
            with pytest.raises(NotFoundError):
                await client.responses.retrieve("resp_nobody")
        assert texts[0] == texts[1]


async def test_what_is_passed_equals_one_engine(two: Two) -> None:
    for path, body in {
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LINE}]},
        "/v1/chat/completions/render": {"messages": [{"role": "user", "content": LINE}], "max_tokens": 5},
        "/v1/completions/render": {"prompt": LINE, "max_tokens": 5},
        "/tokenize": {"prompt": LINE},
        "/v1/embeddings": {"input": LINE},
        "/pooling": {"input": LINE},
    }.items():
        (got, said), (expected, expected_said) = [
            await post(f"{url}{path}", {"model": ALIAS, **body}, **HEADERS) for url in two.urls
        ]
        print(f"  {path}: {expected}")
        assert got == expected
        if "render" not in path:
            assert said == expected_said
    for path in ("/version", "/ping"):
        status, _ = await asyncio.to_thread(_get, two.cluster.url + path)
        assert status == 200


async def test_errors_are_raised_by_both_clients(two: Two) -> None:
    async with two.anthropic() as (router, _):
        with pytest.raises(AnthropicNotFoundError, match="does not exist"):
            await messages(router, False, LINE, model="nobody")
    refusals = []
    async with two.openai() as clients:
        for client in clients:
            with pytest.raises(APIStatusError) as refused:
                await responses(client, False, LINE * 2000)
            refusals.append((refused.value.status_code, refused.value.message))
    assert refusals[0] == refusals[1]


def _get(url: str) -> tuple[int, bytes]:
    import urllib.request

    with urllib.request.urlopen(urllib.request.Request(url, headers=HEADERS)) as answer:
        return answer.status, answer.read()
