"""A real Prometheus scrapes the server, and evaluates every query of the dashboard and the
alerts."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.tools import (
    CONFIG,
    RULES,
    SELECTOR,
    complaints,
    panel_queries,
    program,
    rule_queries,
)
from tests.e2e.asking import EVENT_S, ask, count, job, tick
from tiered_kv.bench.restore import texts
from tiered_kv.bench.servers.vllm_server import VllmServer

pytestmark = pytest.mark.e2e

LISTENING = re.compile(r'"Listening on".* address=(127\.0\.0\.1:\d+)')


@pytest.fixture(scope="module")
def prometheus(
    server: VllmServer, client: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A Prometheus that has scraped the server at least three times, after two turns of a job."""
    context = texts(client, 1, 400)[0][:300]
    answer = ask(client, context, **job("scraped"))["choices"][0]["token_ids"]
    ask(client, context + answer + [7] * 40, **job("scraped", last=True))
    tick(client)
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with running(folder) as url, httpx.Client(base_url=url, timeout=EVENT_S) as found:
        wait_for(found, "count_over_time(vllm:tiered_kv_turns_total[5m]) >= 3")
        yield found


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Run Prometheus with the configuration in this folder. Yields its address."""
    log = folder / "log"
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + EVENT_S
        while (found := LISTENING.search(log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        url = f"http://{found[1]}"
        while httpx.get(f"{url}/-/ready", timeout=EVENT_S).status_code != httpx.codes.OK:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(EVENT_S)


def asked(prometheus: httpx.Client, query: str) -> list[dict[str, Any]]:
    """Return the series that a query currently returns."""
    answer = prometheus.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    assert not answer.get("warnings")
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def wait_for(prometheus: httpx.Client, query: str) -> None:
    deadline = time.monotonic() + EVENT_S
    while not asked(prometheus, query):
        assert time.monotonic() < deadline, f"nothing answers {query}"
        time.sleep(0.1)


@pytest.mark.parametrize(("title", "query"), [*panel_queries(), *rule_queries()])
def test_every_query_names_metrics_of_the_server(
    prometheus: httpx.Client, title: str, query: str
) -> None:
    asked(prometheus, query)
    for found in SELECTOR.finditer(query):
        assert asked(prometheus, f"count({found[0]})"), f"{title}: there is no {found[0]}"


def test_alerts_are_evaluated_and_none_is_critical(prometheus: httpx.Client) -> None:
    deadline = time.monotonic() + EVENT_S
    while True:
        groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        rules = {one["name"]: one for group in groups for one in group["rules"]}
        assert rules.keys() == {name for name, _ in rule_queries()}
        if all(one["health"] == "ok" for one in rules.values()):
            break
        assert time.monotonic() < deadline, rules
        time.sleep(0.1)
    assert rules["TieredKVHookFailed"]["state"] == "inactive"


def test_prometheus_has_what_the_server_counted(
    prometheus: httpx.Client, client: httpx.Client
) -> None:
    turns = count(client, "turns")
    assert turns >= 2
    wait_for(prometheus, f"vllm:tiered_kv_turns_total >= {turns}")
    (prompts,) = asked(prometheus, "sum(vllm:tiered_kv_prompt_tokens_total)")
    names = ("prompt_tokens_vram", "prompt_tokens_cpu", "prompt_tokens_recomputed")
    assert float(prompts["value"][1]) == sum(count(client, name) for name in names)


def test_promtool_accepts_a_scrape(server: VllmServer) -> None:
    assert complaints(server.metrics_text()) == []
