"""``kvbus plan`` as tests run it."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from kvbus.cli import app

SMALL = "kv_heads=8,head=4,layers=2,dtype=f16"


def plan(*arguments: str, prefill: str = SMALL, decode: str = SMALL, tokens: int = 32) -> Result:
    options = ["plan", "--from", prefill, "--to", decode, "--tokens", str(tokens), *arguments]
    return CliRunner().invoke(app, options, env={"COLUMNS": "80"})


def planned(*arguments: str, **sides: Any) -> dict[str, Any]:
    """The object of --json, which is the last line."""
    result = plan("--json", *arguments, **sides)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def refused(*arguments: str, status: int = 2, **sides: Any) -> str:
    """The one line about a plan that is refused."""
    result = plan(*arguments, **sides)
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    message = result.stderr.removesuffix("\n")
    assert message.startswith("error: ")
    assert message.isprintable()  # so it is one line
    return message
