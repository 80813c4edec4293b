"""``kvbus status``: what an agent holds, or one line and an exit status where none answers."""

import json
import socket

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app
from tests.agents import Agents
from tests.doctor.played_agents import agent, told_by


def status(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["status", *arguments], env={"COLUMNS": "200"})


def test_what_an_agent_holds_is_a_table_or_json(fresh: Agents) -> None:
    prefill = fresh.prepare("prefill")
    fresh.start(prefill)

    table, as_json = status(prefill.peer), status(prefill.peer, "--json")

    assert (table.exit_code, as_json.exit_code) == (0, 0)
    assert "prefill-0: prefill agent, serving" in table.stdout
    assert "lends memory at" in table.stdout
    assert "memory.sock" in "".join(table.stdout.split())
    assert json.loads(as_json.stdout)["counts"] == dict.fromkeys(prefill.status()["counts"], 0)


def test_no_answer_is_one_line_and_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        result = status(endpoint, "--timeout", "0.1")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: no agent answered at {endpoint} within 0.1 s\n"


@pytest.mark.parametrize("endpoint", ["nowhere", "127.0.0.1:7701"])
def test_an_endpoint_that_is_none_is_refused_with_status_2(endpoint: str) -> None:
    result = status(endpoint)

    assert (result.exit_code, result.stdout) == (2, "")
    assert endpoint in result.stderr


def test_engines_that_are_not_mapped_for_one_reason_are_one_line() -> None:
    engines = {"p-1": "open", "p-2": "elsewhere", "p-3": "elsewhere", "p-4": "closed"}
    told = told_by("decode", sharing={"engines": engines}, silent_peers={"tcp://h:1": 0.0})
    with agent(told) as endpoint:
        lines = [" ".join(line.split()) for line in status(endpoint).stdout.splitlines()]

    assert [line for line in lines if line.startswith("memory of")] == [
        "memory of p-1 mapped here",
        "memory of 2 engines not mapped: elsewhere",
        "memory of p-4 not mapped: closed",
    ]
    assert "peer tcp://h:1 does not answer, tried again at the next fetch" in lines
