"""An offer says where each table starts, extensions go on where it ended, and none is forgotten."""

from functools import partial

import anyio
import pytest

from kvbus.errors import GeometryError, PeerLost
from kvbus.geometry import BlockTable
from kvbus.protocol import Outcome, Released
from tests.engine.recording import MADE, RecordingPrefill

pytestmark = pytest.mark.anyio


async def test_extensions_continue_each_table_also_one_that_starts_late() -> None:
    session = RecordingPrefill()
    offer = await session.offer(
        "r",
        num_tokens=40,
        block_ids={"full": [7, 3, 9], "window": [5, 1, 2], "state": [4]},
        first_blocks={"window": 7},
        sealed=False,
    )

    await offer.extend(52, {"full": [8], "window": [6, 0]})
    await offer.extend(60, {"window": [3, 4]})

    made, first, second = session.sent
    assert made.tables == {
        "full": BlockTable.of([7, 3, 9]),
        "window": BlockTable.of([5, 1, 2], first_block=7),
        "state": BlockTable.of([4]),
    }
    assert first.tables == {
        "full": BlockTable.of([8], first_block=3),
        "window": BlockTable.of([6, 0], first_block=10),
    }
    assert second.tables == {"window": BlockTable.of([3, 4], first_block=12)}


async def test_a_first_block_without_blocks_is_refused_before_anything_is_sent() -> None:
    session = RecordingPrefill()

    with pytest.raises(GeometryError, match="window"):
        await session.offer("r", num_tokens=0, block_ids={"full": []}, first_blocks={"window": 1})

    assert not session.sent


async def test_an_offer_that_was_made_after_its_caller_was_cancelled_is_not_forgotten() -> None:
    released: list[Released] = []
    session = RecordingPrefill(on_released=released.append)
    session.reply = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(session.offer, "r", num_tokens=16, block_ids={"full": [7]}))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    session.on_replies[0](MADE)
    session.lose(PeerLost("the agent is gone"))

    assert released == [Released("offer-1", "r", Outcome.FAILED)]
