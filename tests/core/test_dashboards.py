"""The dashboard and the alerts ask for what the product measures: each metric, each label, nothing invented."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kvbus_connector.board import METRICS, TIMES

from kvbus.protocol import Membership
from kvbus.router.metrics import Meters
from kvbus.trace import MarkName, Outcome, Path, StageName
from kvbus.trace.path import Mark, Stage
from kvbus.wire import Heartbeat, Role, State

ROOT = pathlib.Path(__file__).parents[2]
TRACES = ROOT / "traces"
DASHBOARDS = sorted((TRACES / "grafana").glob("*.json"))
ALERTS = TRACES / "prometheus" / "alerts.yml"
CONFIG = TRACES / "prometheus" / "prometheus.yml"
FIRED = pathlib.Path(__file__).with_name("alerts_test.yml")
YAML = sorted(TRACES.rglob("*.yml"))

SCRAPED = {"job", "instance"}
VLLM = {"model_name", "engine"}
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"}
LISTS = re.compile(r"\b(by|without|on|ignoring)\s*\(([^()]*)\)")
SELECTOR = re.compile(r"\{([^{}]*)\}")
NAME = re.compile(r"(?<![\w:.$])[A-Za-z_:][\w:]*(?!\s*\()(?![\w:])")


def _series() -> dict[str, set[str]]:
    """Each time series that the product has, and its labels."""
    kinds = {f"vllm:kvbus_{name}": ("counter", VLLM | ({label} - {""})) for name, (_, label) in METRICS.items()}
    kinds |= {f"vllm:kvbus_{name}": ("histogram", VLLM | ({label} - {""})) for name, (_, label) in TIMES.items()}
    members = Membership()
    members.hear(Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1), 0.0)
    meters = Meters(members)
    end = 10
    stage = Stage(StageName.ROUTE, 0, end, Mark(MarkName.FIRST_TOKEN, end))
    meters.path(Path((stage,), 0, end, end, Outcome.PUSHED))
    meters.http("/v1/completions", "POST", 200, "m")
    for family in meters.registry.collect():
        if family.name.startswith(("process_", "python_")) or family.name.endswith("_build_info"):
            continue  # every Prometheus client's own
        kinds[family.name] = (family.type, {label for each in family.samples for label in each.labels} - {"le"})
    found = {"up": SCRAPED}
    for name, (kind, labels) in kinds.items():
        match kind:
            case "counter":
                found[f"{name}_total"] = labels | SCRAPED
            case "histogram":
                found |= {f"{name}_{part}": labels | SCRAPED for part in ("sum", "count")}
                found[f"{name}_bucket"] = labels | SCRAPED | {"le"}
            case _:
                found[name] = labels | SCRAPED
    return found


SERIES = _series()


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    """Where it stands, and PromQL, with Grafana's variables filled in."""
    found = [(rule["alert"], rule["expr"]) for rule in alerts()]
    for path in DASHBOARDS:
        for panel in panels(json.loads(path.read_text())):
            for target in panel.get("targets", []):
                expr = target["expr"].replace("$__rate_interval", "5m").replace("$model_name", ".*")
                found.append((f"{path.stem}: {panel['title']} {target['refId']}", expr))
    return found


def asked(expr: str) -> tuple[set[str], set[str]]:
    """The series and the labels that it names."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
    labels = {label.strip() for _, inside in LISTS.findall(bare) for label in inside.split(",")}
    labels |= {re.split(r"[=!]", each)[0].strip() for inside in SELECTOR.findall(bare) for each in inside.split(",")}
    rest = re.sub(r"\[[^\]]*\]", "", SELECTOR.sub("", LISTS.sub("", bare)))
    return {name for name in NAME.findall(rest) if name not in WORDS}, labels


def closed(expr: str) -> bool:
    opened = []
    for sign in re.sub(r'"(?:[^"\\]|\\.)*"', "", expr):
        if sign in "([{":
            opened.append(sign)
        elif sign in ")]}" and (not opened or opened.pop() + sign not in ("()", "[]", "{}")):
            return False
    return not opened


def test_what_is_asked_is_found() -> None:
    """The test's own reading of PromQL."""
    expr = 'sum by (le, side) (rate(vllm:x_bucket{a=~"b|c, d)", e!="f"}[5m])) / on (job) up > 0.5 and scalar(y) * 1e3'
    assert asked(expr) == ({"vllm:x_bucket", "up", "y"}, {"le", "side", "a", "e", "job"})
    assert closed(expr)
    assert not closed("sum(rate(x[5m)])")
    assert not closed("sum(x")


