"""Pods without Kubernetes: the containers of a pod template, run in namespaces of their own.

A pod is a network namespace on a bridge. Each of its containers has process and mount namespaces, a
root of its own with this machine's programs in place of an image, the user, the capabilities, the
environment and the volumes of the manifest. Secrets and ConfigMaps are laid out as the kubelet
does. Not played: cgroups, seccomp, restarts, and the end of liveness.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvbus.spawn import Child, Stream
from tests.agents import wait_until
from tests.deploy.manifests import ROOT, Manifest
from tests.deploy.node import Node
from tests.namespaces import HAVE_NAMESPACES, Host

UNSHARE = shutil.which("unshare")
IN_NAMESPACES = (str(UNSHARE), "--mount", "--pid", "--fork", "--kill-child")
CAN_RUN_PODS = HAVE_NAMESPACES and UNSHARE is not None and shutil.which("setpriv") is not None
STARTS_WITHIN_S = 90.0
ENDS_WITHIN_S = 40.0
REFERENCE = re.compile(r"\$?\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "UCX_TLS": os.environ.get("UCX_TLS", "all"),
}
"""What the image says; its programs are those of this machine."""


def _folders_of_image() -> list[Path]:
    sources = [Path(one) for one in IMAGE["PYTHONPATH"].split(":") if one]
    wanted = [Path(p) for p in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/sys")]
    wanted += [Path(sys.prefix), Path(sys.base_prefix).resolve(), ROOT, Path(sys.prefix).parent]
    return [path for path in (*wanted, *sources) if path.exists()]


@dataclass
class Pod:
    """One pod of a template; ``running`` are its containers by name."""

    name: str
    template: Manifest
    host: Host
    node: Node
    running: dict[str, Child] = field(default_factory=dict)
    num_started: int = 0

    @property
    def spec(self) -> Manifest:
        found: Manifest = self.template["spec"]
        return found

    @property
    def group(self) -> int:
        return int(self.spec["securityContext"]["fsGroup"])

    def folder(self, volume: str) -> Path:
        """Where a volume of the pod lies."""
        (found,) = (one for one in self.spec["volumes"] if one["name"] == volume)
        return self.node.volume(self.name, found, self.group)

    def start_agent(self) -> None:
        """Run the init containers, one after the other; a sidecar goes on, once it has started."""
        for one in self.spec["initContainers"]:
            child = self.start(one)
            if one.get("restartPolicy") == "Always":
                probe = one["startupProbe"]
                what = f"the startup probe of {self.name}: {child.log}"
                has_started = partial(self._has_started, child, one, probe)
                wait_until(has_started, what, STARTS_WITHIN_S)
                assert child.is_alive, child.log_text()
            else:
                assert child.process.wait(ENDS_WITHIN_S) == 0, child.log_text()

    def _has_started(self, child: Child, one: Manifest, probe: Manifest) -> bool:
        return not child.is_alive or self.probed(one, probe) == 200

    def start(
        self,
        one: Manifest,
        *,
        command: list[str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
    ) -> Child:
        """Start a container, with another command where one is given."""
        environment = self.environment(one)
        arguments = command or self.command(one)
        self.num_started += 1
        root = self.node.folder / self.name / f"root-{self.num_started}-{one['name']}"
        root.mkdir(parents=True)
        script = "\n".join(
            [*self._mounts(one, root), self._exec(one, root, environment, arguments)]
        )
        child = Child.start(
            f"{self.name}/{one['name']}",
            [*self.host.command, *IN_NAMESPACES, "bash", "-c", script],
            log=root.with_suffix(".log"),
            stdin=stdin,
            stdout=stdout,
        )
        self.running[one["name"]] = child
        return child

    def command(self, one: Manifest) -> list[str]:
        """The command of a container, with its variables filled in."""
        environment = self.environment(one)
        return [_expanded(argument, environment) for argument in one["command"]]

    def environment(self, one: Manifest) -> dict[str, str]:
        """What the image, the ConfigMaps and the container say."""
        found = dict(IMAGE)
        for source in one.get("envFrom", []):
            data = self.node.data("ConfigMap", source["configMapRef"]["name"])
            found |= {name: text.decode() for name, text in data.items()}
        for variable in one.get("env", []):
            found[variable["name"]] = self._value(variable, found)
        return found

    def probed(self, one: Manifest, probe: Manifest) -> int:
        """The status that a probe of a container gets; 0 without an answer."""
        get = probe["httpGet"]
        (port,) = (p["containerPort"] for p in one["ports"] if p["name"] == get["port"])
        return status_of(f"http://{self.host.address}:{port}{get['path']}")

    def terminate(self, name: str) -> int:
        """Send the container's first process SIGTERM, and wait; returns the exit status."""
        child = self.running.pop(name)
        for init in psutil.Process(child.pid).children():
            init.send_signal(signal.SIGTERM)
        return child.process.wait(ENDS_WITHIN_S)

    def end(self) -> None:
        """End what runs; raises `AssertionError` for a process of a container that does not."""
        inside = [one for child in self.running.values() for one in _inside(child)]
        for child in self.running.values():
            child.process.kill()  # the containers' processes go with it: see `_exec`
            child.end()
        _, alive = psutil.wait_procs(inside, timeout=ENDS_WITHIN_S)
        assert not alive, alive

    def _value(self, variable: Manifest, so_far: Mapping[str, str]) -> str:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            fields = {"metadata.name": self.name, "status.podIP": self.host.address}
            return fields[source["fieldRef"]["fieldPath"]]
        if "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            return self.node.data("ConfigMap", reference["name"])[reference["key"]].decode()
        return _expanded(str(variable["value"]), so_far)

    def _mounts(self, one: Manifest, root: Path) -> list[str]:
        """The commands that make the container's file system below ``root``."""
        read_only = one.get("securityContext", {}).get("readOnlyRootFilesystem", False)
        lines = ["set -e", f"mount -t tmpfs -o mode=755 tmpfs {root}"]
        lines += [
            f"mkdir -p {root}/proc {root}/dev {root}/tmp",  # noqa: S108 - of the container
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o mode=1777,size=64m tmpfs {root}/dev/shm",  # noqa: S108 - as Kubernetes
        ]
        for mount in one.get("volumeMounts", []):
            (volume,) = (v for v in self.spec["volumes"] if v["name"] == mount["name"])
            writable = "emptyDir" in volume or "hostPath" in volume
            path = self.folder(mount["name"])
            lines += _bind(path, f"{root}{mount['mountPath']}", writable=writable)
        # Last, as the image may lie below a path that has a volume here.
        for path in _folders_of_image():
            if path.is_symlink():
                lines.append(f"cp -P {path} {root}{path}")
            else:
                lines += _bind(path, f"{root}{path}", writable=False)
        if read_only:
            lines.append(f"mount -o remount,ro {root}")
        return lines

    def _exec(
        self, one: Manifest, root: Path, environment: Mapping[str, str], command: list[str]
    ) -> str:
        context = {**self.spec["securityContext"], **one.get("securityContext", {})}
        user, group = context["runAsUser"], context["runAsGroup"]
        # A change of the user clears the signal that `unshare --kill-child` has asked for.
        as_user = (
            f"--reuid {user} --regid {group} --groups {self.group} --no-new-privs --pdeathsig KILL"
        )
        dropped = "--inh-caps=-all --bounding-set=-all" if _drops_all(context) else ""
        values = shlex.join(f"{name}={value}" for name, value in environment.items())
        return (
            f"exec chroot {root} /usr/bin/setpriv {as_user} {dropped} "
            f"/usr/bin/env -i {values} {shlex.join(command)}"
        )


def _inside(child: Child) -> list[psutil.Process]:
    """The processes of a container."""
    try:
        return psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def status_of(url: str, token: str = "") -> int:
    """The HTTP status of a page; 0 without an answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        return int(httpx.get(url, headers=headers, timeout=5, trust_env=False).status_code)
    except httpx.TransportError:
        return 0


def _bind(path: Path, at: str, *, writable: bool) -> list[str]:
    lines = [f"mkdir -p {at}", f"mount --bind {path} {at}"]
    return lines if writable else [*lines, f"mount -o remount,bind,ro {at}"]


def _drops_all(context: Mapping[str, Any]) -> bool:
    return "ALL" in context.get("capabilities", {}).get("drop", [])


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """As the kubelet does: what is not known stays as it is."""

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        return environment.get(match[1], match[0])

    return REFERENCE.sub(value, text)
