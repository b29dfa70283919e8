"""Which engine a request reaches, under which name and by which path, over HTTP with fake engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import FormData
from support.fronts import END, TOKEN_EVENT, FakeApi, fronted
from support.waiting import eventually

from kvbus.router import stored_responses
from kvbus.router.fleet import discovery
from kvbus.router.http import model_and_pieces
from kvbus.router.request import DECODE_HEADER, PREFILL_HEADER
from kvbus.router.routes import ROUTES, How

KEY = {"Authorization": "Bearer secret"}


def message_of(answer: Any) -> str:
    return str(json.loads(answer.text)["error"]["message"])


async def test_each_leg_names_the_data_parallel_rank_that_was_chosen() -> None:
    """R17: ranks of one engine share a port; a client does not choose among them."""
    async with fronted("P", "D") as front:
        front.beat("P", 2, data_parallel=True, data_parallel_rank=3)
        front.beat("D", 2, requests=9)
        front.beat("E", like="D", data_parallel=True, data_parallel_rank=1)
        await front.knows("P", "D", "E")
        answer = await front.ask(headers={"x-Data-Parallel-Rank": "7"})
        assert answer.headers[DECODE_HEADER] == "E"
        assert [headers.get("x-data-parallel-rank") for _, _, headers in front["P"].requests] == ["3"]
        assert [headers.get("x-data-parallel-rank") for _, _, headers in front["D"].requests] == ["1"]
        front.beat("E", 2, like="D", requests=9, data_parallel=True, data_parallel_rank=1)
        front.beat("D", 3)
        await front.knows("P", "D", "E")
        assert (await front.ask()).headers[DECODE_HEADER] == "D"
        assert "x-data-parallel-rank" not in front["D"].requests[1][2]
        assert PREFILL_HEADER not in (await front.ask("/v1/responses", input="x")).headers, "it reads no such header"


# Names (R4)


async def test_a_second_name_and_an_adapter_are_served_by_both_engines() -> None:
    async with fronted("P", "D", "E") as front:
        for name in "PD":
            front[name].names = ["m", "alias", "lora"]
        for name in ("alias", "lora"):
            answer = await front.ask(model=name)
            assert (answer.headers[PREFILL_HEADER], answer.headers[DECODE_HEADER]) == ("P", "D"), "E has not got it"
        assert {body["model"] for _, body, _ in front["P"].requests} == {"alias", "lora"}


async def test_names_are_learned_before_anybody_asks() -> None:
    adapted = FakeApi("D")
    adapted.names = ["m", "lora"]
    async with fronted("P", "D", apis={"D": adapted}) as front:
        await eventually(lambda: adapted.listed == 1)
        answer = await front.ask(model="lora")
        assert answer.headers[DECODE_HEADER] == "D"
        assert adapted.listed == 1, "no request waits for the list of a name that is known"


async def test_without_the_adapter_on_prefill_decode_computes_alone() -> None:
    async with fronted("P", "D") as front:
        front["D"].names = ["m", "lora"]
        answer = await front.ask(model="lora")
        assert (answer.status, answer.headers.get(PREFILL_HEADER)) == (200, None)
        assert front["P"].requests == []
        assert await front.metric('kvbus_router_alone_total{why="name"}') == 1
        assert (await front.ask()).headers[PREFILL_HEADER] == "P", "the model itself is on both"


async def test_unknown_names_are_asked_for_together_and_not_too_often() -> None:
    async with fronted("P", "D") as front:
        await eventually(lambda: front["D"].listed == 1)
        answers = await asyncio.gather(*(front.ask(model=f"nobody-{number}") for number in range(40)))
        assert {answer.status for answer in answers} == {404}
        assert message_of(answers[0]) == "the model 'nobody-0' does not exist; served: m"
        assert front["D"].listed <= 3, "a round that has begun, and one more for who came after it"
        assert front["D"].requests == front["P"].requests == []


async def test_a_frozen_engine_holds_up_no_unknown_name_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ANSWER_S", 0.3)
    async with fronted("P", "D", "E") as front:
        front["E"].hold_list.clear()
        front["D"].names = ["m", "lora"]
        async with asyncio.timeout(5):
            assert (await front.ask(model="lora")).headers[DECODE_HEADER] == "D"
            assert (await front.ask(model="gpt")).status == 404
            assert (await front.client.get("/v1/models")).status == 200
        front["E"].hold_list.set()


async def test_an_adapter_that_is_gone_from_decode_is_asked_for_again() -> None:
    async with fronted("P", "D") as front:
        front["D"].names = ["m", "lora"]
        assert (await front.ask(model="lora")).status == 200
        front["D"].names, front["D"].status = ["m"], 404
        assert (await front.ask(model="lora")).status == 404, "decode's word"
        front["D"].status = 200
        assert message_of(await front.ask(model="lora")) == "the model 'lora' does not exist; served: m"


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_prefill_engine_without_the_adapter_or_the_api_is_no_verdict(status: int) -> None:
    async with fronted("P", "D") as front:
        for name in "PD":
            front[name].names = ["m", "lora"]
        front["P"].status = status
        front["D"].hold.clear()
        asking_for = front.ask(model="lora")
        await eventually(lambda: front.rebinds)
        assert front.rebinds[0].source_engine == "", "decode is told that nobody has its KV"
        front["D"].hold.set()
        assert (await asking_for).status == 200


# Keys (R5)


async def test_engines_that_want_a_key_get_the_clients() -> None:
    locked = {name: FakeApi(name) for name in "PD"}
    for api in locked.values():
        api.key, api.names = "secret", ["m", "alias"]
    async with fronted("P", "D", apis=locked) as front:
        await eventually(lambda: front["D"].listed == 1)
        assert (await front.client.get("/v1/models")).status == 401
        listed = await front.client.get("/v1/models", headers=KEY)
        assert [card["id"] for card in (await listed.json())["data"]] == ["m", "alias"]
        answer = await front.ask(model="alias", headers=KEY)
        assert (answer.status, answer.headers[DECODE_HEADER]) == (200, "D")
        assert front["D"].requests[0][2]["authorization"] == "Bearer secret"
        answer = await front.ask(model="gpt", headers={"Authorization": "Bearer wrong"})
        assert (answer.status, answer.text) == (401, '{"error": "Unauthorized"}'), "not a 404: nobody could know"
        assert (await front.ask(model="gpt", headers=KEY)).status == 404


async def test_a_prefill_engine_that_tells_its_names_to_clients_only_is_asked_by_them() -> None:
    """It joined, or got its adapter, after the decode engine was asked; else decode would compute alone for ever."""
    locked = FakeApi("P")
    locked.key, locked.names = "secret", ["m", "lora"]
    async with fronted("P", "D", apis={"P": locked}) as front:
        front["D"].names = ["m", "lora"]
        assert PREFILL_HEADER not in (await front.ask(model="lora", headers={"Authorization": "Bearer wrong"})).headers
        before = locked.listed
        for _ in range(3):
            assert PREFILL_HEADER not in (await front.ask(model="lora", headers=KEY)).headers
        assert locked.listed == before, "not for every request"
        front["D"].names = ["m", "lora", "other"]
        locked.names = ["m", "lora", "other"]
        assert (await front.ask(model="other", headers=KEY)).headers[PREFILL_HEADER] == "P"
        assert (await front.ask(model="lora", headers=KEY)).headers[PREFILL_HEADER] == "P"


async def test_without_a_key_of_its_own_the_router_does_not_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "EVERY_S", 0.02)
    locked, open_ = FakeApi("D"), FakeApi("E")
    locked.key = "secret"
    async with fronted("D", "E", apis={"D": locked, "E": open_}):
        await eventually(lambda: open_.listed > 5)
        assert locked.listed == 1


async def test_a_key_that_the_operator_gives_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "EVERY_S", 0.02)
    locked = FakeApi("D")
    locked.key = "secret"
    async with fronted("D", apis={"D": locked}, engine_key="secret") as front:
        locked.names = ["m", "later"]
        before = locked.listed
        await eventually(lambda: locked.listed > before + 1)
        assert (await front.ask(model="later")).status == 200
        locked.key, locked.names = "another", ["m"]
        assert (await front.client.get("/v1/models", headers=KEY)).status == 401, "clients do not get the router's key"


# Routes (R16)


async def test_what_acts_on_one_engine_is_not_routed() -> None:
    async with fronted("P", "D") as front:
        for route in ROUTES:
            if route.how is How.NOT:
                for method in ("GET", "POST"):
                    answer = await front.client.request(method, route.path.replace("{adapter_name}", "a"))
                    said = (await answer.json())["error"]["message"]
                    assert (answer.status, said.endswith(f" is not routed: {route.why}")) == (404, True)
        assert front["P"].requests == front["D"].requests == []


async def test_every_other_route_reaches_an_engine_as_it_is() -> None:
    async with fronted("P", "D") as front:
        for route in ROUTES:
            if route.how is How.ONE:
                front["D"].body = json.dumps({"route": route.path}).encode()
                method = route.methods[0]
                content = b'{"model":  "m", "x": [1.0]}' if method == "POST" else None
                headers = {"Content-Type": "application/json", **KEY}
                answer = await front.client.request(method, route.path, data=content, headers=headers)
                assert (answer.status, await answer.json()) == (200, {"route": route.path})
                assert answer.headers[DECODE_HEADER] == "D"
        assert {headers["authorization"] for _, _, headers in front["D"].requests} == {KEY["Authorization"]}
        assert front["P"].requests == []
        for status in (404, 501, 422, 500):
            front["D"].status, front["D"].body = status, b'{"said": "by the engine"}'
            answer = await front.client.post("/v1/embeddings", json={"model": "m"})
            assert (answer.status, await answer.read()) == (status, front["D"].body)


async def test_a_body_that_is_passed_is_not_changed_by_a_byte() -> None:
    api = FakeApi("D")
    async with fronted("D", apis={"D": api}) as front:
        form = FormData({"model": "m", "language": "en"})
        form.add_field("file", b"\r\n--RIFF\0\xff" * 1000, filename="a.wav", content_type="audio/wav")
        answer = await front.client.post("/v1/audio/transcriptions?x=a%2Fb", data=form)
        assert answer.status == 200
        [(path, body, headers)] = api.requests
        assert (path, headers["content-type"].partition(";")[0]) == ("/v1/audio/transcriptions", "multipart/form-data")
        assert body["raw"].count(b"\r\n--RIFF\0\xff") == 1000
        form = FormData({"text": 'name="model"', "model": "gpt"}, default_to_multipart=True)
        answer = await front.client.post("/v1/audio/translations", data=form)
        assert (await answer.json())["error"]["message"] == "the model 'gpt' does not exist; served: m"


@pytest.mark.parametrize(
    ("head", "model"),
    [
        (b'Content-Disposition: form-data; name="model"', "m"),
        (b"content-disposition:form-data;name=model\r\nContent-Type: text/plain", "m"),
        (b'Content-Disposition: form-data; name="file"; filename="name=model"', None),
        (b'Content-Disposition: form-data; name="models"', None),
        (b"", None),
    ],
)
async def test_the_model_in_a_form(head: bytes, model: str | None) -> None:
    content = b"--b\r\nX: y\r\n\r\nz\r\n--b\r\n" + head + b"\r\n\r\nm\r\n--b--\r\n"
    assert (await model_and_pieces(content, 'multipart/form-data; boundary="b"'))[0] == model
    for junk in (b"", b"--b", b"--b\r\n\r\n", b"--b\r\n" * 5000, content[:-20]):
        assert (await model_and_pieces(junk, "multipart/form-data; boundary=b"))[0] is None
    assert (await model_and_pieces(content, "multipart/form-data"))[0] is None


async def test_a_stream_that_is_passed_is_not_held_up() -> None:
    async with fronted("D") as front:
        front["D"].stream = [TOKEN_EVENT, END]
        front["D"].hold_rest.clear()
        answer = await front.client.post("/v1/chat/completions/batch", json={"model": "m", "stream": True})
        assert await answer.content.readexactly(len(TOKEN_EVENT)) == TOKEN_EVENT
        front["D"].die()
        rest = await answer.content.read()
        assert b"engine D was lost in the middle of its answer" in rest


async def test_a_request_that_was_not_answered_goes_to_another_engine() -> None:
    async with fronted("D", "E") as front:
        front["D"].die()
        for _ in range(8):
            assert (await front.client.post("/v1/embeddings", json={"model": "m"})).status == 200
        front["E"].die()
        answer = await front.client.post("/v1/embeddings", json={"model": "m"})
        assert (answer.status, (await answer.json())["error"]["type"]) == (502, "bad_gateway")


async def test_one_model_of_the_list() -> None:
    async with fronted("D", "E") as front:
        front["D"].names, front["E"].names = ["m", "org/lora"], ["m"]
        card = await (await front.client.get("/v1/models/org/lora")).json()
        assert card == {"id": "org/lora", "root": "D"}
        answer = await front.client.get("/v1/models/gpt")
        assert (answer.status, (await answer.json())["error"]["param"]) == (404, "model")


async def test_the_routers_own() -> None:
    async with fronted("P", "D") as front:
        assert (await front.client.get("/ping")).status == (await front.client.post("/ping")).status == 200
        assert await (await front.client.get("/load")).json() == {"server_load": 0}
        front["D"].hold.clear()
        asking_for = front.ask()
        await eventually(lambda: front["D"].requests)
        assert await (await front.client.get("/load")).json() == {"server_load": 1}
        front["D"].hold.set()
        await asking_for


# LoRA adapters


async def test_an_adapter_is_loaded_into_every_engine() -> None:
    async with fronted("P", "D", "E") as front:
        body = {"lora_name": "lora", "lora_path": "/x"}
        for api in front.apis.values():
            api.names, api.body = ["m", "lora"], b"Success: done"
        answer = await front.client.post("/v1/load_lora_adapter", json=body, headers=KEY)
        done = {"status": 200, "message": "Success: done"}
        assert (answer.status, await answer.json()) == (200, {"engines": dict.fromkeys("DEP", done)})
        for api in front.apis.values():
            assert [(path, sent) for path, sent, _ in api.requests] == [("/v1/load_lora_adapter", body)]
            assert api.requests[0][2]["authorization"] == "Bearer secret"
        listed = front["D"].listed
        assert (await front.ask(model="lora")).headers[PREFILL_HEADER] == "P"
        assert front["D"].listed == listed, "its name was learned when it was loaded"


async def test_an_adapter_that_not_every_engine_takes_is_said_so() -> None:
    async with fronted("P", "D") as front:
        front["P"].status, front["P"].body = 400, b'{"error": {"message": "no such file"}}'
        answer = await front.client.post("/v1/load_lora_adapter", json={"lora_name": "l", "lora_path": "/x"})
        said = await answer.json()
        assert answer.status == 502
        assert "done by 1 of 2 engines, and not undone there; P: " in said["error"]["message"]
        assert {name: each["status"] for name, each in said["engines"].items()} == {"P": 400, "D": 200}
        front["D"].status = 400
        answer = await front.client.post("/v1/load_lora_adapter", json={"lora_name": "l", "lora_path": "/x"})
        assert answer.status == 400, "what all of them say"


async def test_an_adapter_of_one_of_several_models() -> None:
    async with fronted("P", "D", "E") as front:
        front.beat("E", 2, model="n")
        front["E"].names = ["n", "l"]
        await front.knows("E")
        body = {"lora_name": "l", "lora_path": "/x"}
        answer = await front.client.post("/v1/load_lora_adapter", json=body)
        assert (answer.status, (await answer.json())["error"]["message"]) == (
            400,
            "model: which one is the adapter for? One of m, n",
        )
        assert (await front.client.post("/v1/load_lora_adapter", json={**body, "model": "n"})).status == 200
        assert (await front.client.post("/v1/unload_lora_adapter", json={"lora_name": "l"})).status == 200
        assert [len(front[name].requests) for name in "PDE"] == [0, 0, 2]
        assert (await front.client.post("/v1/unload_lora_adapter", json={"lora_name": "gone"})).status == 404


# Responses and messages


async def test_a_response_is_asked_for_where_it_is_kept() -> None:
    async with fronted("P", "D", "E") as front:
        front["E"].kept.add("resp_1")
        answer = await front.client.get("/v1/responses/resp_1")
        assert await answer.json() == {"id": "resp_1", "of": "E"}
        assert (await front.client.get("/v1/responses/resp_2")).status == 404
        await front.client.post("/v1/responses/resp_1/cancel")
        assert [path for path, _, _ in front["E"].requests] == ["/v1/responses/resp_1/cancel"]
        assert front["D"].requests == []


async def test_what_goes_on_from_a_response_goes_to_the_engine_that_keeps_it() -> None:
    async with fronted("P", "D", "E") as front:
        front["E"].kept.add("resp_1")
        for _ in range(6):
            answer = await front.ask("/v1/responses", input="x", previous_response_id="resp_1")
            assert (answer.headers[DECODE_HEADER], answer.headers.get(PREFILL_HEADER)) == ("E", None)
        assert front["P"].requests == front["D"].requests == []
        front.beat("E", 2, state="draining")
        await eventually(lambda: front.node.membership["E"].state == "draining")
        answer = await front.ask("/v1/responses", input="x", previous_response_id="resp_1")
        assert (answer.status, message_of(answer)) == (
            503,
            "engine E, which keeps the response 'resp_1', is draining",
        )
        assert (await front.client.get("/v1/responses/resp_1")).status == 200, "to be read it need not be ready"


@pytest.mark.parametrize("odd", ["../../sleep", "a/b", "a?b", "", ".."])
async def test_what_is_no_id_of_a_response_reaches_no_engine(odd: str) -> None:
    async with fronted("D", "E") as front:
        answer = await front.ask("/v1/responses", input="x", previous_response_id=odd)
        assert (answer.status, message_of(answer)) == (404, f"there is no response {odd!r}")
        assert (await front.client.get("/v1/responses/%2e%2e%2fmetrics")).status == 404
        assert front["D"].requests == front["E"].requests == []


async def test_an_engine_that_may_keep_a_response_and_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "HOLDER_S", 0.2)
    async with fronted("D", "E") as front:
        front["E"].hold_list.clear()
        answer = await front.client.get("/v1/responses/resp_1")
        said = (await answer.json())["error"]["message"]
        assert (answer.status, said) == (502, "engine E may keep the response 'resp_1' and does not answer")
        front["E"].hold_list.set()


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": []},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [], "max_tokens": 5},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 5}},
}


@pytest.mark.parametrize("route", [route for route in ROUTES if route.how is How.PAIR], ids=lambda route: route.path)
async def test_every_way_to_generate_is_disaggregated(route: Any) -> None:
    async with fronted("P", "D") as front:
        body = BODIES[route.path]
        answer = await front.ask(route.path, **body)
        assert (answer.status, answer.headers[PREFILL_HEADER], answer.headers[DECODE_HEADER]) == (200, "P", "D")
        [(path, sent, _)], [(_, got, _)] = front["P"].requests, front["D"].requests
        assert path == route.path
        assert sent["kv_transfer_params"]["transfer_id"] == got.pop("kv_transfer_params")["transfer_id"]
        assert got == {"model": "m", **body}


OPENINGS = {
    "/v1/responses": b'event: response.created\ndata: {"type":"response.created"}\n\n',
    "/v1/messages": b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n',
}
TOKENS = {
    "/v1/responses": b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n',
    "/v1/messages": b'event: content_block_start\ndata: {"type":"content_block_start"}\n\n',
}


@pytest.mark.parametrize("path", OPENINGS)
async def test_an_engine_that_dies_before_the_first_token_is_replaced(path: str) -> None:
    async with fronted("P", "D", "E") as front:
        for name in "DE":
            front[name].stream = [OPENINGS[path], TOKENS[path]]
            front[name].hold_rest.clear()
        asking_for = front.ask(path, stream=True, **BODIES[path])
        await eventually(lambda: front["D"].requests or front["E"].requests)
        lost, other = ("D", "E") if front["D"].requests else ("E", "D")
        front[other].hold_rest.set()
        front[lost].die()
        answer = await asking_for
        assert (answer.status, answer.headers[DECODE_HEADER]) == (200, other)
        assert answer.text.encode() == OPENINGS[path] + TOKENS[path]


@pytest.mark.parametrize("path", OPENINGS)
async def test_a_stream_that_breaks_ends_in_an_event_of_its_api(path: str) -> None:
    async with fronted("P", "D") as front:
        front["D"].stream = [TOKENS[path], TOKENS[path]]
        front["D"].hold_rest.clear()
        answer = await front.client.post(path, json={"model": "m", "stream": True, **BODIES[path]})
        assert await answer.content.readexactly(len(TOKENS[path])) == TOKENS[path]
        front["D"].die()
        name, _, data = (await answer.content.read()).strip().partition(b"\n")
        assert name == b"event: error"
        event = json.loads(data.removeprefix(b"data: "))
        assert (event["type"], event["error"]["code"]) == ("error", 502)


async def test_an_error_in_a_stream_before_its_first_token_is_an_answer() -> None:
    error = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no"}}\n\n'
    async with fronted("D") as front:
        front["D"].stream = [OPENINGS["/v1/messages"], error]
        answer = await front.ask("/v1/messages", stream=True, **BODIES["/v1/messages"])
        assert (answer.status, json.loads(answer.text)["error"]["message"]) == (500, "no")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/invocations", "/cohere/v2/chat", "/tokenize"])
async def test_no_passed_body_names_a_transfer(path: str) -> None:
    """R10: also where vLLM takes the parameters from what it does not know itself."""
    evil = {"do_remote_decode": True, "transfer_id": "x"}
    async with fronted("P", "D") as front:
        body = {"model": "m", "kv_transfer_params": evil, "vllm_xargs": {"kv_transfer_params": "x", "mine": 1}}
        assert (await front.client.post(path, json=body)).status == 200
        assert front["D"].requests[-1][1] == {"model": "m", "vllm_xargs": {"mine": 1}}


async def test_no_sampling_parameters_name_a_transfer() -> None:
    """R10."""
    async with fronted("P", "D") as front:
        body = {"model": "m", "token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {"x": 1}}}}
        await front.client.post("/inference/v1/generate", json=body)
        for name in ("P", "D"):
            assert front[name].requests[-1][1]["sampling_params"]["extra_args"] == {}
