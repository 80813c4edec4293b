"""The prefill agents that a decode agent knows: listed by name, and their memory."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvbus.data import messages as wire
from kvbus.errors import TransferFailed
from kvbus_decode.config import DecodeConfig
from kvbus_decode.mapped import Extent
from kvbus_decode.nixl_peers import NixlMemory, NixlPeers
from kvbus_decode.preconnect import PeerPreconnector
from tests.support.agents import until
from tests.support.data_process import Data, FlatMemory
from tests.support.engines import engine, works
from tests.unit.decode.neighbours import decode_agent, neighbours
from tests.unit.prefill.inside import PrefillAgent, given_back

pytestmark = pytest.mark.anyio


class Broken:
    """A directory that has no agents."""

    def __init__(self) -> None:
        self.requested_at: list[float] = []

    def acquire(self, _: object) -> None:
        self.requested_at.append(asyncio.get_running_loop().time())
        raise ZeroDivisionError


async def test_defect_of_connecting_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus_decode.preconnect.RETRY_S", 0.02)
    peer, bind, broken = "tcp://10.0.0.1:1", "tcp://127.0.0.1:0", Broken()
    config = DecodeConfig(peers=(peer,), agent_id="decode-0", peer_bind=bind, events_bind=bind)
    async with anyio.create_task_group() as tasks:
        agent: Any = SimpleNamespace(tasks=tasks, loop=asyncio.get_running_loop())
        directory: Any = broken
        nothing: Any = None
        peers = PeerPreconnector(agent, config, directory, nothing)
        peers.start()
        await until(lambda: len(broken.requested_at) == 5)
        assert "ZeroDivisionError" in peers.view(peer).problem
        assert peers.num_connected == 0
        tasks.cancel_scope.cancel()
    first, *_, last = broken.requested_at
    assert last - first >= 0.02 + 0.04 + 0.08 + 0.16


def endpoint(agent: PrefillAgent) -> str:
    return agent.runtime.agent.identity.peer_endpoint


async def test_refused_connect_keeps_routes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus_decode.preconnect.RETRY_S", 0.05)
    async with (
        neighbours(folder, decode=lambda source: {"peers": [endpoint(source)]}) as both,
        both.engines() as engines,
    ):
        assert await works(*engines)
        made = list(both.routes)
        async with engine(both.decode.config.attach_path):
            with capture_logs() as lines:
                await until(lambda: len(refused(lines)) > 3)
            assert list(both.routes) == made
            assert len(made) == 1


async def test_moved_agent_is_found_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus_decode.preconnect.RETRY_S", 0.05)
    told = ["127.0.0.9"]
    monkeypatch.setattr("kvbus.bus.connection.resolve_all", lambda _: told)

    def named(source: PrefillAgent) -> str:
        return f"tcp://prefill:{endpoint(source).rpartition(':')[2]}"

    async with (
        neighbours(
            folder,
            prefill={"shake_hands_ahead": "anybody"},
            decode=lambda source: {"peers": [named(source)], "request_timeout_s": 0.3},
        ) as both,
        both.engines(),
    ):
        await until(lambda: both.service.view(named(both.prefill)).problem)
        told[:] = ["127.0.0.1"]
        await until(lambda: len(list(both.routes)) == 1)


@pytest.mark.parametrize("is_reported", [True, False], ids=["reported", "event missed"])
async def test_routes_of_prefill_engines_that_ended_do_not_pile_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_reported: bool
) -> None:
    if not is_reported:
        monkeypatch.setattr("kvbus_decode.peers.TOPICS", ("offer.sealed",))
        monkeypatch.setattr("kvbus_decode.route_book.IDLE_ROUTE_S", 0.001)
    settings = {"mapped": False, "late_read_s": 0.1}
    async with neighbours(folder, prefill=settings, decode={"path": "direct"}) as both:
        processes = set[Any]()
        async with engine(both.decode.config.attach_path, seed=1) as reader:
            for _ in range(4):
                async with engine(both.prefill.attach, seed=2) as read:
                    assert await works(read, reader)
                    assert len(list(both.routes)) == 1
                    processes.update(both.processes())
                if is_reported:
                    await until(lambda: not list(both.routes))
        await until(lambda: all(map(given_back, processes)))


@pytest.mark.parametrize("path", ["mapped", "direct"])
async def test_state_of_lost_process_is_not_reused_when_it_answers(folder: Path, path: str) -> None:
    """A firewall may refuse connections in the name of an agent that lives."""
    async with neighbours(folder, decode={"path": path}) as both, both.engines() as engines:
        assert await works(*engines)
        (route,) = both.routes
        lost, mapped, boot = route.home.remote, route.home.mapped, route.home.agent_boot
        lost.close("is gone")
        lost.close("is gone")
        assert list(both.routes) == []
        assert mapped is None or mapped.closed
        assert await works(*engines)
        (found,) = both.routes
        assert found.home.remote is not lost
        assert found.home.agent_boot == boot
        assert mapped is None or found.home.mapped not in (None, mapped)
        assert found.home.remote.learned[path].num_observed == 1


async def test_process_elsewhere_does_not_take_over_nixl_agent_name(folder: Path) -> None:
    """A name is no proof: the process that had it first is still read."""
    (folder / "d").mkdir(mode=0o700)
    real, impostor = Data("peer/0000"), Data("peer/0000")
    try:
        async with decode_agent(folder / "d", path="direct") as target:
            await target.agent.data_plane.open()
            peers = NixlPeers(target.agent.data)
            theirs, others = (nixl_memory(one) for one in (real, impostor))
            known = await peers.add(theirs, ("tcp://10.0.0.1:1",), lambda _: {theirs})
            with capture_logs() as lines, pytest.raises(TransferFailed):
                await peers.add(others, ("tcp://10.0.0.2:1",), lambda _: {others})
            assert known.memories == (theirs,)
            assert target.agent.data.knows(known.defined)
            assert [line for line in lines if line["event"] == "peer.renewed"] == []
    finally:
        real.end()
        impostor.end()


def nixl_memory(data: Data) -> NixlMemory:
    data.call(wire.OpenNixl())
    flat = FlatMemory.of(4, 4096)
    held = data.hold(1, flat)
    flat.segment.close()
    extents = {(start, start + 4 * 4096) for start in held.addresses.values()}
    return NixlMemory("peer/0000", tuple(held.metadata), frozenset(extents))


def refused(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "handshake.refused"]


def memory(extents: set[Extent]) -> NixlMemory:
    return NixlMemory("agent", (), frozenset(extents))


PAIRS = st.tuples(st.integers(0, 30), st.integers(1, 12))
EXTENTS = st.sets(PAIRS.map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=5)


@given(EXTENTS, EXTENTS)
@example({(0, 4)}, {(2, 6)})  # few random sets have one overlap alone, of which the later is known
@example({(2, 6)}, {(0, 4)})
def test_memory_misfits_if_it_overlaps_and_differs(here: set[Extent], known: set[Extent]) -> None:
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
