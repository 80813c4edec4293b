"""The prefill agents that a decode agent knows: listed by name, and their memory."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer import Extent, NixlMemory, WarmPeers
from tests.agents import until


class Broken:
    """A directory that has no agents."""

    def acquire(self, _: object) -> None:
        raise ZeroDivisionError


@asynccontextmanager
async def listing(*peers: str, **keys: Any) -> AsyncIterator[WarmPeers]:
    """These agents, looked up again and again; none of them can be met."""
    bind = "tcp://127.0.0.1:0"
    keys |= {"agent_id": "decode-0", "peer_bind": bind, "events_bind": bind}
    config = DecodeConfig(peers=peers, peers_refresh_s=0.01, **keys)
    async with anyio.create_task_group() as tasks:
        agent: Any = SimpleNamespace(tasks=tasks, loop=asyncio.get_running_loop())
        directory: Any = Broken()
        nothing: Any = None
        warm = WarmPeers(agent, config, directory, nothing)
        warm.start()
        yield warm
        tasks.cancel_scope.cancel()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What the name server knows."""
    known: dict[str, list[str]] = {}

    def look_up(host: str) -> list[str]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known[host]

    monkeypatch.setattr("kvbus_decode.peer.warm.look_up_all", look_up)
    return known


@pytest.mark.anyio
async def test_all_addresses_of_a_name_are_listed_as_the_name_server_last_told_them(
    names: dict[str, list[str]],
) -> None:
    """A name server that fails leaves what was known, and is said once; it holds up no other."""
    names["a"], names["b"] = ["10.0.0.1"], ["10.0.0.2", "10.0.0.3"]
    with capture_logs() as lines:
        async with listing("tcp://a:1", "tcp://b:1") as peers:
            await until(lambda: peers.num_listed == 3)
            del names["a"]
            names["b"] = ["[fd00::3]"]
            await until(lambda: peers.view("tcp://[fd00::3]:1").listed)

            assert peers.num_listed == 2
            assert peers.view("tcp://10.0.0.1:1").listed
            names["b"] = ["10.0.0.4"]
            await until(lambda: peers.view("tcp://10.0.0.4:1").listed)

    unknown = [line["reason"] for line in lines if line["event"] == "peers.unknown"]
    assert unknown == ["Name or service not known"]


@pytest.mark.anyio
async def test_those_that_are_chosen_stay_so_when_the_name_server_tells_them_in_turns(
    names: dict[str, list[str]],
) -> None:
    names["prefill"], names["more"] = ["10.0.0.3", "10.0.0.1", "10.0.0.2"], []
    with capture_logs() as lines:
        async with listing("tcp://prefill:1", "tcp://more:1", max_peers=2) as peers:
            await until(lambda: peers.num_listed == 2)
            names["prefill"] = ["10.0.0.3", "10.0.0.2", "10.0.0.1"]
            names["more"] = ["10.0.0.9"]
            await until(lambda: any("4 agents" in line.get("reason", "") for line in lines))

            assert {at for at in range(10) if peers.view(f"tcp://10.0.0.{at}:1").listed} == {1, 2}
            names["prefill"] = ["10.0.0.3"]
            await until(lambda: peers.view("tcp://10.0.0.3:1").listed)

    crowded = [line["reason"] for line in lines if line.get("listed") == "max_peers"]
    assert crowded == [f"{found} agents are listed, 2 are the most (max_peers)" for found in (3, 4)]


@pytest.mark.anyio
async def test_a_defect_of_warming_keeps_the_agent_that_it_is_about_cold_and_nothing_else(
    names: dict[str, list[str]],
) -> None:
    names["a"] = ["10.0.0.1"]
    async with listing("tcp://a:1") as peers:
        await until(lambda: peers.view("tcp://10.0.0.1:1").problem)

    assert "ZeroDivisionError" in peers.view("tcp://10.0.0.1:1").problem
    assert peers.num_warm == 0


def memory(extents: set[Extent]) -> NixlMemory:
    return NixlMemory("agent", (), frozenset(extents))


PAIRS = st.tuples(st.integers(0, 30), st.integers(1, 12))
EXTENTS = st.sets(PAIRS.map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=5)


@given(EXTENTS, EXTENTS)
def test_memory_misfits_when_it_overlaps_what_is_known_and_is_not_the_same(
    here: set[Extent], known: set[Extent]
) -> None:
    overlaps = any(
        start < stop_known and start_known < stop and (start, stop) != (start_known, stop_known)
        for start, stop in here
        for start_known, stop_known in known
    )
    event(f"overlaps: {overlaps}")

    assert memory(here).misfits(known) == overlaps


def test_tens_of_thousands_of_segments_are_compared_with_as_many() -> None:
    """Pair by pair that would take many minutes."""
    here = {(2 * number, 2 * number + 1) for number in range(30_000)}
    known = {(2 * number + 1, 2 * number + 2) for number in range(30_000)}

    assert not memory(here).misfits(known)
    assert memory(here).misfits({*known, (60_000 - 2, 60_000)})
