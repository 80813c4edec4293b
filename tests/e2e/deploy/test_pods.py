"""What the manifests say is run: each container's command, user, environment, volumes and probes.

The cluster has one node, and is made without Kubernetes. The vLLM in it is replaced by the engines
of `kvbus bench-prefill` and `bench-decode`, at the socket that vLLM is told.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus.spawn import Child
from tests.e2e.deploy.manifests import (
    KUBECTL,
    ROOT,
    Manifest,
    container,
    objects_of,
    pod_templates,
    rendered,
    require_kubectl,
)
from tests.e2e.deploy.pods import CAN_RUN_PODS, IMAGE, Node, Pod, status_of
from tests.support.agents import wait_logged, wait_until
from tests.support.namespaces import BRIDGED, bridged, run_ip

PAGE = ROOT / "docs" / "kubernetes.md"
INTERFACE = "eth0"
KUBECTL_OFFLINE = """
kubectl() {
    case $1 in
        create) command kubectl "$@" --dry-run=client --output=yaml && echo --- ;;
        apply) cat ;;
        rollout) ;;
        *) return 1 ;;
    esac
}
"""
"""What `kubectl` does here: it prints what it would create."""
ALL_EQUAL = "ok: 19 handoffs; all bytes of the first of each case are equal"
OFFER = ("bench-prefill", "--mib", "1", "--rounds", "1")
ENDS_WITHIN_S = 250.0
LOOK_BY_LOOPBACK = """
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:7703/healthz", timeout=10).read().decode(), end="")
"""
SEEN_WITHIN_S = 30.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),  # agents and engines in turn, on cores that are few
]


class Cluster:
    """Starts pods of an overlay; ``keys`` is the folder where the page's commands are run."""

    def __init__(self, stack: ExitStack, folder: Path, keys: Path) -> None:
        self._stack, self._folder, self._keys = stack, folder, keys

    def start(self, overlay: str, **templates: str) -> list[Pod]:
        """Pods whose agents have started, each of a template of the overlay."""
        objects = rendered(overlay)
        self.node = Node(self._folder, (*objects, *self.run_page("keys, once")))
        hosts = self._stack.enter_context(bridged(*templates))
        pods = []
        for name, template in templates.items():
            host = hosts[name]
            run_ip("-n", host.name, "link", "set", BRIDGED, "down")
            run_ip("-n", host.name, "link", "set", BRIDGED, "name", INTERFACE)
            run_ip("-n", host.name, "link", "set", INTERFACE, "up")
            pods.append(Pod(name, pod_templates(objects)[template], host, self.node))
            self._stack.callback(pods[-1].end)
            pods[-1].start_agent()
        return pods

    def run_page(self, title: str) -> tuple[Manifest, ...]:
        """Run the block of the page that begins with this comment; what it would create."""
        blocks = dict(re.findall(r"```bash\n# (.*?)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
        ended = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", KUBECTL_OFFLINE + blocks[title]],  # noqa: S607
            cwd=self._keys,
            env={**IMAGE, "PATH": f"{IMAGE['PATH']}:{Path(str(KUBECTL)).parent}"},
            capture_output=True,
            text=True,
            timeout=ENDS_WITHIN_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return objects_of(ended.stdout.partition("apiVersion:")[2].join(("apiVersion:", "")))

    def change(self, title: str) -> None:
        """Do what the page says, with all that shows it in the volumes of pods."""
        self.node.apply(*self.run_page(title))


@pytest.fixture
def cluster(folder: Path, tmp_path: Path) -> Iterator[Cluster]:
    require_kubectl()
    if not CAN_RUN_PODS:
        pytest.skip("needs root, iproute2 and util-linux")
    with ExitStack() as stack:
        yield Cluster(stack, folder, tmp_path)


def endpoint(pod: Pod) -> str:
    """The attach socket that vLLM is told."""
    command = pod.command(container(pod.template, "engine"))
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    return str(config["kv_connector_extra_config"]["endpoint"])


def run_engine(pod: Pod, *command: str, **streams: Any) -> Child:
    """The engine's container, with an engine of the benchmark in it."""
    arguments = ["kvbus", *command, "--attach", endpoint(pod)]
    return pod.start(container(pod.template, "engine"), command=arguments, **streams)


def hand_over(prefill: Pod, decode: Pod) -> str:
    """What the decode engine says of handoffs between the two pods; a pipe is the router."""
    tickets, received = os.pipe()
    path = prefill.node.folder / "said"
    with path.open("wb") as output:
        offering = run_engine(prefill, *OFFER, stdout=received)
        reading = run_engine(decode, "bench-decode", stdin=tickets, stdout=output)
    for end in (tickets, received):
        os.close(end)
    statuses = [one.process.wait(ENDS_WITHIN_S) for one in (reading, offering)]
    logs = [one.log_text() for one in (reading, offering)]
    said = path.read_text()
    assert statuses == [0, 0], "\n".join([said, *logs, agent_log(prefill), agent_log(decode)])
    return said


def doctor(pod: Pod, peer: Pod) -> str:
    """What `kvbus doctor` says, in the agent's container, of the agent of another pod."""
    command = ["kvbus", "doctor", "--only", "peer", "--json", "--peer", started(peer)["peer"]]
    return within(pod, [*command, f"--server-key={started(peer)['server_key']}"])


def within(pod: Pod, command: list[str]) -> str:
    """What a command says in a container like the agent's, as by `kubectl exec`."""
    serving = pod.running["kvbus"]
    child = pod.start(agent(pod), command=command)
    pod.running["kvbus"] = serving
    assert child.process.wait(ENDS_WITHIN_S) == 0, child.log_text()
    return child.log_text()


def agent(pod: Pod) -> Manifest:
    return container(pod.template, "kvbus")


def agent_log(pod: Pod) -> str:
    return pod.running["kvbus"].log_text()


def started(pod: Pod) -> dict[str, Any]:
    """What the agent says of itself, which it may do after its first probe."""
    wait_logged(pod.running["kvbus"], '"agent.started"', SEEN_WITHIN_S)
    lines = [line for line in agent_log(pod).splitlines() if '"agent.started"' in line]
    said: dict[str, Any] = json.loads(lines[-1])
    return said


def restart(*pods: Pod) -> None:
    for pod in pods:
        pod.terminate("kvbus")
        pod.start_agent()


def ready(pod: Pod) -> int:
    return pod.probed(agent(pod), "readinessProbe")


def test_pods_hand_over_and_drain_with_manifest_probes_and_token(
    cluster: Cluster,
) -> None:
    prefill, decode = cluster.start("overlays/vllm", prefill="prefill", decode="decode")
    token = decode.node.data("Secret", "kvbus-http")["token"].decode().strip()
    page = f"http://{prefill.host.address}:7703/metrics"
    tickets, received = os.pipe()

    said = hand_over(prefill, decode)
    near = doctor(decode, prefill)
    before = ready(prefill)
    waiting = run_engine(prefill, *OFFER, stdout=received)
    wait_until(lambda: ready(prefill) == 200, "prefill is ready", ENDS_WITHIN_S)
    (of_peer,) = re.findall(r"-- sh -c '(kvbus status tcp:[^']*)'", PAGE.read_text("utf-8"))
    status = within(prefill, ["sh", "-c", of_peer])
    itself = within(prefill, ["kvbus", "doctor", "--only", "agents"])
    at_work = within(prefill, ["kvbus", "status"])
    by_loopback = within(prefill, [sys.executable, "-c", LOOK_BY_LOOPBACK])
    pages = [status_of(page), status_of(page, token)]
    alive = prefill.probed(agent(prefill), "livenessProbe")
    without_engine = ready(decode)
    for end in (tickets, received):
        os.close(end)
    waiting.process.wait(ENDS_WITHIN_S)  # as nobody reads
    statuses = [pod.terminate("kvbus") for pod in (prefill, decode)]

    assert ALL_EQUAL in said
    assert "mapped" not in said
    assert "in another PID namespace, so UCX reads it over TCP" in near
    assert (before, alive, without_engine) == (503, 200, 503)
    assert "prefill" in status
    assert "the agent runs already, and has its ports" in " ".join(itself.split())
    assert "serving" in at_work
    assert by_loopback == "ok\n"
    assert pages == [401, 200]
    assert statuses == [0, 0]


def test_pods_of_one_node_map_memory_where_they_share_the_folder(
    cluster: Cluster,
) -> None:
    prefill, decode = cluster.start("overlays/one-node", prefill="prefill", decode="decode")

    said = hand_over(prefill, decode)
    near = doctor(decode, prefill)

    assert ALL_EQUAL in said
    assert "mapped handoffs" in said
    assert "its memory can be mapped" in near


def test_agents_of_two_pod_engine_meet_and_worker_is_ready_first(
    cluster: Cluster,
) -> None:
    pods = {"worker": "decode workerTemplate", "leader": "decode leaderTemplate"}
    worker, leader = cluster.start("overlays/leader-worker-set", **pods)

    near = doctor(leader, worker)

    assert [ready(pod) for pod in (worker, leader)] == [200, 503]
    assert '"verdict":"works"' in near
    assert started(worker)["peer"] in near


def test_agent_and_ticket_keys_are_rotated_as_page_says(
    cluster: Cluster,
) -> None:
    prefill, decode = cluster.start("overlays/vllm", prefill="prefill", decode="decode")
    server_keys = [started(prefill)["server_key"]]

    cluster.change("the new key is trusted")
    wait_logged(decode.running["kvbus"], '"keys.changed"', SEEN_WITHIN_S)
    cluster.change("prefill has the new key")
    restart(prefill)
    server_keys.append(started(prefill)["server_key"])
    cluster.change("the old key is trusted no more")
    wait_until(lambda: agent_log(decode).count('"keys.changed"') == 2, "the old key is gone")
    with_the_new_key = hand_over(prefill, decode)
    cluster.change("the new ticket key verifies")
    restart(prefill, decode)
    cluster.change("the new ticket key signs")
    restart(prefill)
    while_half_are_new = hand_over(prefill, decode)
    cluster.change("the new ticket key verifies")
    restart(decode)
    without_the_old = hand_over(prefill, decode)

    assert server_keys[0] != server_keys[1]
    for said in (with_the_new_key, while_half_are_new, without_the_old):
        assert ALL_EQUAL in said
