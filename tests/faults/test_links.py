"""A network between the agents that loses packets, is slow, is cut, or swallows everything."""

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed
from kvbus.geometry import KvLayout
from tests.agents import AgentProcess, until
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    Snapshot,
    engine,
    failure_of,
    pair,
    start_long_read,
    works,
)
from tests.faults.conftest import Started
from tests.faulty_link import HAVE_LINKS, HERE, THERE, FaultyLink, faulty_link

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not HAVE_LINKS, reason="needs root, iproute2 and /dev/net/tun"),
]

LONG: dict[str, Any] = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
ONE_BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}
SLOW: dict[str, Any] = {"transport": {"slice_bytes": 1 << 16}}
QUARANTINE_S = 2.0
NUM_TRIES, NUM_LOOKS, RETRY_S = 8, 8, 0.5
WARM_WITHIN_S = 60.0


@pytest.fixture
def link() -> Iterator[FaultyLink]:
    """The network between the agents."""
    with faulty_link() as made:
        yield made


@pytest.fixture
def agents(link: FaultyLink, fresh: Started) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    """A prefill agent on another host, and a decode agent here."""
    common = {"data_interfaces": [link.interface], "insecure": True, **SLOW}
    prefill = fresh.prefill(
        peer_bind=f"tcp://{THERE}:7701", events_bind=f"tcp://{THERE}:7702", **common
    )
    prefill.runner = link.host.command
    decode = fresh.decode(
        peer_bind=f"tcp://{HERE}:7701",
        events_bind=f"tcp://{HERE}:7702",
        quarantine_timeout_s=QUARANTINE_S,
        **common,
    )
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
            if failed.code is not ErrorCode.PEER_UNREACHABLE:
                raise
        await anyio.sleep(RETRY_S)
    return False


@pytest.mark.long
async def test_a_handoff_completes_over_a_slow_link_that_loses_packets(
    link: FaultyLink, agents: tuple[AgentProcess, AgentProcess]
) -> None:
    prefill, decode = agents
    async with pair(prefill.attach, decode.attach) as (source, target):
        link.delay_s, link.loss = 0.2, 0.2

        assert await connects_and_works(source, target)
        link.delay_s = link.loss = 0.0


@pytest.mark.long
@pytest.mark.parametrize("fault", ["a hole", "a cut"])
async def test_a_fetch_across_a_dead_link_ends_by_name_and_one_after_it_completes(
    link: FaultyLink, agents: tuple[AgentProcess, AgentProcess], fault: str
) -> None:
    prefill, decode = agents
    async with pair(prefill.attach, decode.attach) as (source, target):
        first = await source.prefill.offer("first", num_tokens=16, block_ids={"full": [2]})
        link.is_hole = fault == "a hole"
        link.set_up(up=fault == "a hole")

        unmet = await failure_of(target.decode.fetch(first.ticket, **ONE_BLOCK, timeout_s=9.0))
        link.is_hole = False
        link.set_up(up=True)
        worked = await works(source, target)
        growing = await source.prefill.offer(
            "growing", num_tokens=0, block_ids={"full": []}, sealed=False
        )
        link.is_hole = fault == "a hole"
        link.set_up(up=fault == "a hole")
        met = await failure_of(target.decode.fetch(growing.ticket, **ONE_BLOCK, timeout_s=9.0))
        link.is_hole = False
        link.set_up(up=True)

        assert worked
        assert (unmet.stage, unmet.code) == ("resolving", ErrorCode.PEER_UNREACHABLE)
        assert (met.stage, met.code) == ("claiming", ErrorCode.TIMEOUT)
        assert unmet.blocks_free
        assert met.blocks_free
        assert await connects_and_works(source, target)
        await first.withdraw()
        await growing.withdraw()


async def test_blocks_come_back_from_a_read_that_fell_into_a_hole_and_nothing_lands_after_it(
    link: FaultyLink, agents: tuple[AgentProcess, AgentProcess]
) -> None:
    prefill, decode = agents
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        offer, fetch = await start_long_read(source, target)
        link.is_hole = True

        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        recycled, freed = decode.metric("recycled_transports"), target.snapshot()
        link.is_hole = False

        assert failure.stage == "reading"
        assert failure.code in (ErrorCode.TIMEOUT, ErrorCode.LEASE_EXPIRED)
        assert not failure.blocks_free
        assert recycled >= 1
        assert await connects_and_works(source, target, before=freed)
        await offer.withdraw()


@pytest.mark.long
async def test_data_that_is_dropped_holds_up_no_handoff_with_another_agent(
    link: FaultyLink, agents: tuple[AgentProcess, AgentProcess], fresh: Started
) -> None:
    prefill, decode = agents
    near = fresh.prefill(
        peer_bind=f"tcp://{HERE}:7703",
        events_bind=f"tcp://{HERE}:7704",
        data_interfaces=[link.interface],
        insecure=True,
    )
    fresh.start(near)
    async with (
        pair(prefill.attach, decode.attach) as (source, target),
        pair(near.attach, decode.attach) as (elsewhere, reader),
    ):
        assert await works(elsewhere, reader)
        link.hole_ports = frozenset(int(at.rpartition(":")[2]) for at in prefill.started["data"])
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [2]})

        dropped = target.decode.fetch(offer.ticket, **ONE_BLOCK, timeout_s=20.0)
        until_asked = decode.says("handshake.done", reader=target.spec.engine_id)
        worked = [await works(elsewhere, reader) for _ in range(3)]
        still_under_way = not decode.logged("handoff.failed")
        failure = await failure_of(dropped)
        await dropped.blocks_freed()
        link.hole_ports = frozenset()

        assert until_asked
        assert worked == [True] * 3
        assert still_under_way
        assert (failure.stage, failure.code) in {
            ("reading", ErrorCode.TIMEOUT),
            ("reading", ErrorCode.LEASE_EXPIRED),
        }
        assert await works(source, target)
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
        engine(DecodeSession, decode.attach, layout=KvLayout.parse("HND"), seed=3) as other,
        engine(PrefillSession, prefill.attach, seed=4) as same,
    ):
        worked = [await works(source, target, num_tokens=1024), await works(same, other)]

    assert (was_open, is_open) == ([port], [])
    assert probes
    assert worked == [True, True]
    assert link.num_connects_from_there == probes


@pytest.mark.long
async def test_a_listed_agent_is_cold_while_its_data_is_dropped_and_warm_after(
    link: FaultyLink, fresh: Started
) -> None:
    common = {"data_interfaces": [link.interface], "insecure": True}
    prefill = fresh.prefill(
        peer_bind=f"tcp://{THERE}:7701",
        events_bind=f"tcp://{THERE}:7702",
        shake_hands_ahead="anybody",
        **common,
    )
    prefill.runner = link.host.command
    decode = fresh.decode(
        peer_bind=f"tcp://{HERE}:7701",
        events_bind=f"tcp://{HERE}:7702",
        peers=[prefill.settings["peer_bind"]],
        **common,
    )
    fresh.start(prefill)
    link.hole_ports = frozenset(int(at.rpartition(":")[2]) for at in prefill.started["data"])
    fresh.start(decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        await until(lambda: decode.logged("peer.cold"))
        was_warm = []
        for _ in range(NUM_LOOKS):  # it is tried again after 1 s and 2 s
            await anyio.sleep(RETRY_S)
            was_warm.append(decode.metric("warm_peers"))
        link.hole_ports = frozenset()
        await until(lambda: decode.metric("warm_peers") == 1, WARM_WITHIN_S)

        assert not any(was_warm)
        assert await works(source, target)
    fresh.end()
