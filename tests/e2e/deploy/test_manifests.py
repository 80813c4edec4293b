"""The manifests as `kubectl kustomize` renders them: valid by their schemas, and as pages say.

Variables and options in them are read by what reads them in a pod. The page's commands run, too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # has no types
import pytest
import yaml  # type: ignore[import-untyped]  # no stubs among the dev dependencies

from kvbus.agent.config import AgentConfig, load_config
from kvbus.integrations.vllm.params import read_options
from kvbus_decode.config import DecodeConfig
from kvbus_prefill.config import PrefillConfig

ROOT = Path(__file__).parents[3]
FOLDER, PAGE = ROOT / "deploy" / "kubernetes", ROOT / "docs" / "kubernetes.md"
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
ENDPOINT_FIELDS = {"port", "path", "interval", "authorization", "relabelings"}
RULE_FIELDS = {"alert", "expr", "for", "labels", "annotations"}
GROUP_FIELDS = {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
AGENT, NAME, ADDRESS = "kvbus", "pod-0", "10.0.0.7"
CONFIGS: dict[str, type[AgentConfig]] = {
    "kvbus-prefill": PrefillConfig,
    "kvbus-decode": DecodeConfig,
}
KUBECTL_OFFLINE = """
kubectl() {
    case $1 in
        create) command kubectl "$@" ;;
        apply) { cat; echo ---; } >> applied ;;
        config|rollout) ;;
        *) return 1 ;;
    esac
}
"""
"""Appends the objects to the file `applied`."""
Manifest = dict[str, Any]


def kubectl(*arguments: str) -> str:
    """Its output; skips the test where it is missing, or its kustomize is too old."""
    found = shutil.which("kubectl")
    version = ["version", "--client", "--output=json"]
    told = subprocess.run([found, *version], capture_output=True, check=False) if found else None
    has = re.search(rb'"kustomizeVersion": "v(\d+)', told.stdout) if told else None
    if has is None or int(has[1]) < 5:
        pytest.skip(f"needs kubectl 1.27 or later, with kustomize 5; there is {found} {has}")
    ended = subprocess.run([str(found), *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    return objects_of(kubectl("kustomize", str(FOLDER / name)))


def objects_of(text: str) -> tuple[Manifest, ...]:
    return tuple(one for one in yaml.safe_load_all(text) if one)


def every(overlay: str, kind: str) -> list[Manifest]:
    return [one for one in rendered(overlay) if one["kind"] == kind]


def pod_templates(overlay: str) -> dict[str, Manifest]:
    """The pod templates, by the name of their object and what they are in it."""
    found = {}
    for one in rendered(overlay):
        spec, name = one.get("spec", {}), one["metadata"]["name"]
        if one["kind"] == "Deployment":
            found[name] = spec["template"]
        elif one["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                found[f"{name} {part}"] = spec["leaderWorkerTemplate"][part]
    return found


def container(template: Manifest, name: str) -> Manifest:
    spec = template["spec"]
    all_of_them: list[Manifest] = spec["initContainers"] + spec["containers"]
    (found,) = (one for one in all_of_them if one["name"] == name)
    return found


def environment(overlay: str, one: Manifest) -> dict[str, str]:
    """The variables of a container, as the kubelet fills them in."""
    maps = {each["metadata"]["name"]: each["data"] for each in every(overlay, "ConfigMap")}
    fields = {"metadata.name": NAME, "status.podIP": ADDRESS}
    found: dict[str, str] = {}
    for source in one.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    for variable in one.get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            value = fields.get(source["fieldRef"]["fieldPath"], "?")
        elif reference := source.get("configMapKeyRef"):
            value = maps[reference["name"]][reference["key"]]
        else:
            value = expanded(str(variable["value"]), found)
        found[variable["name"]] = value
    return found


def expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """The data of each object that the page's commands make, in the order of the page.

    Without a `kubectl` the test is skipped.
    """
    kubectl("version", "--client")
    folder, found = tmp_path_factory.mktemp("keys"), dict[str, list[dict[str, str]]]()
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    ended = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "".join([KUBECTL_OFFLINE, *blocks])],  # noqa: S607
        cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for one in objects_of((folder / "applied").read_text("utf-8")):
        found.setdefault(one["metadata"]["name"], []).append(one.get("data", {}))
    return found


@pytest.mark.parametrize(("overlay", "version"), list(product(OVERLAYS, VERSIONS)))
def test_every_object_is_valid_by_its_schema(overlay: str, version: str) -> None:
    known = [one for one in rendered(overlay) if one["kind"] not in FIELDS]
    pods = [{"apiVersion": "v1", "kind": "Pod", **one} for one in pod_templates(overlay).values()]

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
def test_agent_comes_first_as_user_of_its_engine_and_may_drain(
    overlay: str, made: dict[str, Any]
) -> None:
    maps = {one["metadata"]["name"] for one in every(overlay, "ConfigMap")}
    for template in pod_templates(overlay).values():
        agent, engine = container(template, AGENT), container(template, "engine")
        spec, text = template["spec"], repr(template)
        drain_s = float(environment(overlay, agent)["KVBUS_DRAIN_TIMEOUT_S"])
        runtime, of_engine = (
            {m["mountPath"] for m in one["volumeMounts"] if m["name"] == "runtime"}
            for one in (agent, engine)
        )
        hook = engine.get("lifecycle", {}).get("preStop", {})
        waits_s = int(hook["exec"]["command"][-1]) if hook else 0
        named = re.findall(r"'configMap\w*': {'(?:key'.*?')?name': '([^']+)'", text)

        assert [one["name"] for one in spec["initContainers"]] == ["runtime-dir", AGENT]
        assert agent["restartPolicy"] == "Always"
        assert spec["securityContext"]["runAsUser"] > 0
        assert "runAsUser" not in {*agent["securityContext"], *engine.get("securityContext", {})}
        assert runtime == of_engine != set()
        assert spec["terminationGracePeriodSeconds"] > waits_s + drain_s + 5
        assert set() < set(named) <= maps | made.keys()
        assert set(re.findall(r"'secretName': '([^']+)'", text)) <= made.keys()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_agent_and_connector_read_what_the_manifests_give_them(
    overlay: str, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for template in pod_templates(overlay).values():
        agent, engine = container(template, AGENT), container(template, "engine")
        variables = environment(overlay, agent)
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            config = load_config(CONFIGS[agent["command"][0]], None)
        ports = {one["name"]: one["containerPort"] for one in agent["ports"]}
        shown = {
            f"{mount['mountPath']}/{key}"
            for mount in agent["volumeMounts"]
            for volume in template["spec"]["volumes"]
            if volume["name"] == mount["name"]
            for source in (volume.get("secret", {}), volume.get("configMap", {}))
            for key in made.get(source.get("secretName", source.get("name")), [{}])[0]
        }

        assert config.peer_bind == f"tcp://{ADDRESS}:{ports['peer']}"
        assert config.events_bind == f"tcp://{ADDRESS}:{ports['events']}"
        assert config.http_bind == f"0.0.0.0:{ports['kvbus-http']}"
        assert {config.key_file, config.authorized_keys, config.http_token_file} <= shown
        assert {*config.ticket_keys} <= shown
        if overlay != "base":
            of_engine = environment(overlay, engine)
            command = [expanded(word, of_engine) for word in engine["command"]]
            told = json.loads(command[command.index("--kv-transfer-config") + 1])
            options = read_options(told["kv_connector_extra_config"], told["kv_role"])
            assert [path for path, _ in options.agents] == [Path(config.runtime_dir, "attach.sock")]


@pytest.mark.parametrize("overlay", [one for one in OVERLAYS if one != "base"])
def test_containers_with_a_gpu_share_process_ids_and_no_dev_shm(overlay: str) -> None:
    for template in pod_templates(overlay).values():
        agent, engine = container(template, AGENT), container(template, "engine")
        paths = [{one["mountPath"] for one in each["volumeMounts"]} for each in (agent, engine)]

        assert template["spec"]["shareProcessNamespace"] is True
        assert "nvidia.com/gpu" in engine["resources"]["limits"]
        assert environment(overlay, agent)["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert ["/dev/shm" in some for some in paths] == [False, True]  # noqa: S108  # in a pod


def test_keys_are_rotated_by_the_commands_of_the_page(made: dict[str, Any]) -> None:
    lines = [data["trusted"].splitlines() for data in made["kvbus-trusted"]]
    trusted = [{line.split()[0] for line in some} for some in lines]
    first, verifies, signs = made["kvbus-ticket-keys"]

    assert trusted == [
        {"prefill", "decode"},
        {"prefill", "decode", "prefill-2"},
        {"decode", "prefill-2"},
    ]
    assert len({data["agent.key"] for data in made["kvbus-prefill-key"]}) == 2
    assert verifies["current"] == first["current"]
    assert (signs["current"], signs["other"]) == (verifies["other"], first["current"])


UCX_PORT = 45_678
"""Any port without a name."""
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
    pod = pod_templates("overlays/vllm")["prefill"]
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

    assert about, "no fence of this pod"
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
    maps = {one["metadata"]["name"]: one for one in every("overlays/vllm", "ConfigMap")}
    board, source = maps["kvbus-board"], FOLDER / "components" / "monitoring" / "board.json"

    assert board["data"]["board.json"] == source.read_text("utf-8")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
