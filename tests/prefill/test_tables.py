"""Which block tables an offer may have: those that hold what its tokens need of every group."""

import pytest

from kvbus.agent import LocalEngine
from kvbus.errors import ErrorCode, GeometryError, RequestRefused
from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, StatePart, state_group
from kvbus.protocol import ExtendOffer, MakeOffer, SealOffer
from kvbus_prefill.requests import check_tables
from tests.engines import make_spec
from tests.prefill.inside import PrefillAgent

FULL = GroupSpec("full", (0,), 16, 2, 8, "bfloat16")
WINDOW = GroupSpec("window", (1,), 16, 2, 8, "bfloat16", window=20)
STATE = state_group("state", (2,), (StatePart("conv", 1, 64),))


def check(
    group: GroupSpec, num_blocks: int, first_block: int, num_tokens: int, *, sealed: bool = True
) -> None:
    """Check a table of ``num_blocks`` blocks."""
    engine = LocalEngine(EngineSpec("engine", "model", 1, (group,)))
    table = BlockTable.of(range(num_blocks), first_block=first_block)
    check_tables(engine, {group.name: table}, num_tokens, sealed=sealed)


@pytest.mark.parametrize(
    ("group", "num_blocks", "first_block", "num_tokens"),
    [
        (FULL, 0, 0, 0),
        (FULL, 1, 0, 1),
        (FULL, 2, 0, 32),
        (FULL, 3, 0, 33),
        (FULL, 4, 0, 33),
        (WINDOW, 3, 0, 40),
        (WINDOW, 2, 1, 40),
        (WINDOW, 2, 1, 36),
        (WINDOW, 0, 5, 0),
        (STATE, 1, 0, 1),
        (STATE, 1, 0, 1000),
        (STATE, 1, 0, 0),
        (STATE, 0, 0, 0),
    ],
)
def test_a_table_that_holds_what_its_tokens_need_is_taken(
    group: GroupSpec, num_blocks: int, first_block: int, num_tokens: int
) -> None:
    check(group, num_blocks, first_block, num_tokens)


@pytest.mark.parametrize(
    ("group", "num_blocks", "first_block", "num_tokens", "words"),
    [
        (FULL, 2, 0, 33, "33 tokens need 3 blocks"),
        (FULL, 2, 1, 33, "must start at block 0"),
        (WINDOW, 2, 0, 40, "40 tokens need 3 blocks"),
        (WINDOW, 1, 2, 40, "starts in block 1, the table in 2"),
        (WINDOW, 2, 1, 35, "starts in block 0, the table in 1"),
        (STATE, 0, 0, 1, "1 tokens need 1 blocks"),
        (STATE, 2, 0, 1, "one block, not 2"),
        (STATE, 1, 1, 1, "one block, not 2"),
        (STATE, 0, 1, 1, "must start at block 0"),
    ],
)
def test_a_table_that_does_not_is_refused(
    group: GroupSpec, num_blocks: int, first_block: int, num_tokens: int, words: str
) -> None:
    with pytest.raises(GeometryError, match=words):
        check(group, num_blocks, first_block, num_tokens)


def test_an_open_offer_may_lack_blocks_that_its_window_will_not_need_in_the_end() -> None:
    check(WINDOW, 1, 3, 10, sealed=False)

    with pytest.raises(GeometryError, match="starts in block 0, the table in 3"):
        check(WINDOW, 1, 3, 10, sealed=True)


def test_an_open_offer_reaches_as_far_as_its_tokens() -> None:
    with pytest.raises(GeometryError, match="need 5 blocks"):
        check(WINDOW, 1, 3, 80, sealed=False)


@pytest.mark.anyio
async def test_an_open_offer_is_sealed_once_its_window_is_in_its_table(agent: PrefillAgent) -> None:
    table = BlockTable.of([5], first_block=3)
    opened = MakeOffer(request_id="r", num_tokens=10, tables={"window": table}, sealed=False)
    async with agent.engine(make_spec(groups=[WINDOW])) as source:
        offer_id = (await source.prefill.request(opened)).offer_id
        with pytest.raises(RequestRefused) as early:
            await source.prefill.request(SealOffer(offer_id=offer_id))
        more = BlockTable.of([6], first_block=4)
        extended = ExtendOffer(offer_id=offer_id, num_tokens=70, tables={"window": more})
        await source.prefill.request(extended)
        await source.prefill.request(SealOffer(offer_id=offer_id))

    assert early.value.code is ErrorCode.GEOMETRY
