"""The command line: refusals name the option, and asking for help does not load torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.demo.arguments import MAX_TP
from kvbus.demo.model_config import ModelConfig
from kvbus.demo.options import MAX_TOKENS
from tests.agents import Agents, agents_ended


def kvbus(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--requests", "0"], "--requests"),
        (["--layout", "ABC"], "'hnd'"),
        (["--prefill-tp", "9"], "--prefill-tp"),
        (["--prompt-file", "/nowhere/at/all"], "cannot read /nowhere/at/all"),
        (["--max-new-tokens", "4000"], "4096"),
        (["--keep-logs", "/dev/null/logs"], "/dev/null/logs"),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments: list[str], told: str) -> None:
    result = kvbus("demo", *arguments)

    assert result.exit_code == 2
    assert told in result.output


def test_a_prompt_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("\n  \n")

    result = kvbus("demo", "--prompt-file", str(path))

    assert result.exit_code == 2
    assert "has no prompts" in result.output


def test_the_version_is_that_of_the_package() -> None:
    result = kvbus("--version")

    assert result.exit_code == 0
    assert result.output.startswith("kvbus 0.")


def test_the_driver_knows_the_bounds_of_the_model() -> None:
    model = ModelConfig()

    assert (model.max_tokens, model.num_query_heads) == (MAX_TOKENS, MAX_TP)


def test_the_driver_starts_without_torch() -> None:
    code = "import kvbus.demo.command, kvbus.status_command, sys; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_status_shows_what_an_agent_holds() -> None:
    with agents_ended(Agents) as agents:
        agent = agents.prepare("prefill")
        agents.start(agent)
        table, as_json = kvbus("status", agent.peer), kvbus("status", agent.peer, "--json")

    assert (table.exit_code, as_json.exit_code) == (0, 0)
    assert "prefill-0: prefill agent, serving" in table.output
    assert '"counts":{"offers":0,"leases":0' in as_json.output


def test_status_says_that_nobody_answers() -> None:
    result = kvbus("status", "tcp://127.0.0.1:1", "--timeout", "0.1")

    assert result.exit_code == 1
    assert "no agent answered at tcp://127.0.0.1:1 within 0.1 s" in result.output


def test_status_refuses_an_address_that_is_none() -> None:
    result = kvbus("status", "nonsense")

    assert result.exit_code == 2
    assert "nonsense" in result.output
