"""What a decode agent tells NIXL of peers that are dropped while they are read from."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import anyio
import numpy as np
import pytest

from kvbus.bus import RequestClient, new_boot_id, new_context
from kvbus.transport import ReadStatus, TransportLimits
from kvbus_decode.peer.directory import Peer, PeerAddress
from kvbus_decode.peer.nixl import NixlMemory, NixlPeers
from kvbus_decode.peer.reach_book import ReachBook
from tests.transport.conftest import StartPeer, StartReader, content, until

pytestmark = pytest.mark.anyio

MIB = 1 << 20


@pytest.fixture
async def meet() -> AsyncIterator[Callable[[], Peer]]:
    """Makes the object that stands for one connection to the process."""
    clients: list[RequestClient] = []
    with new_context() as context:

        def make() -> Peer:
            address = PeerAddress("tcp://127.0.0.1:1")
            clients.append(RequestClient(context, address.endpoint, boot=new_boot_id()))
            reach = ReachBook(asyncio.get_running_loop(), max_known=1)
            return Peer(address, clients[-1], reach)

        yield make
        for client in clients:
            client.close()


def memory_of(agent: str, address: int, metadata: bytes, size_bytes: int) -> NixlMemory:
    return NixlMemory(agent, (metadata,), frozenset({(address, address + size_bytes)}))


def forever() -> float:
    return anyio.current_time() + 60.0


async def test_an_agent_that_is_read_from_when_its_peer_is_dropped_goes_when_that_has_ended(
    over_tcp: None, start_peer: StartPeer, start_reader: StartReader, meet: Callable[[], Peer]
) -> None:
    holder, reader = start_peer("holder/1"), start_reader(TransportLimits(slice_bytes=64 * MIB))
    address, metadata = holder.allocate(256 * MIB, seed=1)
    reader.allocate(256 * MIB)
    known, peer = NixlPeers(reader.transport), meet()
    memory = memory_of("holder/1", address, metadata, 256 * MIB)
    await known.add(peer, memory, [], deadline=forever())
    assert reader.read("holder/1", address, [(0, 0, 4096)]).status is ReadStatus.DONE
    holder.signal(signal.SIGSTOP)
    read, ended = reader.start("holder/1", address, [(0, 0, 256 * MIB)])
    until(lambda: reader.transport.stats().outstanding_handles > 0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(known.forget, peer, "holder/1", lambda: False)
        await anyio.wait_all_tasks_blocked()
        read.abort()
        holder.signal(signal.SIGCONT)

    assert ended.result(20).status is ReadStatus.ABORTED
    assert known.names_of(peer) == []
    assert reader.transport.stats().peers == 0


async def test_an_agent_that_is_met_again_stays_and_what_it_had_before_is_remembered(
    over_tcp: None, start_peer: StartPeer, start_reader: StartReader, meet: Callable[[], Peer]
) -> None:
    holder, reader = start_peer("holder/1"), start_reader()
    address, metadata = holder.allocate(MIB, seed=1)
    reader.allocate(MIB)
    known, dropped, again = NixlPeers(reader.transport), meet(), meet()
    await known.add(dropped, memory_of("holder/1", address, metadata, MIB), [], deadline=forever())

    larger = memory_of("holder/1", address, metadata, 2 * MIB)  # it overlaps, and is another
    await known.add(again, larger, [], deadline=forever())
    await known.forget(dropped, "holder/1", lambda: False)
    outcome = reader.read("holder/1", address, [(0, 0, MIB)])

    assert (known.names_of(dropped), known.names_of(again)) == ([], ["holder/1"])
    assert outcome.status is ReadStatus.DONE
    assert np.array_equal(reader.memory, content(MIB, 1))
