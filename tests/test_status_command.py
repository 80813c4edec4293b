"""``kvbus status`` where no agent answers: one line, and an exit status."""

import socket

from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.protocol import AgentRole, AgentStatus, Sharing
from kvbus.status_command import status_table


def test_no_answer_is_one_line_and_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        result = CliRunner().invoke(app, ["status", endpoint, "--timeout", "0.1"])

    assert result.exit_code == 1
    assert result.stderr == f"error: no agent answered at {endpoint} within 0.1 s\n"
    assert result.stdout == ""


def test_an_endpoint_that_is_none_is_refused_with_status_2() -> None:
    result = CliRunner().invoke(app, ["status", "nowhere"])

    assert result.exit_code == 2
    assert result.stdout == ""


def test_engines_that_are_not_mapped_for_one_reason_are_one_line() -> None:
    engines = {"p-1": "open", "p-2": "elsewhere", "p-3": "elsewhere", "p-4": "closed"}
    answer = AgentStatus(
        agent_id="d",
        role=AgentRole.DECODE,
        engines={},
        draining=False,
        counts={},
        sharing=Sharing(engines=engines),
        silent_peers={"tcp://h:1": 0.0},
    )

    table = status_table(answer)
    what, values = (list(column.cells) for column in table.columns)
    rows = dict(zip(what, values, strict=True))

    assert {name: value for name, value in rows.items() if "memory" in str(name)} == {
        "memory of p-1": "mapped here",
        "memory of 2 engines": "not mapped: elsewhere",
        "memory of p-4": "not mapped: closed",
    }
    assert rows["peer tcp://h:1"] == "does not answer, tried again at the next fetch"
