"""A cluster of one node, without Kubernetes: the manifests' pods in namespaces of this machine."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deploy.manifests import (
    KUBECTL,
    ROOT,
    Manifest,
    objects_of,
    pod_templates,
    rendered,
    require_kubectl,
)
from tests.deploy.node import Node
from tests.deploy.pods import CAN_RUN_PODS, IMAGE, Pod
from tests.namespaces import BRIDGED, Host, bridged, run_ip

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
WITHIN_S = 100.0


@dataclass
class Cluster:
    """A node, the hosts that its pods get, and what was made for them."""

    node: Node
    hosts: dict[str, Host]
    stack: ExitStack

    def pod(self, name: str, template: Manifest) -> Pod:
        """A pod of that name, which nobody has started."""
        pod = Pod(name, template, self.hosts[name], self.node)
        self.stack.callback(pod.end)
        return pod


def run_page(title: str, folder: Path) -> tuple[Manifest, ...]:
    """Run the block of the page that begins with this comment; what it would create comes back."""
    blocks = dict(re.findall(r"```bash\n# (.*?)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    ended = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", KUBECTL_OFFLINE + blocks[title]],  # noqa: S607
        cwd=folder,
        env={**IMAGE, "PATH": f"{IMAGE['PATH']}:{Path(str(KUBECTL)).parent}"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return objects_of(ended.stdout.partition("apiVersion:")[2].join(("apiVersion:", "")))


class Made(NamedTuple):
    """The folder in which the page's commands were run, and what they created."""

    folder: Path
    objects: tuple[Manifest, ...]


@pytest.fixture(scope="session")
def made_once() -> Iterator[Made]:
    """The keys that the page tells to make, and the Secrets and ConfigMaps with them."""
    require_kubectl()
    with tempfile.TemporaryDirectory() as name:
        yield Made(Path(name), run_page("keys, once", Path(name)))


@pytest.fixture
def made(made_once: Made, tmp_path: Path) -> Made:
    """The same, in a folder that the test may change."""
    folder = tmp_path / "keys"
    shutil.copytree(made_once.folder, folder)
    return made_once._replace(folder=folder)


@pytest.fixture
def cluster(made: Made) -> Iterator[Callable[..., Cluster]]:
    """Makes a cluster for the pods of these names, with the objects of an overlay."""
    if not CAN_RUN_PODS:
        pytest.skip("needs root, iproute2 and util-linux")
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)

        def make(overlay: str, *names: str) -> Cluster:
            hosts = stack.enter_context(bridged(*names))
            for host in hosts.values():
                run_ip("-n", host.name, "link", "set", BRIDGED, "down")
                run_ip("-n", host.name, "link", "set", BRIDGED, "name", INTERFACE)
                run_ip("-n", host.name, "link", "set", INTERFACE, "up")
            objects = (*rendered(overlay), *made.objects)
            return Cluster(Node(folder, objects), hosts, stack)

        yield make


@pytest.fixture
def templates() -> dict[str, Manifest]:
    """The pod templates of the vLLM overlay."""
    return deepcopy(pod_templates(rendered("overlays/vllm")))
