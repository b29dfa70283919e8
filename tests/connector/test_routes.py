"""The router's table of routes against the installed vLLM's own app, and against the docs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.router.routes import ROUTES, How, as_markdown

DOCS = Path(__file__).parents[2] / "docs" / "routes.md"
OURS = {("GET", "/ready"), ("GET", "/v1/models/{name}")}
# Needs a package that vLLM does not bring (cohere), or is made by an argument of its own.
ELSEWHERE = {
    ("POST", "/cohere/v2/chat"),
    ("POST", "/cohere/v2/chat/render"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
}
# The app has what its model can do; the routers have the rest.
LIST = """
import importlib, json, pkgutil
from fastapi import APIRouter
from vllm import entrypoints, tasks
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
args.enable_scale_out = args.enable_fault_tolerance = args.enable_tokenizer_info_endpoint = True
app = build_app(args, (*tasks.GENERATION_TASKS, *tasks.POOLING_TASKS, "render"), None)
found = list(app.routes)
for module in pkgutil.walk_packages(entrypoints.__path__, "vllm.entrypoints."):
    if module.name.endswith(".api_router") and ".cohere." not in module.name:
        for each in vars(importlib.import_module(module.name)).values():
            found += each.routes if isinstance(each, APIRouter) else []
routes = [(method, route.path) for route in found for method in getattr(route, "methods", None) or ["GET"]]
print("ROUTES" + json.dumps(routes))
"""


@pytest.fixture(scope="module")
def vllms_own() -> set[tuple[str, str]]:
    """Every route that vLLM can have; asked of a process of its own, which imports all of vLLM."""
    pytest.importorskip("vllm")
    switches = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_COHERE_API")
    environment = {**os.environ, **dict.fromkeys(switches, "1"), "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run([sys.executable, "-c", LIST], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    listed = next(line for line in done.stdout.splitlines() if line.startswith("ROUTES"))
    return {(method, path) for method, path in json.loads(listed.removeprefix("ROUTES")) if method != "HEAD"}


@pytest.mark.slow
def test_every_route_of_vllm_is_in_the_table(vllms_own: set[tuple[str, str]]) -> None:
    """R16: a vLLM with a new route makes somebody decide what becomes of it."""
    refused = {route.path for route in ROUTES if route.how is How.NOT}
    ours = {(method, route.path.replace(":.+", "")) for route in ROUTES for method in route.methods}
    theirs = {(method, path) for method, path in vllms_own if path not in refused}
    assert {each for each in ours if each[0] != "*"} - OURS - ELSEWHERE - theirs == set(), "vLLM has them no longer"
    assert theirs - ours == set(), "new in vLLM: say in kvbus/router/routes.py what becomes of them"
    assert refused - {path for _, path in vllms_own} - {path for _, path in ELSEWHERE} == set()


def test_the_docs_have_the_table() -> None:
    text = DOCS.read_text()
    table = "\n".join(as_markdown())
    assert table in text, f"docs/routes.md should have:\n{table}"


def test_no_route_is_twice_in_the_table() -> None:
    paths = [route.path for route in ROUTES]
    assert len(paths) == len(set(paths))
