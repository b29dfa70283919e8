"""The containers without a container: compose, Dockerfile and mounted files fit the product and each other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvbus.cli import app

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
TEXT = (DOCKER / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
README = (DOCKER / "README.md").read_text()
VARIABLE = re.compile(r"\$\{(\w+)(:?-([^}]*))?\}")
OURS = ["model", "prefill", "decode", "router"]


def filled(text: str) -> str:
    """With every variable's default in its place."""
    return VARIABLE.sub(lambda match: match[3] or "", text)


def command_of(service: str) -> list[str]:
    return [filled(str(word)) for word in SERVICES[service]["command"]]


def test_every_variable_has_a_default_and_is_in_the_readme() -> None:
    found = {match[1] for match in VARIABLE.finditer(TEXT)}
    assert found
    for match in VARIABLE.finditer(TEXT):
        assert match[2] is not None, f"{match[0]} has no default"
    documented = set(re.findall(r"`([A-Z][A-Z_]+)`", README))
    assert found <= documented
    assert documented - found <= {"COMPOSE_PROFILES", "BASE", "EXTRA"} | {"UCX_TLS"}


@pytest.mark.parametrize("service", OURS)
def test_every_flag_exists(service: str) -> None:
    """The command line of each service is one that the product parses."""
    name, *arguments = command_of(service)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    environment = SERVICES[service]["environment"]
    by_variable = {each.envvar: each.opts[0] for each in command.params if getattr(each, "envvar", None)}
    given = [
        word for key, flag in by_variable.items() if key in environment for word in (flag, filled(environment[key]))
    ]
    context = command.make_context(name, [*given, *arguments])
    if service in ("prefill", "decode"):
        assert context.params["role"] == service
        assert str(context.params["model"]) == "/models/SmolLM2-135M-Instruct"
        assert context.args == ["--max-model-len", "2048"]
    if service != "model":
        assert context.params["nats_url"] == "nats://nats:4222"


def test_every_environment_variable_is_somebodys() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "kvbus").rglob("*.py"))
    foreign = {"VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "UCX_TLS", "HF_HUB_OFFLINE"}
    foreign |= {"VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"}
    for service in OURS:
        for key in SERVICES[service]["environment"]:
            assert key in foreign or key in source, f"{service}: nobody reads {key}"
    assert "OTEL_EXPORTER_OTLP_{part}ENDPOINT" in source


def test_images_are_pinned_and_ports_are_on_this_host_only() -> None:
    for name, service in SERVICES.items():
        image = filled(service["image"])
        assert name in OURS or re.search(r":v?\d+\.\d+\.\d+", image), f"{name}: {image}"
        for port in service.get("ports", []):
            assert filled(port).startswith("127.0.0.1:")
    for name in ("prefill", "decode"):
        assert "ports" not in SERVICES[name], "it could not be scaled"
        assert "container_name" not in SERVICES[name]
        assert "hostname" not in SERVICES[name]


def test_what_is_mounted_exists_and_is_read_only() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            if source.startswith("."):
                assert (DOCKER / source).exists(), source
                assert mode == ["ro"], volume
            else:
                assert source in COMPOSE["volumes"]
            assert target.startswith("/")


def test_names_and_ports_agree_with_what_watches_them() -> None:
    prometheus = yaml.safe_load((ROOT / "traces" / "prometheus" / "prometheus.yml").read_text())
    for job in prometheus["scrape_configs"]:
        for target in job.get("static_configs", []):
            for address in target["targets"]:
                host, port = address.split(":")
                assert host in SERVICES
                assert port == "8000"
        for found in job.get("dns_sd_configs", []):
            assert set(found["names"]) <= SERVICES.keys()
            assert found["port"] == 8000
    [source] = yaml.safe_load((ROOT / "traces/grafana/provisioning/datasources/kvbus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((ROOT / "traces/grafana/provisioning/dashboards/kvbus.yml").read_text())["providers"]
    folder = provider["options"]["path"]
    assert any(volume.split(":")[1].startswith(folder + "/") for volume in SERVICES["grafana"]["volumes"])
    assert "jaeger" in SERVICES
    assert "OTLP_ENDPOINT=http://jaeger:4317" in (DOCKER / ".env").read_text()
    conf = (DOCKER / "nats.conf").read_text()
    assert "port: 4222" in conf
    assert "http: 8222" in conf


def test_stopping_leaves_time_to_drain() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    drain_s = next(each.default for each in commands["engine"].params if each.name == "drain_s")
    grace_s = next(each.default for each in commands["router"].params if each.name == "grace_s")
    for name, longest_s in (("prefill", drain_s), ("decode", drain_s), ("router", grace_s)):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= longest_s + 15
        assert SERVICES[name]["init"] is True


def test_the_dockerfile_is_sound() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    named = {stage.split()[2]: stage for stage in stages}
    assert set(named) == {"base", "router", "engine"}
    assert {SERVICES[name]["build"]["target"] for name in OURS} <= named.keys()
    assert "HEALTHCHECK" in named["base"]
    for name in ("router", "engine"):
        assert re.search(r"^USER kvbus$", named[name], re.M), f"{name} runs as root"
        after_user = named[name].partition("USER kvbus")[2]
        assert "RUN" not in after_user
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source.partition('/')[0]}" in ignored, f"{source} is not in the build's context"
    assert not re.search(r"(?i)password|secret|token|api[_-]?key", DOCKERFILE)
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.M))
    assert {key for name in OURS for key in SERVICES[name]["build"]["args"]} <= arguments
