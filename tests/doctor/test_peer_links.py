"""``kvbus doctor --peer`` across a network that loses large packets of one direction."""

from collections.abc import Iterator

import pytest

from kvbus.doctor.asking import PeerToCheck
from kvbus.doctor.finding import ERROR, OK, Finding
from kvbus.doctor.peer import check_peer
from tests.agents import AgentProcess, Agents, agents_ended
from tests.faulty_link import HAVE_LINKS, THERE, FaultyLink, faulty_link

pytestmark = pytest.mark.skipif(not HAVE_LINKS, reason="needs root, iproute2 and /dev/net/tun")

MTU, LESS_THAN_A_STATUS = 1300, 300


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[FaultyLink, AgentProcess]]:
    """The network, and an agent at its other end."""
    with faulty_link() as link, agents_ended(Agents) as agents:
        agent: AgentProcess = agents.prepare(
            "prefill",
            peer_bind=f"tcp://{THERE}:7701",
            events_bind=f"tcp://{THERE}:7702",
            data_interfaces=[link.interface],
            insecure=True,
        )
        agent.runner = link.host.command
        agents.start(agent)
        yield link, agent
        agents.end()  # before its network does


def look_at(agent: AgentProcess) -> dict[str, Finding]:
    return {one.name: one for one in check_peer(PeerToCheck(agent.peer))}


def test_a_network_that_carries_all_packets_is_ok(far: tuple[FaultyLink, AgentProcess]) -> None:
    found = look_at(far[1])

    assert {one.severity for one in found.values()} == {OK}
    assert "there, and back" in found["peer.packets"].found


@pytest.mark.parametrize(
    ("direction", "largest_bytes", "question"),
    [
        ("there", MTU, "one of 8,192 bytes"),
        ("back", MTU, "one with an answer of 8,192 bytes"),
        ("back", LESS_THAN_A_STATUS, "the one for its status"),
    ],
)
def test_the_way_that_loses_large_packets_is_named(
    far: tuple[FaultyLink, AgentProcess],
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
    largest_bytes: int,
    question: str,
) -> None:
    link, agent = far
    monkeypatch.setattr(link, f"largest_bytes_{direction}", largest_bytes)
    monkeypatch.setattr("kvbus.doctor.asking.ANSWER_S", 2.0)

    lost = look_at(agent)["peer.packets"]

    assert lost.severity is ERROR
    assert f"{question} is not: large packets are lost on the way {direction}" in lost.found
