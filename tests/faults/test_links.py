"""A network between the agents that swallows everything, or lets one side begin no connection.

What becomes of requests across a way that is cut is shown in the simulated world.
"""

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from kvbus.errors import ErrorCode, FetchFailed
from kvbus.geometry import KvLayout
from tests.agents import AgentProcess
from tests.engines import Engine, Snapshot, engine, failure_of, pair, start_long_read, works
from tests.faults.conftest import LONG, Started
from tests.faulty_link import HAVE_LINKS, HERE, THERE, FaultyLink, faulty_link

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not HAVE_LINKS, reason="needs root, iproute2 and /dev/net/tun"),
]

SLOW: dict[str, Any] = {"slice_bytes": 1 << 16}
LATE = {ErrorCode.TIMEOUT, ErrorCode.LEASE_EXPIRED}
NUM_TRIES, RETRY_S = 8, 0.5


@pytest.fixture
def link() -> Iterator[FaultyLink]:
    """The network between the agents."""
    with faulty_link() as made:
        yield made


def sockets(host: str, link: FaultyLink) -> dict[str, Any]:
    """Where an agent has them: its KV crosses the link."""
    return {
        "peer_bind": f"tcp://{host}:7701",
        "events_bind": f"tcp://{host}:7702",
        "data_interfaces": [link.interface],
        "insecure": True,
    }


@pytest.fixture
def agents(link: FaultyLink, fresh: Started) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    """A prefill agent on another host, and a decode agent here."""
    prefill = fresh.prefill(**sockets(THERE, link), **SLOW, shake_hands_ahead="anybody")
    prefill.runner = link.host.command
    decode = fresh.decode(**sockets(HERE, link), **SLOW, quarantine_timeout_s=2.0)
    fresh.start(prefill, decode)
    yield prefill, decode
    fresh.end()  # before their network does


async def connects_and_works(
    source: Engine, target: Engine, *, before: Snapshot | None = None
) -> bool:
    """Whether a handoff completed; a connection may take longer than a request has.

    So may a request that was sent into a hole: the third of them in a row makes its agent silent,
    and fetches are refused for a while, even where the link is whole by then.
    """
    for _ in range(NUM_TRIES):
        try:
            return await works(source, target, before=before)
        except FetchFailed as failed:
            if failed.code not in (ErrorCode.PEER_UNREACHABLE, ErrorCode.TIMEOUT):
                raise
        await anyio.sleep(RETRY_S)
    return False


async def test_blocks_come_back_from_a_read_that_fell_into_a_hole_and_nothing_lands_after_it(
    link: FaultyLink, agents: tuple[AgentProcess, AgentProcess]
) -> None:
    prefill, decode = agents
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)
        link.is_hole = True

        failure = await failure_of(fetch)
        await fetch.freed
        recycled, freed = decode.metric("recycled_transports"), target.snapshot()
        link.is_hole = False

        assert failure.stage == "reading"
        assert failure.code in LATE
        assert not failure.blocks_free
        assert recycled >= 1
        assert await connects_and_works(source, target, before=freed)
        await offer.withdraw()


async def test_a_prefill_agent_begins_no_connection_to_its_reader(
    link: FaultyLink, agents: tuple[AgentProcess, AgentProcess]
) -> None:
    """What docs/security.md says of the ways that have to be open, of KV in blocks and in boxes."""
    prefill, decode = agents
    port = int(decode.peer.rpartition(":")[2])
    was_open = link.host.ports_open_at(HERE, [port])
    link.lets_there_connect = False
    is_open = link.host.ports_open_at(HERE, [port])
    probes = link.num_connects_from_there

    async with (
        pair(prefill.attach, decode.attach, **LONG) as (source, target),
        engine(decode.attach, layout=KvLayout.parse("HND"), seed=3) as other,
        engine(prefill.attach, seed=4) as same,
    ):
        worked = [await works(source, target, num_tokens=1024), await works(same, other)]

    assert (was_open, is_open) == ([port], [])
    assert probes
    assert worked == [True, True]
    assert link.num_connects_from_there == probes
