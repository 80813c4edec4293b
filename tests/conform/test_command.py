"""``kvbus conform`` as it is run: what it prints, how it ends, where its rules stand."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.conform.play import scenes_of
from kvbus.conform.rules import RULES
from kvbus.protocol import AgentRole
from tests.conform.engines import raw_engine

DOCS = Path(__file__).parents[2] / "docs"


def conform(*arguments: str, flaw: str = "") -> Result:
    options = ["--role", "prefill", *arguments, "--", *raw_engine(AgentRole.PREFILL, flaw)]
    return CliRunner().invoke(app, ["conform", *options], env={"COLUMNS": "80"})


def test_an_engine_that_conforms_ends_it_with_status_0() -> None:
    result = conform("--scene", "sizes")

    assert result.exit_code == 0
    assert "the engine conforms to all" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_broken_rule_is_told_with_its_page_and_what_was_seen() -> None:
    result = conform("--scene", "stop", flaw="bad_status")

    assert result.exit_code == 1
    assert "failed ends.stop" in result.stdout
    assert "docs/protocol.md#attach-socket" in result.stdout
    assert "exit status 3" in result.stdout
    assert "the engine does not conform: ends.stop" in result.stdout


def test_json_is_one_object_with_every_rule_of_the_role() -> None:
    result = conform("--scene", "stop", "--json", flaw="unsealed")

    told = json.loads(result.stdout)
    rules = {rule["name"]: rule for rule in told["rules"]}
    assert result.exit_code == told["exit_status"] == 1
    assert rules.keys() == {name for name in RULES if not name.startswith("fetch.")}
    assert rules["attach.seals"]["verdict"] == "failed"
    assert rules["attach.seals"]["seen"] == ["segment 'kv' can still grow or shrink"]
    assert rules["offer.tables"]["verdict"] == "untried"


def test_an_engine_that_does_not_start_is_told_with_its_last_words() -> None:
    options = ["--role", "decode", "--", "sh", "-c", "echo no GPU here >&2; exit 7"]
    result = CliRunner().invoke(app, ["conform", *options], env={"COLUMNS": "200"})

    assert result.exit_code == 1
    assert "exit status 7" in result.stdout
    assert "no GPU here" in result.stdout


@pytest.mark.parametrize("command", ["/no/such", "no-such-program", "/etc/passwd"])
def test_a_command_that_is_no_program_is_a_mistake(command: str) -> None:
    result = CliRunner().invoke(app, ["conform", "--role", "decode", "--", command])

    assert result.exit_code == 2
    assert f"cannot start the engine: there is no program {command}" in result.stderr
    assert result.stdout == ""


def test_a_scene_that_is_not_there_is_a_mistake() -> None:
    result = conform("--scene", "shapes")

    assert result.exit_code == 2
    assert "no scene shapes" in result.stderr


def test_every_rule_names_a_heading_of_the_protocol_page() -> None:
    headings = re.findall(r"^#+ (.+)$", (DOCS / "protocol.md").read_text(), re.MULTILINE)
    anchors = {_anchor(heading) for heading in headings}

    assert {rule.anchor for rule in RULES.values()} <= anchors


@pytest.mark.parametrize("role", AgentRole)
def test_every_scene_is_on_the_page_about_conformance(role: AgentRole) -> None:
    page = (DOCS / "conformance.md").read_text()

    for scene in scenes_of(role):
        assert f"| `{scene}` |" in page


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
