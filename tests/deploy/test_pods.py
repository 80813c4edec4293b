"""What the manifests say is run: each container's command, user, environment, volumes and probes.

The vLLM in them is replaced by the demo's engines, at the socket that vLLM is told.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from kvbus.spawn import Child
from tests.agents import wait_logged, wait_until
from tests.deploy.conftest import Cluster, Made, run_page
from tests.deploy.manifests import ROOT, Manifest, container, pod_templates, rendered
from tests.deploy.pods import Pod, status_of
from tests.deploy.rank_engine import ACCESS

ALL_EQUAL = "12 requests, 12 outputs equal to the model run alone, tokens and logits"
ALERTS = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
ENDS_WITHIN_S = 100.0
LOOK_BY_LOOPBACK = """
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:7703/healthz", timeout=10).read().decode(), end="")
"""
SEEN_WITHIN_S = 30.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),  # agents and engines in turn, on cores that are few
]

MakeCluster = Callable[..., Cluster]
Templates = dict[str, Manifest]


def start(cluster: Cluster, templates: Templates) -> tuple[Pod, Pod]:
    """A prefill and a decode pod whose agents have started."""
    pods = cluster.pod("prefill", templates["prefill"]), cluster.pod("decode", templates["decode"])
    for pod in pods:
        pod.start_agent()
    return pods


def endpoint(pod: Pod) -> str:
    """The attach socket that vLLM is told."""
    command = pod.command(container(pod.template, "engine"))
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    return str(config["kv_connector_extra_config"]["endpoint"])


def run_engine(pod: Pod, command: str, **streams: Any) -> Child:
    """The engine's container, with an engine of the demo in it."""
    arguments = ["kvbus", command, "--attach", endpoint(pod)]
    return pod.start(container(pod.template, "engine"), command=arguments, **streams)


def hand_over(prefill: Pod, decode: Pod) -> str:
    """What the demo says of its handoffs between the two pods; a pipe is the router."""
    tickets, received = os.pipe()
    path = prefill.node.folder / "said"
    with path.open("wb") as output:
        offering = run_engine(prefill, "demo-prefill", stdout=received)
        reading = run_engine(decode, "demo-decode", stdin=tickets, stdout=output)
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


@dataclass
class Rank:
    """One of an engine over several pods, and the pipe to it."""

    process: Child

    def tell(self, what: Any) -> None:
        assert self.process.process.stdin is not None
        self.process.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.process.stdin.flush()

    def told(self) -> Any:
        assert self.process.process.stdout is not None
        line = self.process.process.stdout.readline()
        assert line, self.process.log_text()
        return json.loads(line)


def run_rank(there: Cluster, name: str, groups: Templates, known: dict[str, Pod]) -> Rank:
    """Start a pod of a group, the worker's before the leader's, with a rank as its engine."""
    role, is_worker = name.split("-", maxsplit=1)[0], name.endswith("-1")
    pod = there.pod(name, groups[f"{role} {'worker' if is_worker else 'leader'}Template"])
    pod.start_agent()
    known[name] = pod
    others = []
    if not is_worker:
        at = started(known[f"{name}-1"])
        key = {"server_key": at["server_key"], "access": ACCESS}
        others = [{"endpoint": at["peer"], "ranks": [1], **key}]
    script = [sys.executable, str(Path(__file__).with_name("rank_engine.py"))]
    engine = pod.start(
        container(pod.template, "engine"),
        command=[*script, role, endpoint(pod), json.dumps(others)],
        stdin=PIPE,
        stdout=PIPE,
    )
    return Rank(engine)


def agent(pod: Pod) -> Manifest:
    return container(pod.template, "kvbus")


def agent_log(pod: Pod) -> str:
    return pod.running["kvbus"].log_text()


def started(pod: Pod) -> dict[str, Any]:
    """What the agent said of itself."""
    lines = [line for line in agent_log(pod).splitlines() if '"agent.started"' in line]
    said: dict[str, Any] = json.loads(lines[-1])
    return said


def restart(*pods: Pod) -> None:
    for pod in pods:
        pod.terminate("kvbus")
        pod.start_agent()


def ready(pod: Pod) -> int:
    return pod.probed(agent(pod), agent(pod)["readinessProbe"])


def test_the_pods_hand_over_and_drain_as_the_manifests_say(
    cluster: MakeCluster, templates: Templates
) -> None:
    prefill, decode = start(cluster("overlays/vllm", "prefill", "decode"), templates)

    said = hand_over(prefill, decode)
    near = doctor(decode, prefill)
    statuses = [pod.terminate("kvbus") for pod in (prefill, decode)]

    assert ALL_EQUAL in said
    assert "mapped" not in said
    assert "in another PID namespace, so UCX reads it over TCP" in near
    assert statuses == [0, 0]


