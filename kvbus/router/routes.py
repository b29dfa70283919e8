"""Every route, and what the router does with it: one table, for the code, the tests and the docs. Pure.

The one rule: each route of vLLM's server is here, also those that are not routed, with the reason.
``tests/connector/test_routes.py`` compares the table with the installed vLLM's own.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum

from kvbus.router.request import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Dialect


class How(Enum):
    """What becomes of a request; the value is for the docs."""

    PAIR = "one prefill and one decode engine, which gets the KV"
    ONE = "one decode engine that serves the model"
    HOLDER = "the engine that keeps the response"
    EVERY = "every engine of the model"
    MODELS = "the lists of all decode engines, merged"
    OWN = "the router itself"
    NOT = "not routed: 404"


@dataclass(frozen=True, slots=True)
class Route:
    """``path`` is aiohttp's pattern. ``dialect`` of those for a pair. ``computes``: it needs a forward pass, so it may
    take its time. ``why`` one is not routed, as the client is told."""

    methods: tuple[str, ...]
    path: str
    how: How
    dialect: Dialect | None = None
    computes: bool = False
    why: str = ""


_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")
_ANY = ("*",)

_ONE_ENGINE = "it acts on one engine: ask that engine itself"
_ABOUT_ONE = "it tells of one engine: ask that engine itself"
_TRAINING = "it changes weights of one engine: ask each engine itself"


def _pairs(path: str, dialect: Dialect) -> Route:
    return Route(_POST, path, How.PAIR, dialect, computes=True)


def _not(why: str, *paths: str) -> list[Route]:
    return [Route(_ANY, path, How.NOT, why=why) for path in paths]


ROUTES: tuple[Route, ...] = (
    _pairs("/v1/chat/completions", CHAT),
    _pairs("/v1/completions", COMPLETIONS),
    _pairs("/v1/responses", RESPONSES),
    _pairs("/v1/messages", MESSAGES),
    _pairs("/inference/v1/generate", GENERATE),
    Route(_GET, "/v1/responses/{response_id}", How.HOLDER),
    Route(_POST, "/v1/responses/{response_id}/cancel", How.HOLDER),
    *(
        Route(_POST, path, How.ONE, computes=True)
        for path in (
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/generative_scoring",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/chat/completions/batch",
            "/v1/systemone",
            "/cohere/v2/chat",
            "/invocations",
        )
    ),
    *(
        Route(_POST, path, How.ONE)
        for path in (
            "/tokenize",
            "/detokenize",
            "/v1/messages/count_tokens",
            "/v1/chat/completions/render",
            "/v1/completions/render",
            "/v1/responses/render",
            "/v1/messages/render",
            "/cohere/v2/chat/render",
            "/v1/chat/completions/derender",
            "/v1/completions/derender",
        )
    ),
    Route(_GET, "/tokenizer_info", How.ONE),
    Route(_GET, "/version", How.ONE),
    Route(_POST, "/v1/load_lora_adapter", How.EVERY),
    Route(_POST, "/v1/unload_lora_adapter", How.EVERY),
    Route(_GET, "/v1/models", How.MODELS),
    Route(_GET, "/v1/models/{name:.+}", How.MODELS),
    Route(_GET, "/health", How.OWN),
    Route(_GET, "/ready", How.OWN),
    Route(_BOTH, "/ping", How.OWN),
    Route(_GET, "/load", How.OWN),
    Route(_GET, "/metrics", How.OWN),
    *_not("a WebSocket: ask an engine itself", "/v1/realtime"),
    *_not("use /v1/load_lora_adapter and /v1/unload_lora_adapter", "/adapters", "/adapters/{adapter_name}"),
    *_not("the ids are an engine's own: close the request's connection instead", "/inference/v1/abort_requests"),
    *_not("the ids are an engine's own: close the request's connection instead", "/abort_requests"),
    *_not(_ABOUT_ONE, "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/kv_event_sources", "/server_info"),
    *_not(_ABOUT_ONE, "/is_sleeping", "/is_paused", "/get_world_size", "/weight_info", "/fault_tolerance/status"),
    *_not(_ONE_ENGINE, "/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume", "/collective_rpc"),
    *_not(_ONE_ENGINE, "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/fault_tolerance/apply"),
    *_not(_ONE_ENGINE, "/start_profile", "/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *_not(_TRAINING, "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
    *_not(
        _TRAINING, "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"
    ),
    *_not(_TRAINING, "/weight_checker"),
)


def unknown(path: str) -> str:
    """What to say of a path that is not there."""
    paths = [route.path for route in ROUTES if route.how is not How.NOT]
    near = difflib.get_close_matches(path[:100], paths, 3)
    return f"there is no {path:.200}" + (f"; did you mean {', '.join(near)}?" if near else "")


def as_markdown() -> list[str]:
    """The table of the docs, line by line."""
    lines = ["| route | what the router does |", "|---|---|"]
    for how in How:
        routes = [route for route in ROUTES if route.how is how]
        for why in dict.fromkeys(route.why for route in routes):
            paths = ", ".join(
                f"`{'' if route.methods == _ANY else '/'.join(route.methods) + ' '}{route.path.replace(':.+', '')}`"
                for route in routes
                if route.why == why
            )
            lines.append(f"| {paths} | {how.value}{f' ({why})' if why else ''} |")
    return lines
