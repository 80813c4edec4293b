"""What an agent has no room for is asked for again, when it says, and up to a deadline."""

import math
import time

import anyio
import pytest

from kvbus.engine.busy import BusyPauses
from kvbus.errors import ErrorCode, FetchFailed, PeerLost, RequestRefused, RequestTimeout
from kvbus.protocol import Empty, MakeOffer
from tests.agents import until
from tests.engine.recording import MADE, RecordingDecode, RecordingPrefill

pytestmark = pytest.mark.anyio

HINT_S = 0.05


def busy(**detail: float) -> RequestRefused:
    return RequestRefused("full", code=ErrorCode.BUSY, **detail)


def test_a_pause_is_as_long_as_the_agent_says_and_never_the_same_twice() -> None:
    pauses = [BusyPauses(100.0).after(busy(retry_after_s=3.0), 0.0) for _ in range(100)]

    assert all(pause is not None and 3.0 <= pause <= 6.0 for pause in pauses)
    assert len(set(pauses)) > 50


def test_pauses_without_a_hint_grow_up_to_a_bound() -> None:
    pauses = BusyPauses(1e9)

    taken = [pauses.after(busy(), 0.0) or 0.0 for _ in range(20)]

    assert 0.0 < taken[0] <= 0.04
    assert all(2.0 <= pause <= 4.0 for pause in taken[-5:])


@pytest.mark.parametrize("hint_s", [math.nan, -1.0, 0.0])
def test_a_hint_that_is_none_does_not_make_a_pause_of_no_length(hint_s: float) -> None:
    pause_s = BusyPauses(100.0).after(busy(retry_after_s=hint_s), 0.0)

    assert pause_s is not None
    assert pause_s > 0.0


@pytest.mark.parametrize(
    ("error", "now"),
    [
        (busy(retry_after_s=1.0), 9.5),
        (busy(retry_after_s=math.inf), 0.0),
        (RequestRefused("stops", code=ErrorCode.DRAINING), 0.0),
        (RequestTimeout("no reply"), 0.0),
    ],
    ids=["no time left", "never", "another code", "no reply"],
)
def test_what_need_not_be_asked_again_is_not(error: RequestRefused, now: float) -> None:
    assert BusyPauses(10.0).after(error, now) is None


async def test_a_fetch_is_asked_again_as_the_same_with_the_time_that_is_left() -> None:
    session, began = RecordingDecode(), time.monotonic()
    session.reply = None
    fetch = session.fetch({}, num_tokens=0, block_ids={}, timeout_s=30.0)

    session.on_replies[0](busy(retry_after_s=HINT_S))
    await until(lambda: len(session.sent) == 2)
    passed_s = time.monotonic() - began
    session.on_replies[1](Empty())

    first, second = session.sent
    assert (second.fetch_id, second.asked_s) == (first.fetch_id, first.asked_s)
    assert passed_s >= HINT_S
    assert second.timeout_s <= 30.0 - HINT_S
    assert fetch.notice is None


async def test_a_fetch_that_the_engine_cancels_while_it_waits_is_not_asked_again() -> None:
    session = RecordingDecode()
    session.reply = None
    fetch = session.fetch({}, num_tokens=0, block_ids={})
    session.on_replies[0](busy(retry_after_s=HINT_S))

    await fetch.cancel()
    await fetch.cancel()
    with pytest.raises(FetchFailed) as failure:
        await fetch.completed()
    await anyio.sleep(3 * HINT_S)  # nothing may happen

    assert (failure.value.code, failure.value.stage) == (ErrorCode.CANCELLED, "requested")
    assert failure.value.blocks_free
    assert len(session.sent) == 1


async def test_a_session_that_shall_not_ask_again_says_busy() -> None:
    prefill, decode = RecordingPrefill(retry_busy=False), RecordingDecode(retry_busy=False)
    decode.reply = prefill.reply = None
    fetch = decode.fetch({}, num_tokens=0, block_ids={})
    decode.on_replies[0](busy(retry_after_s=HINT_S))

    with pytest.raises(FetchFailed) as failure:
        await fetch.completed()
    ends: list[str] = []

    async def offer() -> None:
        ends.append(await offer_one(prefill))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(offer)
        await refuse_first(prefill)
        await until(lambda: ends)

    assert failure.value.code == ErrorCode.BUSY
    assert ends == [ErrorCode.BUSY]


async def offer_one(session: RecordingPrefill) -> str:
    try:
        return (await session.offer("r", num_tokens=0, block_ids={})).offer_id
    except RequestRefused as error:
        return str(error.code)


async def refuse_first(session: RecordingPrefill) -> None:
    await until(lambda: session.on_replies)
    session.on_replies[0](busy(retry_after_s=HINT_S))


async def test_an_offer_waits_for_room() -> None:
    session, offered = RecordingPrefill(), []
    session.reply = None

    async def offer() -> None:
        offered.append(await session.offer("r", num_tokens=0, block_ids={}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(offer)
        await refuse_first(session)
        await until(lambda: len(session.sent) == 2)
        session.on_replies[1](MADE)

    assert all(isinstance(message, MakeOffer) for message in session.sent)
    assert [one.offer_id for one in offered] == [MADE.offer_id]


async def test_a_loss_ends_the_wait_of_an_offer() -> None:
    session = RecordingPrefill()
    session.reply = None
    lost: list[PeerLost] = []

    async def offer() -> None:
        try:
            await session.offer("r", num_tokens=0, block_ids={})
        except PeerLost as error:
            lost.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(offer)
        await until(lambda: session.on_replies)
        session.on_replies[0](busy(retry_after_s=14.0))
        await anyio.lowlevel.checkpoint()
        session.lose(PeerLost("gone"))
        await until(lambda: lost, within_s=10.0)
