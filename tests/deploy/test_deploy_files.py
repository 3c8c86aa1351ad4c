"""Files in ``deploy/``: promtool tests the alerts, and Prometheus and Grafana listen on loopback
only."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.deploy.tools import (
    COMPOSE,
    CONFIG,
    DEPLOY,
    RULES,
    SELECTOR,
    dashboard,
    panel_queries,
    promtool,
    rule_queries,
)
from tiered_kv.metric_families import FAMILIES, PREFIX

QUERIES = (*panel_queries(), *rule_queries())


def test_promtool_accepts_rules_and_configuration() -> None:
    said = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert f"SUCCESS: {len([*rule_queries()])} rules found" in said
    assert "is valid prometheus config" in promtool("check", "config", CONFIG)


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    tests = yaml.safe_load((DEPLOY / "rules_test.yml").read_text())["tests"]
    told = [one for test in tests for one in test["alert_rule_test"]]
    come = {one["alertname"] for one in told if one["exp_alerts"]}
    assert come == {name for name, _ in rule_queries()}, "an alert that no test has seen"
    said = promtool("test", "rules", DEPLOY / "rules_test.yml")
    assert "SUCCESS" in said
    assert "FAILED" not in said


def test_every_alert_has_a_severity_and_says_what_to_do() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert rule["annotations"]["description"].endswith(".")
            assert "$labels.instance" in rule["annotations"]["summary"]


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_queries_name_existing_metrics_and_labels(title: str, query: str) -> None:
    assert "$" not in query, "a variable that Grafana does not know"
    assert SELECTOR.search(query)
    for found in SELECTOR.finditer(query):
        if not found["name"].startswith(PREFIX):
            continue  # one of vLLM's own metrics
        name = re.sub(r"_(total|bucket|count|sum)$", "", found["name"].removeprefix(PREFIX))
        assert name in FAMILIES, title
        for label, how, value in re.findall(r'(\w+)(=~?)"([^"]*)"', found["matchers"] or ""):
            if label in ("instance", "engine", "le"):
                continue
            values = FAMILIES[name].labels[label]
            assert [
                one
                for one in values
                if re.fullmatch(value if how == "=~" else re.escape(value), one)
            ]


def test_every_kind_of_fault_raises_an_alert() -> None:
    """A fault without an alert would be seen only by those who look for it."""
    watched = {
        kind
        for _, query in rule_queries()
        for pattern in re.findall(r'faults_total\{kind=~?"([^"]*)"', query)
        for kind in FAMILIES["faults"].labels["kind"]
        if re.fullmatch(pattern, kind)
    }
    assert watched == {*FAMILIES["faults"].labels["kind"]}


def test_the_dashboard_shows_every_part() -> None:
    shown = {
        found["name"].removeprefix(PREFIX)
        for _, query in panel_queries()
        for found in SELECTOR.finditer(query)
    }
    assert shown >= {
        "prompt_tokens_total",
        "tier_bytes",
        "pins_ended_total",
        "decisions_total",
        "forecast_error_ratio_bucket",
        "promoted_bytes_total",
        "held_jobs",
        "faults_total",
        "tier_uncompressed_bytes",
        "transferred_bytes_total",
        "vllm:time_to_first_token_seconds_bucket",
    }


def test_panels_lie_side_by_side() -> None:
    taken: dict[tuple[int, int], str] = {}
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in ((at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])):
            assert taken.setdefault(cell, panel["title"]) == panel["title"]


def test_prometheus_and_grafana_are_for_this_machine_alone() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    prometheus, grafana = compose["services"]["prometheus"], compose["services"]["grafana"]
    assert "--web.listen-address=127.0.0.1:9090" in prometheus["command"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    for service in (prometheus, grafana):
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a version that stays"
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_file()
        for config in service.get("configs", ()):
            yaml.safe_load(compose["configs"][config["source"]]["content"])
    (scraped,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    source = yaml.safe_load(compose["configs"]["datasource"]["content"])["datasources"][0]
    assert source["url"] == "http://127.0.0.1:9090"
    provider = yaml.safe_load(compose["configs"]["dashboards"]["content"])["providers"][0]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(f"{provider['options']['path']}/")
    assert any(volume.split(":")[1] == home for volume in grafana["volumes"])
