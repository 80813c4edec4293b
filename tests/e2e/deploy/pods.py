"""Pods without Kubernetes: the containers of a pod template, run in namespaces of their own.

A pod is a network namespace on a bridge. Each of its containers has process and mount namespaces, a
root of its own with this machine's programs in place of an image, the user, the capabilities, the
environment and the volumes of the manifest. Not played: cgroups, seccomp, restarts, and the end of
liveness.
"""

import base64
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil

from kvbus.spawn import Child, Stream
from tests.e2e.deploy.manifests import ROOT, Manifest
from tests.support.agents import wait_until
from tests.support.namespaces import HAVE_NAMESPACES, Host

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
FOLDERS_OF_IMAGE = (
    *(Path(one) for one in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/sys")),
    *(Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()),
    *(ROOT, Path(sys.prefix).resolve().parent),
    *(Path(one) for one in IMAGE["PYTHONPATH"].split(":") if one),
)


@dataclass
class Node:
    """A machine: volumes lie in its ``folder``, and what `hostPath` names below it as well.

    Secrets and ConfigMaps are laid out as the kubelet does: files of root in a folder with a time
    stamp, to which a link points that is changed at once; lent to the pod's group.
    """

    folder: Path
    objects: tuple[Manifest, ...]
    shown: dict[Path, tuple[Manifest, int]] = field(default_factory=dict)
    """The volumes that show an object, and the groups that they are lent to."""

    def volume(self, pod: str, volume: Manifest, group: int) -> Path:
        """The folder of a volume, made if it is not there."""
        if "hostPath" in volume:
            path: Path = self.folder / "node" / volume["hostPath"]["path"].lstrip("/")
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            return path
        path = self.folder / pod / volume["name"]
        if path.exists():
            return path
        path.mkdir(parents=True)
        if "emptyDir" in volume:
            os.chown(path, 0, group)
            path.chmod(0o2777)
        else:
            path.chmod(0o777)
            self.shown[path] = volume, group
            self._fill(path, volume, group)
        return path

    def apply(self, *changed: Manifest) -> None:
        """Have these objects in place of those of their names, in the volumes as well."""
        names = [(one["kind"], one["metadata"]["name"]) for one in changed]
        kept = [o for o in self.objects if (o["kind"], o["metadata"]["name"]) not in names]
        self.objects = (*kept, *changed)
        for path, (volume, group) in self.shown.items():
            if _source(volume) in names:
                self._fill(path, volume, group)

    def _fill(self, path: Path, volume: Manifest, group: int) -> None:
        """Write or change the files of a volume, all at once."""
        content, old = self.data(*_source(volume)), list(path.glob("..2026_*"))
        mode = (volume.get("secret") or volume["configMap"]).get("defaultMode", 0o644)
        new = path / f"..2026_{time.monotonic_ns()}"
        new.mkdir(mode=0o755)
        for name, text in content.items():
            (new / name).write_bytes(text)
            os.chown(new / name, 0, group)
            (new / name).chmod(mode | 0o440)
        (path / "..new").symlink_to(new.name)
        (path / "..new").rename(path / "..data")
        links = {link.name for link in path.iterdir() if not link.name.startswith("..")}
        for name in links - content.keys():
            (path / name).unlink()
        for name in content.keys() - links:
            (path / name).symlink_to(Path("..data") / name)
        for one in old:
            shutil.rmtree(one)

    def data(self, kind: str, name: str) -> dict[str, bytes]:
        """What a ConfigMap or Secret has; nothing when it is not there."""
        read = str.encode if kind == "ConfigMap" else base64.b64decode
        return {
            key: read(text)
            for one in self.objects
            if (one["kind"], one["metadata"]["name"]) == (kind, name)
            for key, text in one.get("data", {}).items()
        }


def _source(volume: Manifest) -> tuple[str, str]:
    """The kind and the name of the object that a volume shows."""
    if "secret" in volume:
        return "Secret", volume["secret"]["secretName"]
    return "ConfigMap", volume["configMap"]["name"]


@dataclass
class Pod:
    """One pod of a template; ``running`` are its containers by name."""

    name: str
    template: Manifest
    host: Host
    node: Node
    running: dict[str, Child] = field(default_factory=dict)
    num_started: int = 0

    def __post_init__(self) -> None:
        self.spec: Manifest = self.template["spec"]
        self.group = int(self.spec["securityContext"]["fsGroup"])
        self.volumes: Manifest = {one["name"]: one for one in self.spec["volumes"]}

    def start_agent(self) -> None:
        """Run the init containers, one after the other; a sidecar goes on, once it has started."""
        for one in self.spec["initContainers"]:
            child = self.start(one)
            if one.get("restartPolicy") == "Always":
                has_started = partial(self._has_started, child, one)
                what = f"the startup probe of {self.name}: {child.log}"
                wait_until(has_started, what, STARTS_WITHIN_S)
                assert child.is_alive, child.log_text()
            else:
                assert child.process.wait(ENDS_WITHIN_S) == 0, child.log_text()

    def _has_started(self, child: Child, one: Manifest) -> bool:
        return not child.is_alive or self.probed(one, "startupProbe") == 200

    def start(
        self,
        one: Manifest,
        *,
        command: list[str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
    ) -> Child:
        """Start a container, with another command where one is given."""
        self.num_started += 1
        root = self.node.folder / self.name / f"root-{self.num_started}-{one['name']}"
        root.mkdir(parents=True)
        script = [*self._mounts(one, root), self._exec(one, root, command or self.command(one))]
        child = self.running[one["name"]] = Child.start(
            f"{self.name}/{one['name']}",
            [*self.host.command, *IN_NAMESPACES, "bash", "-c", "\n".join(script)],
            log=root.with_suffix(".log"),
            stdin=stdin,
            stdout=stdout,
        )
        return child

    def command(self, one: Manifest) -> list[str]:
        """The command of a container, with its variables filled in."""
        environment = self.environment(one)
        return [_expanded(argument, environment) for argument in one["command"]]

    def environment(self, one: Manifest) -> dict[str, str]:
        """What the image, the ConfigMaps and the container say."""
        found = dict(IMAGE)
        fields = {"metadata.name": self.name, "status.podIP": self.host.address}
        for source in one.get("envFrom", []):
            data = self.node.data("ConfigMap", source["configMapRef"]["name"])
            found |= {name: text.decode() for name, text in data.items()}
        for variable in one.get("env", []):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif reference := source.get("configMapKeyRef"):
                data = self.node.data("ConfigMap", reference["name"])
                value = data[reference["key"]].decode()
            else:
                value = _expanded(str(variable["value"]), found)
            found[variable["name"]] = value
        return found

    def probed(self, one: Manifest, probe: str) -> int:
        """The status that a probe of a container gets; 0 without an answer."""
        get = one[probe]["httpGet"]
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
        inside: list[psutil.Process] = []
        for child in self.running.values():
            with suppress(psutil.NoSuchProcess):
                inside += psutil.Process(child.pid).children(recursive=True)
            child.process.kill()  # the containers' processes go with it: see `_exec`
            child.end()
        _, alive = psutil.wait_procs(inside, timeout=ENDS_WITHIN_S)
        assert not alive, alive

    def _mounts(self, one: Manifest, root: Path) -> list[str]:
        """The commands that make the container's file system below ``root``."""
        lines = [
            "set -e",
            f"mount -t tmpfs -o mode=755 tmpfs {root}",
            f"mkdir -p {root}/proc {root}/dev {root}/tmp",  # noqa: S108 - of the container
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o mode=1777,size=64m tmpfs {root}/dev/shm",  # noqa: S108 - as Kubernetes
        ]
        for mount in one.get("volumeMounts", []):
            volume = self.volumes[mount["name"]]
            path = self.node.volume(self.name, volume, self.group)
            writable = "emptyDir" in volume or "hostPath" in volume
            lines += _bind(path, f"{root}{mount['mountPath']}", writable=writable)
        # Last, as the image may lie below a path that has a volume here.
        for path in filter(Path.exists, FOLDERS_OF_IMAGE):
            if path.is_symlink():
                lines.append(f"cp -P {path} {root}{path}")
            else:
                lines += _bind(path, f"{root}{path}", writable=False)
        if one.get("securityContext", {}).get("readOnlyRootFilesystem"):
            lines.append(f"mount -o remount,ro {root}")
        return lines

    def _exec(self, one: Manifest, root: Path, command: list[str]) -> str:
        context = {**self.spec["securityContext"], **one.get("securityContext", {})}
        drops_all = "ALL" in context.get("capabilities", {}).get("drop", [])
        # A change of the user clears the signal that `unshare --kill-child` has asked for.
        as_user = (
            f"--reuid {context['runAsUser']} --regid {context['runAsGroup']} "
            f"--groups {self.group} --no-new-privs --pdeathsig KILL"
        )
        dropped = "--inh-caps=-all --bounding-set=-all" if drops_all else ""
        values = shlex.join(f"{name}={value}" for name, value in self.environment(one).items())
        return (
            f"exec chroot {root} /usr/bin/setpriv {as_user} {dropped} "
            f"/usr/bin/env -i {values} {shlex.join(command)}"
        )


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


def _expanded(text: str, environment: dict[str, str]) -> str:
    """As the kubelet does: what is not known stays as it is."""

    def value(match: re.Match[str]) -> str:
        is_escaped = match[0].startswith("$$")
        return match[0][1:] if is_escaped else environment.get(match[1], match[0])

    return REFERENCE.sub(value, text)
