"""The Dockerfile: it is linted, runs as nobody special, and copies what is there."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
WITHIN_S = 60.0


def instructions(stage: str) -> list[str]:
    """The instructions of a stage, a line each."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("FROM ")]
    begin = next(n for n in starts if lines[n].endswith(f" AS {stage}"))
    end = next((n for n in starts if n > begin), len(lines))
    return [line for line in lines[begin:end] if line]


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"

    ended = subprocess.run(
        [hadolint, ROOT / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, "")


def test_agents_run_as_a_user_that_is_not_root() -> None:
    (user,) = [line for line in instructions("agent") if line.startswith("USER ")]

    uid, _, gid = user.removeprefix("USER ").partition(":")

    assert int(uid) > 0  # a number, as Kubernetes compares with runAsNonRoot
    assert int(gid) > 0


def test_what_the_build_of_a_wheel_needs_is_sent_to_it() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    needed = {"pyproject.toml", "hatch_build.py", "constraints.txt", project["project"]["readme"]}
    needed |= set(project["project"]["license-files"])
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    assert needed | {package.partition("/")[0] for package in packages} == sent
    assert all((ROOT / name).exists() for name in sent)


def test_the_base_has_a_python_that_kvbus_takes() -> None:
    versions = [
        tuple(map(int, one.split("."))) for one in re.findall(r"python:(\d.\d+)", DOCKERFILE)
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))

    assert len(versions) == 2
    assert min(versions) >= least
