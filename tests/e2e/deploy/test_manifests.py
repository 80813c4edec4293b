"""What kustomize makes of the manifests: valid by their schemas, and as the pages say."""

import re
from itertools import product
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # has no types
import pytest

from tests.e2e.deploy.manifests import FOLDER, Manifest, container, named, pod_templates, rendered

OVERLAYS = ["base", "overlays/vllm", "overlays/leader-worker-set", "overlays/one-node"]
VERSIONS = ["1.29", "1.37"]
"""The first Kubernetes with native sidecars by default, and the newest whose schemas there are."""
# Fields of kinds that have no schema here, from the API references of their projects
# (prometheus-operator.dev/docs/api-reference/api, lws.sigs.k8s.io/docs/reference).
FIELDS = {
    "PodMonitor": {"selector", "podMetricsEndpoints"},
    "PrometheusRule": {"groups"},
    "LeaderWorkerSet": {"replicas", "leaderWorkerTemplate"},
}
ENDPOINT_FIELDS = {"port", "path", "interval", "authorization"}
RULE_FIELDS = {"alert", "expr", "for", "labels", "annotations"}
GROUP_FIELDS = {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
SECRETS = {f"kvbus-{what}" for what in ("prefill-key", "decode-key", "ticket-keys", "http")}
"""They, and kvbus-trusted, are made by hand."""
AGENT = "kvbus"


def every(overlay: str, kind: str) -> list[Manifest]:
    return [one for one in rendered(overlay) if one["kind"] == kind]


def config_of(overlay: str) -> dict[str, str]:
    """The variables that all agents get."""
    maps = {one["metadata"]["name"]: one["data"] for one in every(overlay, "ConfigMap")}
    (found,) = (data for name, data in maps.items() if re.fullmatch(r"kvbus-[a-z0-9]{10}", name))
    return dict(found)


@pytest.mark.parametrize(("overlay", "version"), list(product(OVERLAYS, VERSIONS)))
def test_every_object_is_valid_by_its_schema(overlay: str, version: str) -> None:
    objects = rendered(overlay)
    known = [one for one in objects if one["kind"] not in FIELDS]
    pods = [{"apiVersion": "v1", "kind": "Pod", **one} for one in pod_templates(objects).values()]

    assert pods
    for one in (*known, *pods):
        kubernetes_validate.validate(one, version, strict=True)


def test_kinds_without_schema_have_fields_of_their_references() -> None:
    (monitor,), (rule,) = (every("overlays/vllm", k) for k in ("PodMonitor", "PrometheusRule"))
    groups = every("overlays/leader-worker-set", "LeaderWorkerSet")

    assert [one["apiVersion"] for one in (monitor, rule)] == 2 * ["monitoring.coreos.com/v1"]
    assert all(set(one["spec"]) <= FIELDS[one["kind"]] for one in (monitor, rule, *groups))
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert set(endpoint) <= ENDPOINT_FIELDS
        assert set(endpoint["authorization"]["credentials"]) == {"name", "key"}
    for one in rule["spec"]["groups"][0]["rules"]:
        assert set(one) <= RULE_FIELDS
    assert [one["metadata"]["name"] for one in groups] == ["decode", "prefill"]
    for one in groups:
        assert one["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert set(one["spec"]["leaderWorkerTemplate"]) == GROUP_FIELDS


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_has_agent_first_same_user_drain_time_and_named_maps(
    overlay: str,
) -> None:
    drain_s = float(config_of(overlay)["KVBUS_DRAIN_TIMEOUT_S"])
    made = {"kvbus-trusted", *(one["metadata"]["name"] for one in every(overlay, "ConfigMap"))}
    for template in pod_templates(rendered(overlay)).values():
        agent, engine = container(template, AGENT), container(template, "engine")
        spec, text = template["spec"], repr(template)
        runtime, of_engine = (
            {m["mountPath"] for m in one["volumeMounts"] if m["name"] == "runtime"}
            for one in (agent, engine)
        )
        hook = engine.get("lifecycle", {}).get("preStop", {})
        waits_s = int(hook["exec"]["command"][-1]) if hook else 0
        maps = re.findall(r"'configMap\w*': {'(?:key'.*?')?name': '([^']+)'", text)

        assert [one["name"] for one in spec["initContainers"]] == ["runtime-dir", AGENT]
        assert agent["restartPolicy"] == "Always"
        assert spec["securityContext"]["runAsUser"] > 0
        assert "runAsUser" not in {*agent["securityContext"], *engine.get("securityContext", {})}
        assert runtime == of_engine != set()
        assert spec["terminationGracePeriodSeconds"] > waits_s + drain_s + 5
        assert set() < set(maps) <= made
        assert set(re.findall(r"'secretName': '([^']+)'", text)) <= SECRETS


def test_ports_in_the_config_are_those_of_the_container() -> None:
    agent = container(pod_templates(rendered("base"))["prefill"], AGENT)
    settings = {one["name"]: one.get("value") for one in agent["env"]} | config_of("base")

    found = {one["name"]: one["containerPort"] for one in agent["ports"]}

    for name, variable in (("peer", "KVBUS_PEER_BIND"), ("events", "KVBUS_EVENTS_BIND")):
        assert settings[variable].endswith(f"$(POD_IP):{found[name]}")
    assert settings["KVBUS_HTTP_BIND"] == f"0.0.0.0:{found['kvbus-http']}"


UCX_PORT = 45_678
"""Any port that nobody has named."""
AGENTS = {"app.kubernetes.io/part-of": "kvbus", "app.kubernetes.io/name": "kvbus-decode"}
CLIENT, STRANGER = {"kvbus-client": "true"}, {"app": "web"}


@pytest.mark.parametrize(
    ("who", "namespace", "ports"),
    [
        (AGENTS, "kvbus", {7701, 7702, 7703, 8000, UCX_PORT}),
        (CLIENT, "kvbus", {7701, 7702, 8000}),
        (CLIENT, "elsewhere", set()),
        (STRANGER, "kvbus", set()),
        (AGENTS, "elsewhere", set()),
        ({"app": "prometheus"}, "monitoring", {7703}),
    ],
    ids=["agent", "client", "client elsewhere", "stranger", "another's agent", "prometheus"],
)
def test_the_fence_lets_each_to_what_it_needs(
    who: dict[str, str], namespace: str, ports: set[int]
) -> None:
    pod = pod_templates(rendered("overlays/vllm"))["prefill"]
    specs = [one["spec"] for one in every("overlays/vllm", "NetworkPolicy")]
    about = [spec for spec in specs if chosen(spec["podSelector"], pod["metadata"]["labels"])]
    numbers = {
        port["name"]: port["containerPort"]
        for one in pod["spec"]["initContainers"] + pod["spec"]["containers"]
        for port in one.get("ports", [])
    }

    reached = set()
    for rule in (rule for spec in about for rule in spec.get("ingress", [])):
        if any(comes_from(peer, who, namespace) for peer in rule["from"]):
            named_ports = [one["port"] for one in rule.get("ports", [])]
            reached |= {numbers.get(one, one) for one in named_ports or {*numbers, UCX_PORT}}

    assert about, "nobody fences this pod"
    assert reached == ports


def comes_from(peer: dict[str, Any], who: dict[str, str], namespace: str) -> bool:
    """Whether a peer of a rule is that pod; without a namespace it is of the policy's own."""
    here = namespace == "kvbus"
    if "namespaceSelector" in peer:
        here = chosen(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    return here and chosen(peer.get("podSelector", {}), who)


def chosen(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def test_the_dashboard_is_in_its_map() -> None:
    board = named(rendered("overlays/vllm"), "ConfigMap", "kvbus-board")

    source = FOLDER / "components" / "monitoring" / "board.json"
    assert board["data"]["board.json"] == source.read_text("utf-8")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
