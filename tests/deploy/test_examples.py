"""Files in ``examples/``, as interpreted by Compose, Kubernetes and a shell."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.deploy.example_files import (
    COMPOSE,
    EXAMPLES,
    Started,
    calls_of_script,
    compose,
    compose_server,
    kubernetes,
    kubernetes_pod,
    kubernetes_server,
)
from tests.deploy.test_unit import END_S
from tiered_kv.config import ADMIN_TOKEN, GIB


def option(server: Started, name: str) -> str:
    """Return the value of an option of the server."""
    (found,) = [word for word in server.words if word.startswith(f"{name}=")]
    return found.partition("=")[2]


def test_compose_adds_a_server_to_prometheus_and_grafana() -> None:
    found = compose()
    (included,) = found["include"]
    others = yaml.safe_load((COMPOSE.parent / included).read_text())["services"]
    assert set(others) == {"prometheus", "grafana"}
    service = found["services"]["vllm"]
    context = (COMPOSE.parent / service["build"]["context"]).resolve()
    assert (context / service["build"]["dockerfile"]).is_file()
    server = compose_server()
    assert option(server, "--host") == "127.0.0.1"
    assert option(server, "--port") == "8000", "what Prometheus scrapes"
    mounted = {one.rpartition("/")[2].partition(":")[0] for one in service["volumes"]}
    assert mounted == {"models", "pages"}
    assert server.words[0].startswith("/models/")
    stop_s = int(service["stop_grace_period"].removesuffix("s"))
    assert stop_s >= int(option(server, "--shutdown-timeout")) + END_S


def test_objects_of_kubernetes_name_each_other() -> None:
    found = kubernetes()
    stateful = found["StatefulSet", "tiered-kv"]["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    assert stateful["selector"]["matchLabels"] == labels
    for name in ("tiered-kv", "tiered-kv-pods"):
        assert found["Service", name]["spec"]["selector"] == labels
    assert ("Service", stateful["serviceName"]) in found
    assert found["Service", stateful["serviceName"]]["spec"]["clusterIP"] == "None"
    pod = kubernetes_pod()
    (container,) = pod["containers"]
    volumes = {one["name"] for one in pod["volumes"]}
    volumes |= {one["metadata"]["name"] for one in stateful["volumeClaimTemplates"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    (port,) = container["ports"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert option(kubernetes_server(), "--port") == str(port["containerPort"])


def gib(quantity: str) -> float:
    """Convert a Kubernetes quantity to GiB."""
    return int(quantity.removesuffix("Gi"))


def test_a_pod_has_the_resources_that_its_settings_need() -> None:
    pod, server = kubernetes_pod(), kubernetes_server()
    (container,) = pod["containers"]
    settings, memory = server.settings, container["resources"]["limits"]["memory"]
    shm = next(one for one in pod["volumes"] if one["name"] == "shm")["emptyDir"]["sizeLimit"]
    assert gib(memory) > float(settings["TIERED_KV_CPU_GIB"]) + gib(shm)
    (claim,) = kubernetes()["StatefulSet", "tiered-kv"]["spec"]["volumeClaimTemplates"]
    storage = gib(claim["spec"]["resources"]["requests"]["storage"])
    assert storage * GIB > float(settings["TIERED_KV_SSD_GIB"]) * GIB
    stop_s = int(option(server, "--shutdown-timeout"))
    assert pod["terminationGracePeriodSeconds"] >= stop_s + END_S
    assert pod["securityContext"]["runAsNonRoot"]
    secret = next(one for one in container["env"] if one["name"] == ADMIN_TOKEN)
    assert "value" not in secret, "the token is in no file"


def test_the_script_starts_two_engines_a_store_and_a_router() -> None:
    calls = calls_of_script()
    by_name: dict[str, list[dict[str, Any]]] = {}
    for one in calls:
        by_name.setdefault(one["program"], []).append(one)
    assert {name: len(found) for name, found in by_name.items()} == {
        "vllm": 2,
        "valkey-server": 1,
        "vllm-router": 1,
    }
    engines, (router,) = by_name["vllm"], by_name["vllm-router"]
    assert {one["env"]["CUDA_VISIBLE_DEVICES"] for one in engines} == {"0", "1"}
    ports = {one["words"][one["words"].index("--port") + 1] for one in engines}
    workers = router["words"][router["words"].index("--worker-urls") + 1 :]
    assert {url.rpartition(":")[2] for url in workers} == ports
    (store,) = by_name["valkey-server"]
    port = store["words"][store["words"].index("--port") + 1]
    assert {one["env"]["TIERED_KV_REMOTE"] for one in engines} == {f"valkey://127.0.0.1:{port}"}


READERS: dict[str, Callable[[str], object]] = {
    "python": ast.parse,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}


@pytest.mark.parametrize("language", READERS)
def test_settings_in_the_recipes_can_be_read(language: str) -> None:
    page = (EXAMPLES / "README.md").read_text()
    found = re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert found
    for text in found:
        READERS[language](text)


def test_every_example_is_in_the_list() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.is_file() and path.name != "README.md":
            assert f"]({path.name})" in page