@pytest.mark.parametrize(("where", "expr"), expressions(), ids=[where for where, _ in expressions()])
def test_what_is_asked_for_is_measured(where: str, expr: str) -> None:
    names, labels = asked(expr)
    assert names
    assert names - set(SERIES) == set()
    assert labels - set().union(*(SERIES[name] for name in names)) == set()
    assert closed(expr)


def test_selectors_use_their_own_metrics_labels() -> None:
    for where, expr in expressions():
        for name, inside in re.findall(r"([A-Za-z_:][\w:]*)\{([^{}]*)\}", expr):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", inside))
            assert labels <= SERIES[name], f"{where}: {name}"


def test_everything_that_is_measured_is_shown() -> None:
    shown = {name for where, expr in expressions() if ": " in where for name in asked(expr)[0]}
    for name in SERIES.keys() - {"up"}:
        whole = re.sub(r"_(bucket|sum|count)$", "", name)
        assert shown & {name, *(f"{whole}_{part}" for part in ("bucket", "sum", "count"))}, name


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_can_be_read(path: pathlib.Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["uid"]
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    asked_for = re.match(r"label_values\((.+), (\w+)\)", variables["model_name"]["query"]["query"])
    assert asked_for
    assert asked_for[2] in SERIES[asked_for[1]]
    every = list(panels(dashboard))
    assert len({panel["id"] for panel in every}) == len(every)
    titles = [panel["title"] for panel in every]
    assert all(titles)
    assert len(set(titles)) == len(titles)
    for panel in every:
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            for label in re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]):
                assert label in asked(target["expr"])[1], f"{panel['title']}: the legend's {label}"
            if "vllm:" in target["expr"]:
                metrics = re.findall(r"vllm:\w+(\{[^}]*)?", target["expr"])
                assert all('model_name=~"$model_name"' in selector for selector in metrics), panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_do_not_overlap(path: pathlib.Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(json.loads(path.read_text())):
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    told = rule["annotations"]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert told["summary"].endswith(".")
    assert len(told["description"]) > len(told["summary"])
    cases = set(re.findall(r"^\| ([A-Z0-9, ]+) \|", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE))
    known = {case for each in cases for case in each.split(", ")}
    assert set(told["cases"].split(", ")) <= known if "cases" in told else rule["alert"] == "KVBusRouterDown"
    named = set(re.findall(r"\$labels\.(\w+)", told["summary"] + told["description"]))
    assert named <= asked(rule["expr"])[1] | (SCRAPED if "sum" not in rule["expr"] else set())


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert all(name.startswith("KVBus") for name in names)


def test_each_alert_is_seen_to_fire() -> None:
    seen = set(re.findall(r'alertname="(\w+)"', FIRED.read_text()))
    assert seen == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(TRACES)))
def test_yaml_can_be_read(path: pathlib.Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_jobs_are_those_that_alerts_ask_for() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    jobs = {each["job_name"] for each in config["scrape_configs"]}
    assert config["rule_files"] == [ALERTS.name]
    assert set(re.findall(r'job="([^"]*)"', ALERTS.read_text())) <= jobs
    assert jobs == {"kvbus-router", "kvbus-prefill", "kvbus-decode"}
    for each in config["scrape_configs"]:
        if each["job_name"] != "kvbus-router":
            [renamed] = each["metric_relabel_configs"]
            new = renamed["replacement"].replace("$1", r"\1")
            assert re.sub(renamed["regex"], new, "vllm_kvbus_errors_total") == "vllm:kvbus_errors_total"


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool on the PATH (`apt-get install prometheus`, or any Prometheus)"
)
class TestPromtool:
    def check(self, *arguments: str | Path) -> None:
        done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_configuration(self) -> None:
        self.check("check", "config", CONFIG)

    def test_alerts_fire_when_they_shall_and_only_then(self) -> None:
        self.check("test", "rules", FIRED)

    def test_every_expression(self, tmp_path: pathlib.Path) -> None:
        rules = [{"record": f"test:r{number}", "expr": expr} for number, (_, expr) in enumerate(expressions())]
        path = tmp_path / "rules.yml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
        self.check("check", "rules", path)
