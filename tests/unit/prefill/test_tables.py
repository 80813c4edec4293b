"""An offer is accepted if its block tables hold all that its tokens need of every group."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import BlockTable, GroupSpec, StatePart, state_group
from kvbus.protocol import ExtendOffer, MakeOffer, SealOffer, WithdrawOffer
from tests.support.engines import Engine, make_spec
from tests.unit.prefill.inside import PrefillAgent

pytestmark = pytest.mark.anyio

FULL = GroupSpec("full", (0,), 16, 2, 8, "bfloat16")
WINDOW = GroupSpec("window", (1,), 16, 2, 8, "bfloat16", window=20)
STATE = state_group("state", (2,), (StatePart("conv", 1, 64),))
# fmt: off
SEALED = [
    (FULL, 0, 0, 0, ""), (FULL, 1, 0, 1, ""), (FULL, 2, 0, 32, ""), (FULL, 3, 0, 33, ""),
    (FULL, 4, 0, 33, ""),
    (FULL, 2, 0, 33, "blocks 0 to 3 of group 'full', the table has 2 from block 0"),
    (FULL, 2, 1, 33, "must start at block 0"),
    (WINDOW, 3, 0, 40, ""), (WINDOW, 2, 1, 40, ""), (WINDOW, 2, 1, 36, ""), (WINDOW, 0, 5, 0, ""),
    (WINDOW, 2, 0, 40, "table has 2 from block 0"), (WINDOW, 2, 1, 35, "table has 2 from block 1"),
    (WINDOW, 1, 2, 40, "blocks 1 to 3 of group 'window', the table has 1 from block 2"),
    (STATE, 1, 0, 1, ""), (STATE, 1, 0, 1000, ""), (STATE, 1, 0, 0, ""), (STATE, 0, 0, 0, ""),
    (STATE, 0, 0, 1, "table has 0 from block 0"), (STATE, 0, 1, 1, "must start at block 0"),
    (STATE, 2, 0, 1, "one block, not 2"), (STATE, 1, 1, 1, "one block, not 2"),
]
OPEN = [(WINDOW, 1, 3, 10, ""), (WINDOW, 1, 3, 80, "table has 1 from block 3")]
# fmt: on
# a group, the number of blocks, the first one, the number of tokens, and how that is refused
CASES = [*((True, one) for one in SEALED), *((False, one) for one in OPEN)]


@pytest.fixture
async def engines(agent: PrefillAgent) -> AsyncIterator[dict[str, Engine]]:
    async with AsyncExitStack() as stack:
        yield {
            group.name: await stack.enter_async_context(agent.engine(make_spec(groups=[group])))
            for group in (FULL, WINDOW, STATE)
        }


async def answer(source: Engine, message: MakeOffer) -> str:
    try:
        made = await source.control.connection.request(message)
    except RequestRefused as refused:
        return f"{refused.code}: {refused.message}"
    await source.control.connection.request(WithdrawOffer(made.offer_id))
    return ""


async def test_a_table_holds_what_the_tokens_need_of_its_group(engines: dict[str, Engine]) -> None:
    """While the offer is open, not what a window does not need in the end."""
    for sealed, (group, num_blocks, first_block, num_tokens, words) in CASES:
        tables = {group.name: BlockTable.of(range(num_blocks), first_block=first_block)}
        message = MakeOffer(request_id="r", num_tokens=num_tokens, tables=tables, sealed=sealed)
        said = await answer(engines[group.name], message)
        assert words in said, tables
        assert said.partition(":")[0] == ("geometry" if words else ""), said


async def test_open_offer_is_sealed_once_its_window_is_there(engines: dict[str, Engine]) -> None:
    session, table = engines["window"].control.connection, BlockTable.of([5], first_block=3)
    opened = MakeOffer(request_id="r", num_tokens=10, tables={"window": table}, sealed=False)
    offer_id = (await session.request(opened)).offer_id
    with pytest.raises(RequestRefused, match="the table has 1 from block 3") as early:
        await session.request(SealOffer(offer_id=offer_id))
    more = BlockTable.of([6], first_block=4)
    await session.request(ExtendOffer(offer_id=offer_id, num_tokens=70, tables={"window": more}))
    await session.request(SealOffer(offer_id=offer_id))
    assert early.value.code is ErrorCode.GEOMETRY
