"""What kustomize makes of the manifests: valid by their schemas, and as the pages say."""

import re
from itertools import product
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # has no types
import pytest

from tests.deploy.manifests import FOLDER, Manifest, container, named, pod_templates, rendered

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
AGENT, HTTP = "kvbus", "kvbus-http"


def every(overlay: str, kind: str) -> list[Manifest]:
    return [one for one in rendered(overlay) if one["kind"] == kind]


@pytest.mark.parametrize(("overlay", "version"), list(product(OVERLAYS, VERSIONS)))
def test_every_object_is_valid_by_its_schema(overlay: str, version: str) -> None:
    for one in rendered(overlay):
        if one["kind"] in FIELDS:
            assert set(one["spec"]) <= FIELDS[one["kind"]]
        else:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_groups_over_several_nodes_are_valid_too(version: str) -> None:
    templates = pod_templates(rendered("overlays/leader-worker-set"))

    assert len(templates) == 4
    for template in templates.values():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, version, strict=True)


def test_kinds_without_a_schema_have_the_fields_of_their_references() -> None:
    (monitor,), (rule,) = (every("overlays/vllm", k) for k in ("PodMonitor", "PrometheusRule"))
    groups = every("overlays/leader-worker-set", "LeaderWorkerSet")

    assert [one["apiVersion"] for one in (monitor, rule)] == 2 * ["monitoring.coreos.com/v1"]
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
def test_agent_and_engine_are_one_user_in_one_folder_and_the_agent_is_there_first(
    overlay: str,
) -> None:
    for template in pod_templates(rendered(overlay)).values():
        agent, engine = container(template, AGENT), container(template, "engine")
        names = [one["name"] for one in template["spec"]["initContainers"]]
        mounts = [
            {m["mountPath"] for m in one["volumeMounts"] if m["name"] == "runtime"}
            for one in (agent, engine)
        ]

        assert names == ["runtime-dir", AGENT]
        assert agent["restartPolicy"] == "Always"
        assert template["spec"]["securityContext"]["runAsUser"] > 0
        assert not {"runAsUser"} & set(agent["securityContext"])
        assert "runAsUser" not in engine.get("securityContext", {})
        assert mounts[0] == mounts[1] != set()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_the_time_that_its_engine_and_the_drain_take(overlay: str) -> None:
    templates = pod_templates(rendered(overlay))
    settings = config_of(overlay)

    for template in templates.values():
        hook = container(template, "engine").get("lifecycle", {}).get("preStop", {})
        waits_s = int(hook["exec"]["command"][-1]) if hook else 0
        needed_s = waits_s + float(settings["KVBUS_DRAIN_TIMEOUT_S"]) + 5

        assert template["spec"]["terminationGracePeriodSeconds"] > needed_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_named_is_there(overlay: str) -> None:
    objects = rendered(overlay)
    made_by_hand = {
        *("kvbus-prefill-key", "kvbus-decode-key", "kvbus-ticket-keys"),
        *("kvbus-http", "kvbus-trusted"),
    }
    configs = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}

    for template in pod_templates(objects).values():
        text = repr(template)
        named_maps = re.findall(r"'configMap\w*': {'(?:key'.*?')?name': '([^']+)'", text)
        secrets = set(re.findall(r"'secretName': '([^']+)'", text))

        assert named_maps
        assert {name for name in named_maps if name not in made_by_hand} <= configs
        assert secrets <= made_by_hand


def test_ports_in_the_config_are_those_of_the_container() -> None:
    settings = config_of("base")
    ports = container(pod_templates(rendered("base"))["prefill"], AGENT)["ports"]

    found = {one["name"]: one["containerPort"] for one in ports}

    for name, variable in (("peer", "KVBUS_PEER_BIND"), ("events", "KVBUS_EVENTS_BIND")):
        assert settings[variable].endswith(f"$(POD_IP):{found[name]}")
    assert settings["KVBUS_HTTP_BIND"] == f"0.0.0.0:{found[HTTP]}"


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
    template = pod_templates(rendered("overlays/vllm"))["prefill"]
    policies = every("overlays/vllm", "NetworkPolicy")

    reached = {
        port
        for port in (7701, 7702, 7703, 8000, UCX_PORT)
        if admits(policies, template, who, namespace=namespace, port=port)
    }

    assert reached == ports


def admits(
    policies: list[Manifest], to: Manifest, who: dict[str, str], *, namespace: str, port: int
) -> bool:
    """Whether some policy lets a pod with these labels to a port; that is how they add up."""
    numbers = {
        p["name"]: p["containerPort"]
        for one in to["spec"]["initContainers"] + to["spec"]["containers"]
        for p in one.get("ports", [])
    }
    about = [one["spec"] for one in policies if chosen(one["spec"]["podSelector"], to["metadata"])]
    assert about, "nobody fences this pod"
    rules = [rule for one in about for rule in one.get("ingress", [])]
    return any(
        any(comes_from(one, who, namespace) for one in rule["from"])
        and any(
            numbers.get(one["port"], one["port"]) == port
            for one in rule.get("ports", [{"port": port}])
        )
        for rule in rules
    )


def comes_from(peer: dict[str, Any], who: dict[str, str], namespace: str) -> bool:
    """Whether a peer of a rule is that pod; without a namespace it is of the policy's own."""
    inside = {"labels": {"kubernetes.io/metadata.name": namespace}}
    here = (
        chosen(peer["namespaceSelector"], inside)
        if "namespaceSelector" in peer
        else (namespace == "kvbus")
    )
    return here and chosen(peer.get("podSelector", {}), {"labels": who})


def chosen(selector: dict[str, Any], metadata: dict[str, Any]) -> bool:
    assert set(selector) <= {"matchLabels"}
    wanted: dict[str, str] = selector.get("matchLabels", {})
    labels: dict[str, str] = metadata["labels"]
    return wanted.items() <= labels.items()


def config_of(overlay: str) -> dict[str, str]:
    """The variables that all agents get."""
    (found,) = (
        one["data"]
        for one in every(overlay, "ConfigMap")
        if re.fullmatch(r"kvbus-[a-z0-9]{10}", one["metadata"]["name"])
    )
    return dict(found)


def test_the_dashboard_is_in_its_map() -> None:
    board = named(rendered("overlays/vllm"), "ConfigMap", "kvbus-board")

    assert board["data"]["board.json"] == (
        FOLDER / "components" / "monitoring" / "board.json"
    ).read_text("utf-8")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
