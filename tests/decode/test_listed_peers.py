"""The prefill agents that a configuration lists: in it, in a file, behind names."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.directory import PeerAddress
from kvbus_decode.peer.listed import ListedPeers

pytestmark = pytest.mark.anyio

KEY = 40 * "k"


def listed(**keys: Any) -> ListedPeers:
    bind = "tcp://127.0.0.1:0"
    return ListedPeers(DecodeConfig(agent_id="decode-0", peer_bind=bind, events_bind=bind, **keys))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What the name server knows."""
    known: dict[str, list[str]] = {}

    def look_up(host: str) -> list[str]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known[host]

    monkeypatch.setattr("kvbus_decode.peer.listed.look_up_all", look_up)
    return known


async def test_all_addresses_of_a_name_are_listed_and_it_is_looked_up_again(
    names: dict[str, list[str]],
) -> None:
    names["prefill.svc"] = ["10.0.0.1", "10.0.0.2"]
    peers = listed(peers=("tcp://prefill.svc:7501",))
    first = await peers.look()
    names["prefill.svc"] = ["10.0.0.2", "[fd00::3]"]

    later = await peers.look()

    assert first == {PeerAddress("tcp://10.0.0.1:7501"), PeerAddress("tcp://10.0.0.2:7501")}
    assert later == {PeerAddress("tcp://10.0.0.2:7501"), PeerAddress("tcp://[fd00::3]:7501")}


async def test_a_name_server_that_fails_leaves_what_was_known_and_is_said_once(
    names: dict[str, list[str]],
) -> None:
    names["prefill.svc"] = ["10.0.0.1"]
    peers = listed(peers=("tcp://prefill.svc:7501",))
    known = await peers.look()
    names.clear()

    with capture_logs() as lines:
        assert [await peers.look(), await peers.look()] == [known, known]

    assert [line["reason"] for line in lines] == ["Name or service not known"]


async def test_a_file_lists_more_and_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_text(f"# prefill agents\n\ntcp://127.0.0.2:1\ntcp://127.0.0.3:1   {KEY}\n")
    peers = listed(peers=("tcp://127.0.0.1:1",), peers_file=str(path))
    first = await peers.look()
    path.write_text("tcp://127.0.0.4:1\n")

    later = await peers.look()

    assert first == {
        PeerAddress("tcp://127.0.0.1:1"),
        PeerAddress("tcp://127.0.0.2:1"),
        PeerAddress("tcp://127.0.0.3:1", KEY),
    }
    assert later == {PeerAddress("tcp://127.0.0.1:1"), PeerAddress("tcp://127.0.0.4:1")}


async def test_a_file_that_is_gone_or_has_a_wrong_line_is_said_and_the_rest_counts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "peers"
    path.write_text("ipc:///tmp/x\ntcp://127.0.0.2:1\n")
    peers = listed(peers_file=str(path))
    with capture_logs() as lines:
        first = await peers.look()
        path.unlink()
        later = await peers.look()

    assert first == later == {PeerAddress("tcp://127.0.0.2:1")}
    assert [line["reason"] for line in lines] == [
        "'ipc:///tmp/x' is not tcp://HOST:PORT or with a KEY",
        "No such file or directory",
    ]


async def test_more_than_the_most_are_left_out_and_said() -> None:
    peers = listed(peers=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), max_peers=1)

    with capture_logs() as lines:
        found = await peers.look()

    assert found == {PeerAddress("tcp://127.0.0.1:1")}
    assert "2 agents are listed, 1 are the most" in lines[0]["reason"]


async def test_those_that_were_chosen_stay_so_when_the_name_server_tells_them_in_turns(
    names: dict[str, list[str]],
) -> None:
    names["prefill.svc"] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    peers = listed(peers=("tcp://prefill.svc:7501",), max_peers=2)
    first = await peers.look()
    names["prefill.svc"].reverse()

    assert await peers.look() == first
    names["prefill.svc"] = ["10.0.0.3", "10.0.0.2"]
    assert await peers.look() == {PeerAddress(f"tcp://10.0.0.{n}:7501") for n in (2, 3)}


async def test_one_name_that_has_no_answer_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Barrier(2)
    monkeypatch.setattr(
        "kvbus_decode.peer.listed.look_up_all", lambda _: [f"10.0.0.{answers.wait(20)}"]
    )

    assert len(await listed(peers=("tcp://a:1", "tcp://b:1")).look()) == 2


async def test_a_name_that_is_listed_no_more_is_forgotten(
    names: dict[str, list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "peers"
    path.write_text("tcp://a:1\n")
    names["a"] = ["10.0.0.1"]
    peers = listed(peers_file=str(path))
    await peers.look()
    path.write_text("# none for now\n")
    assert await peers.look() == set()
    names.clear()
    path.write_text("tcp://a:1\n")

    assert await peers.look() == set()