def test_pods_of_one_node_map_memory_where_they_share_the_folder(
    cluster: MakeCluster,
) -> None:
    templates = pod_templates(rendered("overlays/one-node"))
    prefill, decode = start(cluster("overlays/one-node", "prefill", "decode"), templates)

    said = hand_over(prefill, decode)
    near = doctor(decode, prefill)

    assert ALL_EQUAL in said
    assert "(12 mapped)" in said
    assert "its memory can be mapped" in near


def test_probes_and_the_token_are_those_of_the_manifests(
    cluster: MakeCluster, templates: Templates
) -> None:
    prefill, decode = start(cluster("overlays/vllm", "prefill", "decode"), templates)
    credentials = decode.node.data("Secret", "kvbus-http")
    page = f"http://{prefill.host.address}:7703/metrics"
    tickets, received = os.pipe()

    before = ready(prefill)
    run_engine(prefill, "demo-prefill", stdout=received)
    wait_until(lambda: ready(prefill) == 200, "prefill is ready", ENDS_WITHIN_S)

    status = within(prefill, ["sh", "-c", re.findall(r"-- sh -c '(.*)'", ALERTS)[0]])

    itself = within(prefill, ["kvbus", "doctor", "--only", "agents"])
    at_work = within(prefill, ["kvbus", "top", "--once"])
    by_loopback = within(prefill, [sys.executable, "-c", LOOK_BY_LOOPBACK])

    assert before == 503
    assert "prefill agent" in status
    assert "the agent runs already, and has its ports" in itself
    assert "serving" in at_work
    assert by_loopback == "ok\n"
    assert prefill.probed(agent(prefill), agent(prefill)["livenessProbe"]) == 200
    assert ready(decode) == 503
    assert status_of(page) == 401
    assert status_of(page, credentials["token"].decode().strip()) == 200
    for end in (tickets, received):
        os.close(end)


def test_a_pod_with_ranks_alone_is_ready_before_its_engine(cluster: MakeCluster) -> None:
    groups = pod_templates(rendered("overlays/leader-worker-set"))
    names = {"prefill": "prefill leaderTemplate", "prefill-0-1": "prefill workerTemplate"}
    there = cluster("overlays/leader-worker-set", *names)
    pods = [there.pod(name, groups[part]) for name, part in names.items()]

    for pod in pods:
        pod.start_agent()

    assert [ready(pod) for pod in pods] == [503, 200]


def test_an_engine_over_two_pods_hands_over_to_another(cluster: MakeCluster) -> None:
    groups = pod_templates(rendered("overlays/leader-worker-set"))
    names = [f"{role}-0{worker}" for role in ("prefill", "decode") for worker in ("", "-1")]
    there = cluster("overlays/leader-worker-set", *names)
    pods: dict[str, Pod] = {}
    ranks = {name: run_rank(there, name, groups, pods) for name in reversed(names)}

    ticket = [ranks["prefill-0"].told() for _ in ("attached", "ready", "ticket")][-1]
    ranks["decode-0"].tell(ticket)
    path = [ranks["decode-0"].told() for _ in ("attached", "ready", "path")][-1]
    ranks["decode-0-1"].told()
    for name in ("decode-0", "decode-0-1"):
        ranks[name].tell("compare")
    are_equal = [ranks[name].told() for name in ("decode-0", "decode-0-1")]

    assert path == "direct"
    assert are_equal == [True, True]
    assert ranks["prefill-0"].told() == "completed"


def test_a_key_is_rotated_as_the_page_says(
    cluster: MakeCluster, templates: Templates, made: Made
) -> None:
    prefill, decode = start(cluster("overlays/vllm", "prefill", "decode"), templates)
    keys = [started(prefill)["server_key"]]
    node = prefill.node

    node.apply(*run_page("the new key is trusted", made.folder))
    wait_logged(decode.running["kvbus"], '"keys.changed"', SEEN_WITHIN_S)
    node.apply(*run_page("prefill has the new key", made.folder))
    prefill.terminate("kvbus")
    prefill.start_agent()
    keys.append(started(prefill)["server_key"])
    node.apply(*run_page("the old key is trusted no more", made.folder))
    wait_until(lambda: agent_log(decode).count('"keys.changed"') == 2, "the old key is gone")
    said = hand_over(prefill, decode)

    assert keys[0] != keys[1]
    assert ALL_EQUAL in said


def test_a_ticket_key_is_rotated_as_the_page_says(
    cluster: MakeCluster, templates: Templates, made: Made
) -> None:
    prefill, decode = start(cluster("overlays/vllm", "prefill", "decode"), templates)

    def change(title: str) -> None:
        prefill.node.apply(*run_page(title, made.folder))

    change("the new ticket key verifies")
    restart(prefill, decode)
    change("the new ticket key signs")
    restart(prefill)
    while_half_are_new = hand_over(prefill, decode)
    change("the new ticket key verifies")
    restart(decode)
    without_the_old = hand_over(prefill, decode)

    assert ALL_EQUAL in while_half_are_new
    assert ALL_EQUAL in without_the_old
