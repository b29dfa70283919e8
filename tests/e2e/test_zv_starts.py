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


def output_of(spec: EngineSpec, logs: Path) -> str:
    """Everything that an engine writes which does not start."""
    child = Engine(spec, logs).child
    try:
        eventually_sync(lambda: not child.alive, timeout_s=240)
    finally:
        child.kill()  # all of its processes, should it have started after all
    output = child.log.read_text().rstrip()
    assert child.status == 1, output
    return output


def test_a_setting_that_is_not_supported(model: Path, nats_server: NatsServer, tmp_path: Path) -> None:
    output = output_of(spec_of(model, nats_server, "--pipeline-parallel-size", "2"), tmp_path)
    assert output.splitlines()[-1] == "kvbus: bad configuration: pipeline_parallel_size=2; allowed: 1"


def test_a_backend_that_cannot_be_loaded(model: Path, nats_server: NatsServer, tmp_path: Path) -> None:
    last = output_of(spec_of(model, nats_server, backends=["UCX", "NOSUCH"]), tmp_path).splitlines()[-1]
    assert last.startswith("kvbus: bad configuration: backends=['UCX', 'NOSUCH']; allowed: what NIXL can load here: ")
    assert last.endswith("; there is no plugin NOSUCH")
    assert "UCX" in last.partition("here: ")[2]


def test_a_mamba_hybrid_needs_no_variable(hybrid: Path, nats_server: NatsServer, tmp_path: Path) -> None:
    engine = Engine(spec_of(hybrid, nats_server), tmp_path)
    try:
        wait_until(lambda: engine.healthy, [engine.child], "booting a hybrid", say)
    finally:
        engine.child.signal(signal.SIGTERM)
        engine.child.stop()
    assert "VLLM_SSM_CONV_STATE_LAYOUT=DS" in engine.child.log.read_text()


def test_a_layout_that_does_not_fit_is_refused(hybrid: Path, nats_server: NatsServer, tmp_path: Path) -> None:
    spec = replace(spec_of(hybrid, nats_server), environment={"VLLM_SSM_CONV_STATE_LAYOUT": "SD"})
    assert output_of(spec, tmp_path).splitlines()[-1] == (
        "kvbus: bad configuration: VLLM_SSM_CONV_STATE_LAYOUT='SD'; "
        "allowed: DS in the environment, for a model with Mamba layers"
    )
