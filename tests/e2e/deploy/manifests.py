"""The manifests as `kubectl kustomize` renders them, and what is looked up in them."""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # no stubs among the dev dependencies

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
KUBECTL = shutil.which("kubectl")
NEEDED_KUSTOMIZE = 5
WITHIN_S = 60.0

Manifest = dict[str, Any]


def require_kubectl() -> None:
    """Skip the test where there is no kubectl, or one whose kustomize is too old."""
    found = _kustomize_version() if KUBECTL else "none"
    if not found.startswith("v") or int(found[1:].split(".")[0]) < NEEDED_KUSTOMIZE:
        pytest.skip(f"needs kubectl 1.27 or later, with kustomize 5; there is {found}")


@cache
def _kustomize_version() -> str:
    command = [str(KUBECTL), "version", "--client", "--output=json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    try:
        return str(json.loads(ended.stdout).get("kustomizeVersion", "one without a version"))
    except json.JSONDecodeError:
        return "one that does not say its version"


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    """The objects of a folder below deploy/kubernetes; skips the test without kubectl."""
    require_kubectl()
    ended = subprocess.run(
        [str(KUBECTL), "kustomize", str(FOLDER / name)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return objects_of(ended.stdout)


def objects_of(text: str) -> tuple[Manifest, ...]:
    """All documents of a stream of YAML."""
    return tuple(one for one in yaml.safe_load_all(text) if one)


def named(objects: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    """The one object of that kind and name."""
    (found,) = (one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def pod_templates(objects: tuple[Manifest, ...]) -> dict[str, Manifest]:
    """The pod templates in all of them, by the name of their object and what they are in it."""
    found = {}
    for one in objects:
        spec, name = one.get("spec", {}), one["metadata"]["name"]
        if one["kind"] == "Deployment":
            found[name] = spec["template"]
        elif one["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                found[f"{name} {part}"] = spec["leaderWorkerTemplate"][part]
    return found


def container(template: Manifest, name: str) -> Manifest:
    """The container or init container of that name."""
    spec = template["spec"]
    all_of_them: list[Manifest] = spec.get("initContainers", []) + spec["containers"]
    (found,) = (one for one in all_of_them if one["name"] == name)
    return found
