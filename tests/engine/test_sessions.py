"""What a session makes of offers and fetches: their tables, refusals, losses, and who is told."""

import math
import time
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine import AgentRanks, Fetch
from kvbus.errors import (
    ClosedError,
    ErrorCode,
    GeometryError,
    KVBusError,
    PeerLost,
    RequestRefused,
    RequestTimeout,
)
from kvbus.geometry import BlockTable
from kvbus.protocol import BlocksFreed, MakeOffer
from tests.agents import until
from tests.engine.recording import (
    FULL,
    MADE,
    SPEC,
    WINDOW,
    RecordingDecode,
    RecordingPrefill,
    busy,
    failed,
)
from tests.engines import failure_of

pytestmark = pytest.mark.anyio

HINT_S = 0.05
GONE, CLOSED = PeerLost("the agent is gone"), ClosedError("the session was closed")
OTHERS = {"tcp://10.0.0.2:7501": (1,)}
ACCESS = "access-to-ranks-elsewhere"
DRAINS, FREE = False, True
"""What the home agent says of the blocks of a fetch that failed."""


# The tables of a fetch and of an offer


def tables_of(
    block_ids: dict[str, list[int]], *, num_tokens: int, first_token: int = 0
) -> dict[str, BlockTable]:
    session = RecordingDecode()
    session.fetch({}, num_tokens=num_tokens, first_token=first_token, block_ids=block_ids)
    tables: dict[str, BlockTable] = session.sent[-1].tables
    return tables


ALL = {"full": [7, 3, 9], "window": [5, 1, 2], "state": [4]}


def test_groups_may_be_left_out_and_all_of_them_where_nothing_is_wanted() -> None:
    some = tables_of({"full": [7, 3, 9], "state": [4]}, num_tokens=40)
    nothing: list[dict[str, list[int]]] = [{}, {name: [] for name in ALL}]
    none = [tables_of(ids, num_tokens=40, first_token=40) for ids in nothing]

    assert some == {"full": BlockTable.of([7, 3, 9]), "state": BlockTable.of([4])}
    assert [list(map(len, tables.values())) for tables in none] == [3 * [0]] * 2


@pytest.mark.parametrize(
    "block_ids", [{"full2": [1]}, *({"full": ids} for ids in ([-1], [2**32], [0.5], [[1, 2]]))]
)
def test_groups_and_ids_that_are_none_are_refused_before_anything_is_sent(
    block_ids: dict[str, Any],
) -> None:
    session = RecordingDecode()
    arrays = {name: np.array(ids) for name, ids in block_ids.items()}

    with pytest.raises(GeometryError):
        session.fetch({}, num_tokens=16, block_ids=arrays)

    assert not session.sent


