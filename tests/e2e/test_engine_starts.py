"""Real engines that cannot start, or need something of kvbus to: P5, P6."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engines import say
from support.waiting import eventually_sync

from kvbus.local import NatsServer
from kvbus.local.cluster import Engine, EngineSpec, wait_until

pytestmark = pytest.mark.e2e


def spec_of(model: Path, server: NatsServer, *arguments: str, **extra: Any) -> EngineSpec:
    transfer = {
        "kv_connector": "KVBusConnector",
        "kv_role": "kv_producer",
        "engine_id": "starts",
        "kv_connector_extra_config": {"nats_url": server.url, **extra},
    }
    words = ("--max-model-len", "512", "--load-format", "dummy", "--skip-tokenizer-init", *arguments)
    return EngineSpec("starts", model, model.name, transfer, words)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with Mamba layers, without weights."""
    from transformers import GraniteMoeHybridConfig

    folder = tmp_path_factory.mktemp("hybrid") / "granite4"
    GraniteMoeHybridConfig(
        architectures=["GraniteMoeHybridForCausalLM"],
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=64,
        position_embedding_type="rope",
        max_position_embeddings=2048,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def outputs(
    model: Path, hybrid: Path, nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What engines write that do not start; all at once, since most of the time each waits for its own processes."""
    unfit = {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}
    specs = {
        "setting": spec_of(model, nats_server, "--pipeline-parallel-size", "2"),
        "backend": spec_of(model, nats_server, backends=["UCX", "NOSUCH"]),
        "key": spec_of(model, nats_server, nats_ulr=1),
        "layout": replace(spec_of(hybrid, nats_server), environment=unfit),
    }
    logs = tmp_path_factory.mktemp("starts")
    children = {name: Engine(replace(spec, name=name), logs).child for name, spec in specs.items()}
    try:
        eventually_sync(lambda: not any(child.alive for child in children.values()), timeout_s=280)
    finally:
        for child in children.values():
            child.kill()  # all of its processes, should it have started after all
    written = {name: child.log.read_text().rstrip() for name, child in children.items()}
    assert {name: child.status for name, child in children.items()} == dict.fromkeys(specs, 1), written
    return written


def last_line(output: str) -> str:
    return output.splitlines()[-1]


def test_a_setting_that_is_not_supported(outputs: dict[str, str]) -> None:
    assert last_line(outputs["setting"]) == "kvbus: bad configuration: pipeline_parallel_size=2; allowed: 1"


def test_a_backend_that_cannot_be_loaded(outputs: dict[str, str]) -> None:
    last = last_line(outputs["backend"])
    assert last.startswith("kvbus: bad configuration: backends=['UCX', 'NOSUCH']; allowed: what NIXL can load here: ")
    assert last.endswith("; there is no plugin NOSUCH")
    assert "UCX" in last.partition("here: ")[2]


def test_an_unknown_key_is_said_once_in_the_log_too(outputs: dict[str, str]) -> None:
    said = "bad configuration: nats_ulr=1; allowed: the keys backends, block_"
    assert said in last_line(outputs["key"])
    lines = [line for line in outputs["key"].splitlines() if "ERROR" in line and said in line and "Error:" not in line]
    assert lines


def test_a_layout_that_does_not_fit_is_refused(outputs: dict[str, str]) -> None:
    assert last_line(outputs["layout"]) == (
        "kvbus: bad configuration: VLLM_SSM_CONV_STATE_LAYOUT='SD'; "
        "allowed: DS in the environment, for a model with Mamba layers"
    )


def test_a_mamba_hybrid_needs_no_variable(hybrid: Path, nats_server: NatsServer, tmp_path: Path) -> None:
    engine = Engine(spec_of(hybrid, nats_server), tmp_path)
    try:
        wait_until(lambda: engine.healthy, [engine.child], "booting a hybrid", say)
    finally:
        engine.child.signal(signal.SIGTERM)
        engine.child.stop()
    assert "VLLM_SSM_CONV_STATE_LAYOUT=DS" in engine.child.log.read_text()
