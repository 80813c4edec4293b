"""``kvbus conform`` as it is run: what it prints, how it ends, where its rules stand."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.errors import docs_url
from tests.tools.conform.conftest import ROLES, engine

DOCS = Path(__file__).parents[3] / "docs"


def conform(*arguments: str, flaw: tuple[str, str] = ("", ""), role: str = "prefill") -> Result:
    options = ["--role", role, *arguments, "--", *engine("raw", *flaw)]
    return CliRunner().invoke(app, ["conform", *options], env={"COLUMNS": "80"})


def test_verdict_shows_what_was_seen_of_a_broken_rule() -> None:
    good, bad = conform("--scene", "stop"), conform("--scene", "stop", flaw=("exit(0)", "exit(3)"))

    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert "the engine conforms to all" in good.stdout
    assert max(map(len, good.stdout.splitlines())) <= 80
    for words in ("failed ends.stop", "exit status 3", "the engine does not conform: ends.stop"):
        assert words in bad.stdout


def test_json_is_one_object_with_every_rule_of_the_role() -> None:
    flaw = "fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK", "0"
    result = conform("--scene", "stop", "--json", flaw=flaw)

    report = json.loads(result.stdout)
    rules = {rule["name"]: rule for rule in report["rules"]}
    assert result.exit_code == report["exit_status"] == 1
    assert any(name.startswith("offer.") for name in rules)
    assert not any(name.startswith("fetch.") for name in rules)
    assert rules["attach.seals"]["verdict"] == "failed"
    assert rules["attach.seals"]["seen"] == [
        f"segment '{name}' can still grow or shrink" for name in ("kv", "cells")
    ]
    assert rules["offer.tables"]["verdict"] == "untried"


def test_engine_failing_to_start_is_shown_with_its_last_lines() -> None:
    options = ["--role", "decode", "--", "sh", "-c", "echo no GPU here >&2; exit 7"]
    result = CliRunner().invoke(app, ["conform", *options], env={"COLUMNS": "200"})

    assert result.exit_code == 1
    assert result.stdout.startswith("failed register.sessions: ")
    assert "exit status 7" in result.stdout
    assert "no GPU here" in result.stdout
    assert "untried" not in result.stdout


@pytest.mark.parametrize("command", ["/no/such", "no-such-program", "/etc/passwd"])
def test_a_command_that_is_no_program_is_a_mistake(command: str) -> None:
    result = CliRunner().invoke(app, ["conform", "--role", "decode", "--", command])

    assert result.exit_code == 2
    assert f"cannot start the engine: there is no program {command}" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("role", ROLES)
def test_scenes_and_rules_are_those_of_the_pages(role: str) -> None:
    page = (DOCS / "conformance.md").read_text()
    named = f"{role.capitalize()} engines|Both"
    lists = re.findall(rf"^(?:{named}):\n\n((?:- .*\n)+)", page, re.MULTILINE)
    scenes = {scene for one in lists for scene in re.findall(r"^- `(\w+)`:", one, re.MULTILINE)}
    headings = re.findall(r"^#+ (.+)$", (DOCS / "protocol-engine.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}

    unknown = conform("--scene", "nothing", role=role)
    rules = json.loads(conform("--scene", "stop", "--json", role=role).stdout)["rules"]

    assert unknown.exit_code == 2
    _, _, known = unknown.stderr.partition("no scene nothing; there are ")
    assert set(known.strip().split(", ")) == scenes
    assert {rule["page"] for rule in rules} <= {docs_url("protocol-engine", one) for one in anchors}