@given(st.data())
def test_the_tables_of_any_fetch_cover_exactly_the_positions_of_their_group(
    data: st.DataObject,
) -> None:
    num_tokens = data.draw(st.integers(0, 100))
    first_token = data.draw(st.integers(0, num_tokens))
    first = {"full": first_token, "window": max(first_token, num_tokens - (WINDOW.window or 0))}
    blocks = {
        group.name: sorted({at // group.block_size for at in range(first[group.name], num_tokens)})
        for group in (FULL, WINDOW)
    } | {"state": [0] if num_tokens > first_token else []}

    tables = tables_of(blocks, num_tokens=num_tokens, first_token=first_token)

    for name, numbers in blocks.items():
        table = tables[name]
        assert table.array().tolist() == numbers
        assert [table.first_block + i for i in range(len(table))] == numbers
    assert set(blocks) == {group.name for group in SPEC.groups}


async def test_extensions_continue_each_table_also_one_that_starts_late() -> None:
    session = RecordingPrefill()
    offer = await session.offer(
        "r", num_tokens=40, block_ids=ALL, first_blocks={"window": 7}, sealed=False
    )

    await offer.extend(52, {"full": [8], "window": [6, 0]})
    await offer.extend(60, {"window": [3, 4]})

    assert [message.tables for message in session.sent] == [
        {
            "full": BlockTable.of([7, 3, 9]),
            "window": BlockTable.of([5, 1, 2], first_block=7),
            "state": BlockTable.of([4]),
        },
        {
            "full": BlockTable.of([8], first_block=3),
            "window": BlockTable.of([6, 0], first_block=10),
        },
        {"window": BlockTable.of([3, 4], first_block=12)},
    ]


async def test_an_offer_that_was_made_after_its_caller_was_cancelled_is_not_forgotten() -> None:
    session = RecordingPrefill(reply=None)
    offer = session.offer("r", num_tokens=16, block_ids={"full": [7]})

    async def wait() -> None:
        await offer

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    session.on_replies[0](MADE)
    session.lose(GONE)

    assert offer.offer_id == "offer-1"
    with pytest.raises(PeerLost):
        await offer.ended


# An agent that has no room


@pytest.mark.parametrize(
    "hint", [{}, *({"retry_after_s": hint_s} for hint_s in (HINT_S, math.nan, -1.0, 0.0))], ids=str
)
async def test_a_fetch_is_asked_again_as_the_same_with_the_time_that_is_left(
    hint: dict[str, float],
) -> None:
    """A hint that is none does not make a pause of no length."""
    session, began = RecordingDecode(reply=None), time.monotonic()
    fetch = session.fetch({}, num_tokens=0, block_ids={}, timeout_s=30.0)

    session.on_replies[0](busy(**hint))
    sent_at_once = len(session.sent)
    await until(lambda: len(session.sent) == 2)
    passed_s = time.monotonic() - began

    first, second = session.sent
    least_s = HINT_S if hint.get("retry_after_s") == HINT_S else 0.0
    assert sent_at_once == 1
    assert (second.fetch_id, second.asked_s) == (first.fetch_id, first.asked_s)
    assert passed_s >= least_s
    assert second.timeout_s <= 30.0 - least_s
    assert fetch.notice is None


@pytest.mark.parametrize(
    ("error", "retry_busy"),
    [
        (busy(retry_after_s=31.0), True),
        (busy(retry_after_s=math.inf), True),
        (busy(retry_after_s=HINT_S), False),
        (RequestRefused("stops", code=ErrorCode.DRAINING), True),
        (RequestTimeout("no reply"), True),
    ],
    ids=["no time left", "never", "not to be asked again", "another code", "no reply"],
)
async def test_what_need_not_be_asked_again_fails_at_once(
    error: KVBusError, retry_busy: bool
) -> None:
    session = RecordingDecode(reply=None, retry_busy=retry_busy)
    fetch = session.fetch({}, num_tokens=0, block_ids={}, timeout_s=30.0)

    session.on_replies[0](error)

    assert (await failure_of(fetch)).code == error.code
    assert len(session.sent) == 1


async def test_a_fetch_that_the_engine_cancels_while_it_waits_is_not_asked_again() -> None:
    session = RecordingDecode(reply=None)
    fetch = session.fetch({}, num_tokens=0, block_ids={})
    session.on_replies[0](busy(retry_after_s=HINT_S))

    await fetch.cancel()
    await fetch.cancel()
    failure = await failure_of(fetch)
    other = session.fetch({}, num_tokens=0, block_ids={})
    session.on_replies[1](busy(retry_after_s=3 * HINT_S))
    await until(lambda: len(session.sent) == 3)

    assert (failure.code, failure.stage) == (ErrorCode.CANCELLED, "requested")
    assert failure.blocks_free
    assert {message.fetch_id for message in session.sent[1:]} == {other.fetch_id}


async def offered(*replies: Any, retry_busy: bool = True, lose: bool = False) -> str:
    """How an offer ends that is answered like this, one answer to each time that it is asked."""
    session, ends = RecordingPrefill(reply=None, retry_busy=retry_busy), list[str]()

    async def offer() -> None:
        try:
            ends.append((await session.offer("r", num_tokens=0, block_ids={})).offer_id)
        except KVBusError as error:
            ends.append(str(error.code))

    def has_asked(times: int) -> bool:
        return len(session.on_replies) >= times

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(offer)
        for number, reply in enumerate(replies):
            await until(partial(has_asked, number + 1))
            session.on_replies[number](reply)
        if lose:
            session.lose(GONE)
        await until(lambda: ends)
    assert all(isinstance(message, MakeOffer) for message in session.sent)
    return ends[0]


async def test_an_offer_waits_for_room_unless_its_session_shall_not_or_is_lost() -> None:
    assert await offered(busy(retry_after_s=HINT_S), MADE) == MADE.offer_id
    assert await offered(busy(retry_after_s=HINT_S), retry_busy=False) == ErrorCode.BUSY
    assert await offered(busy(retry_after_s=14.0), lose=True) == ErrorCode.PEER_LOST


# An agent that is gone


async def fetching(others: Any = ()) -> tuple[RecordingDecode, Fetch]:
    session = RecordingDecode()
    await session.register(others=others, access=ACCESS)
    return session, session.fetch({}, num_tokens=0, block_ids={})


@pytest.mark.parametrize(
    ("others", "notices", "error", "stage", "blocks_free"),
    [
        ((), [], GONE, "lost", True),
        ((), [], CLOSED, "lost", False),
        (OTHERS, [], GONE, "lost", False),
        (OTHERS, [], CLOSED, "lost", False),
        ((), [DRAINS], CLOSED, "reading", False),
        (OTHERS, [DRAINS], GONE, "reading", False),
        (OTHERS, [DRAINS], CLOSED, "reading", False),
        (OTHERS, [FREE], GONE, "reading", True),
    ],
)
async def test_blocks_that_somebody_may_still_write_are_never_said_to_be_free(
    others: Any, notices: list[Any], error: KVBusError, stage: str, blocks_free: bool
) -> None:
    session, fetch = await fetching(others)
    for blocks_were_free in notices:
        session.answer(failed(fetch.fetch_id, blocks_free=blocks_were_free))

    session.lose(error)

    failure = await failure_of(fetch)
    assert (failure.stage, failure.blocks_free) == (stage, blocks_free)
    if blocks_free:
        await fetch.freed
    else:
        with pytest.raises(type(error)):
            await fetch.freed


async def test_blocks_that_the_home_said_are_free_later_stay_so_after_its_end() -> None:
    session, fetch = await fetching(OTHERS)
    session.answer(failed(fetch.fetch_id, blocks_free=False))
    session.notice(BlocksFreed(fetch.fetch_id))

    session.lose(GONE)

    await fetch.freed


@pytest.mark.parametrize(
    "others",
    [OTHERS, [AgentRanks("tcp://10.0.0.2:7501", (1,), ACCESS)], {"tcp://10.0.0.2:7501": [1]}],
)
async def test_the_other_agents_are_named_when_the_control_session_registers(others: Any) -> None:
    session, _ = await fetching(others)

    assert session.sent[0].others == (AgentRanks("tcp://10.0.0.2:7501", (1,), ACCESS),)
    assert session.sent[0].rank is None
