"""The volumes of pods on a machine of this test, laid out as the kubelet does.

Secrets and ConfigMaps: files of root in a folder with a time stamp, to which a link points that is
changed at once; lent to the pod's group, below a folder that everybody might write into.
"""

import base64
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.manifests import Manifest


@dataclass
class Node:
    """A machine: volumes lie in its ``folder``, and what `hostPath` names below it as well."""

    folder: Path
    objects: tuple[Manifest, ...]
    filled: dict[Path, tuple[Manifest, int]] = field(default_factory=dict)
    writes: int = 0

    def volume(self, pod: str, volume: Manifest, group: int) -> Path:
        """The folder of a volume, made if it is not there."""
        path: Path
        if "hostPath" in volume:
            path = self.folder / "node" / volume["hostPath"]["path"].lstrip("/")
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            return path
        path = self.folder / pod / volume["name"]
        if path.exists():
            return path
        path.mkdir(parents=True)
        if "emptyDir" in volume:
            os.chown(path, 0, group)
            path.chmod(0o2777)
            return path
        path.chmod(0o777)
        self.filled[path] = volume, group
        self._fill(path, volume, group)
        return path

    def apply(self, *changed: Manifest) -> None:
        """Have these objects in place of those of their names, in the volumes as well."""
        names = [(one["kind"], one["metadata"]["name"]) for one in changed]
        kept = [o for o in self.objects if (o["kind"], o["metadata"]["name"]) not in names]
        self.objects = (*kept, *changed)
        for path, (volume, group) in self.filled.items():
            if _source(volume) in names:
                self._fill(path, volume, group)

    def _fill(self, path: Path, volume: Manifest, group: int) -> None:
        """Write or change the files of a volume, all at once, as the kubelet does."""
        content, mode = self.data(*_source(volume)), _mode_of(volume)
        self.writes += 1
        data = path / f"..2026_{self.writes}"
        data.mkdir(mode=0o755)
        for name, text in content.items():
            (data / name).write_bytes(text)
            os.chown(data / name, 0, group)
            (data / name).chmod(mode | 0o440)
        old = (path / "..data").resolve() if (path / "..data").exists() else None
        (path / "..new").symlink_to(data.name)
        (path / "..new").rename(path / "..data")
        for link in path.iterdir():
            if not link.name.startswith("..") and link.name not in content:
                link.unlink()
        for name in content:
            if not (path / name).is_symlink():
                (path / name).symlink_to(Path("..data") / name)
        if old is not None:
            shutil.rmtree(old)

    def data(self, kind: str, name: str) -> dict[str, bytes]:
        """What a ConfigMap or Secret has; nothing when it is not there."""
        for one in self.objects:
            if (one["kind"], one["metadata"]["name"]) == (kind, name):
                texts = {k: v.encode() for k, v in one.get("data", {}).items()}
                return texts if kind == "ConfigMap" else _decoded(texts)
        return {}


def _mode_of(volume: Manifest) -> int:
    shown: Manifest = volume.get("secret") or volume.get("configMap") or {}
    return int(shown.get("defaultMode", 0o644))


def _source(volume: Manifest) -> tuple[str, str]:
    """The kind and the name of the object that a volume shows."""
    if "secret" in volume:
        return "Secret", volume["secret"]["secretName"]
    return "ConfigMap", volume["configMap"]["name"]


def _decoded(texts: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in texts.items()}
