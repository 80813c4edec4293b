"""Blocks of a fetch whose session is lost are free only when nothing can write into them."""

from typing import Any

import pytest

from kvbus.engine import AgentRanks, Fetch
from kvbus.errors import ClosedError, FetchFailed, KVBusError, PeerLost
from kvbus.protocol.engine import BlocksFreed
from tests.engine.recording import RecordingDecode, failed

pytestmark = pytest.mark.anyio

OTHERS = {"tcp://10.0.0.2:7501": (1,)}
ACCESS = "access-to-ranks-elsewhere"
GONE = PeerLost("the agent is gone")
CLOSED = ClosedError("the session was closed")


@pytest.fixture
def anyio_backend() -> str:
    """The SDK needs the asyncio backend."""
    return "asyncio"


async def fetching(others: Any = ()) -> tuple[RecordingDecode, Fetch]:
    session = RecordingDecode()
    await session.register(others=others, access=ACCESS)
    return session, session.fetch({}, num_tokens=0, block_ids={})


async def failure_of(fetch: Fetch) -> FetchFailed:
    with pytest.raises(FetchFailed) as failure:
        await fetch.completed()
    return failure.value


async def test_blocks_are_free_when_the_only_agent_is_gone() -> None:
    session, fetch = await fetching()

    session.lose(GONE)

    failure = await failure_of(fetch)
    assert (failure.stage, failure.blocks_free) == ("lost", True)
    await fetch.blocks_freed()


@pytest.mark.parametrize(("others", "error"), [(OTHERS, GONE), (OTHERS, CLOSED), ((), CLOSED)])
async def test_blocks_that_somebody_may_still_write_are_never_said_to_be_free(
    others: Any, error: KVBusError
) -> None:
    session, fetch = await fetching(others)

    session.lose(error)

    failure = await failure_of(fetch)
    assert (failure.stage, failure.code, failure.blocks_free) == ("lost", error.code, False)
    with pytest.raises(type(error)):
        await fetch.blocks_freed()


async def test_a_draining_fetch_of_a_spread_engine_stays_in_doubt_when_its_home_is_lost() -> None:
    session, fetch = await fetching(OTHERS)
    session.notice(failed(fetch.fetch_id, blocks_free=False))

    session.lose(GONE)

    failure = await failure_of(fetch)
    assert (failure.stage, failure.blocks_free) == ("reading", False)
    with pytest.raises(PeerLost):
        await fetch.blocks_freed()


@pytest.mark.parametrize("blocks_free", [True, False])
async def test_blocks_that_the_home_said_are_free_stay_so_after_its_end(blocks_free: bool) -> None:
    session, fetch = await fetching(OTHERS)
    session.notice(failed(fetch.fetch_id, blocks_free=blocks_free))
    if not blocks_free:
        session.notice(BlocksFreed(fetch.fetch_id))

    session.lose(GONE)

    assert (await failure_of(fetch)).blocks_free is blocks_free
    await fetch.blocks_freed()


@pytest.mark.parametrize(
    "others",
    [OTHERS, [AgentRanks("tcp://10.0.0.2:7501", (1,), ACCESS)], {"tcp://10.0.0.2:7501": [1]}],
)
async def test_the_other_agents_are_named_when_the_control_session_registers(others: Any) -> None:
    session, _ = await fetching(others)

    assert session.sent[0].others == (AgentRanks("tcp://10.0.0.2:7501", (1,), ACCESS),)
    assert session.sent[0].rank is None
