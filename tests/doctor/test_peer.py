"""``kvbus doctor --peer``: what it says of an agent elsewhere, from here."""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.doctor.advertised import advertise_error
from kvbus.doctor.asking import PeerToCheck
from kvbus.doctor.clock import APART_S
from kvbus.doctor.finding import ERROR, OK, Finding
from kvbus.doctor.peer import check_peer
from kvbus.spawn import free_port
from tests.agents import AgentProcess, Agents, agents_ended


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    """An agent that runs."""
    with agents_ended(Agents) as agents:
        prefill: AgentProcess = agents.prepare("prefill", mapped=False)
        agents.start(prefill)
        yield prefill
        agents.check()


def look_at(endpoint: str) -> dict[str, Finding]:
    return {one.name: one for one in check_peer(PeerToCheck(endpoint))}


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--only", "peer", *arguments])


def test_an_agent_that_can_be_read_is_ok(agent: AgentProcess) -> None:
    found = look_at(agent.peer)

    assert {name: one.severity for name, one in found.items()} == {
        "peer.socket": OK,
        "peer.packets": OK,
        "peer.data": OK,
        "peer.clock": OK,
        "peer.one_machine": OK,
    }
    assert agent.started["data"][0] in found["peer.data"].found
    assert abs(float(str(found["peer.clock"].values["ahead_s"]))) < APART_S


def test_a_port_at_which_nobody_listens_is_named() -> None:
    port = free_port()

    found = look_at(f"tcp://127.0.0.1:{port}")

    assert list(found) == ["peer.socket"]
    assert found["peer.socket"].severity is ERROR
    assert f"127.0.0.1:{port}: Connection refused" in found["peer.socket"].found


def test_who_listens_and_says_nothing_is_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.doctor.asking.ANSWER_S", 0.5)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        found = look_at(f"tcp://127.0.0.1:{silent.getsockname()[1]}")

    assert found["peer.socket"].severity is ERROR
    assert "no reply to 'status'" in found["peer.socket"].found


def test_a_host_without_an_address_is_named() -> None:
    found = look_at("tcp://nowhere.invalid:7701")

    assert "'nowhere.invalid'" in found["peer.socket"].found


def test_an_advertised_host_is_one_of_this_machine_or_is_doubted() -> None:
    assert advertise_error("") == ""
    assert advertise_error("127.0.0.1") == ""
    assert advertise_error("192.0.2.1") == "192.0.2.1 is no address of this machine"
    assert "'nowhere.invalid'" in advertise_error("nowhere.invalid")


def test_the_command_looks_at_the_agent_that_it_is_told(agent: AgentProcess) -> None:
    done = doctor("--peer", agent.peer)

    assert done.exit_code == 0, done.output
    assert "packets of full size come there, and back" in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--only peer needs --peer"),
        (("--peer", "127.0.0.1:7701"), "is not tcp://HOST:PORT"),
        (("--peer", "tcp://127.0.0.1:7701", "--server-key", "x"), "--key-file"),
        (("--from", "tcp://127.0.0.1:7701"), "--from needs --peer"),
        (("--peer", "tcp://h:1", "--from", "tcp://h:1"), "are the same agent"),
        (("--peer", "tcp://h:1", "--from", "h:1"), "--from: 'h:1' is not tcp://HOST:PORT"),
        (("--peer", "tcp://h:1", "--from-server-key", "x"), "--from-server-key needs --from"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(arguments: tuple[str, ...], told: str) -> None:
    done = doctor(*arguments)

    assert done.exit_code == 2
    assert told in done.output
