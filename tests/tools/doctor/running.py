"""``kvbus doctor --json`` as tests run it, and the check of each report."""

import json
from collections.abc import Mapping
from typing import Any

from typer.testing import CliRunner, Result

from kvbus.cli import app

WORST_FIRST = ("error", "warning", "note", "ok")
VERDICTS = {"error": "broken", "warning": "limited"}

Findings = dict[str, dict[str, Any]]


def show(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80", **(env or {})})


def doctor(*arguments: str, env: Mapping[str, str] | None = None) -> Findings:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments], env=env)
    return checked(json.loads(result.stdout), status=result.exit_code)


def checked(told: dict[str, Any], *, status: int) -> Findings:
    """The findings of a report, by name; the report as a whole is what they come to."""
    found: Findings = {one["name"]: one for one in told["findings"]}
    severities = [one["severity"] for one in told["findings"]]
    complaints = [name for name, one in found.items() if one["severity"] in VERDICTS]
    assert len(found) == len(severities), "a name comes twice"
    assert severities == sorted(severities, key=WORST_FIRST.index)
    assert told["counts"] == {one: severities.count(one) for one in WORST_FIRST}
    assert told["verdict"] == VERDICTS.get(severities[0], "works")
    assert told["exit_status"] == status == int(told["verdict"] == "broken" or is_strict(told))
    assert [name for name in found if name in told["sentence"]] == complaints
    for name, one in found.items():
        check_finding(name, one)
    return found


def is_strict(told: dict[str, Any]) -> bool:
    return bool(told["strict"]) and told["verdict"] == "limited"


def check_finding(name: str, one: Mapping[str, Any]) -> None:
    """A complaint has a reason and a fix; an ok finding has none."""
    assert one["found"], name
    assert name.startswith(f"{one['family']}.")
    if one["severity"] in VERDICTS:
        assert one["why"], name
        assert one["fix"], name
    if one["severity"] == "ok":
        assert [one[key] for key in ("why", "fix", "command")] == ["", "", ""], name


def severities(found: Findings) -> dict[str, str]:
    return {name: one["severity"] for name, one in found.items()}
