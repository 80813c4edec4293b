"""Digests that a prefill agent makes: of an offer's bytes, for who may read them, and no others."""

from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import BlockTable
from kvbus.planning import chosen_pieces, num_pieces, piece_of
from kvbus.protocol import Digest
from tests.engines import FULL, NUM_BLOCKS
from tests.prefill.leases import BOX, SECRET, TABLE, Case

pytestmark = pytest.mark.anyio


def digest(case: Case, **changes: Any) -> Digest:
    asked = Digest(
        agent_boot=case.agent.boot,
        engine_id=case.source.spec.engine_id,
        memory_id=case.local.memory_id,
        offer_id=case.offer_id,
        rank=0,
        box=BOX,
        table=TABLE,
        one_in=1,
        secret=case.secret,
        access=case.local.access,
    )
    for path, new in changes.items():
        value = new
        name, _, inner = path.partition("__")
        changed = (
            msgspec.structs.replace(getattr(asked, name), **{inner: value}) if inner else value
        )
        asked = msgspec.structs.replace(asked, **{name: changed})
    return asked


def wanted(case: Case) -> list[int]:
    """The digest of each piece of `BOX`, token by token."""
    views, digests = case.source.views(), []
    for number in range(num_pieces(BOX)):
        piece = piece_of(BOX, number)
        view = views[0, piece.layer, piece.part]
        rows = [
            view[[7, 3, 5][at // 16], at % 16, piece.head].contiguous().numpy().tobytes()
            for at in range(piece.start, piece.stop)
        ]
        digests.append(xxhash.xxh3_64_intdigest(b"".join(rows)))
    return digests


async def test_they_are_those_of_the_tokens_one_after_the_other(case: Case) -> None:
    told = await case.reader.ask(digest(case))

    assert np.frombuffer(told.digests, "<u8").tolist() == wanted(case)


async def test_they_are_of_what_is_in_memory_now(case: Case) -> None:
    before = await case.reader.ask(digest(case))

    case.source.views()[0, 1, "v"][3, 5, 2, 7] ^= 1
    after = await case.reader.ask(digest(case))

    old, new = (np.frombuffer(told.digests, "<u8") for told in (before, after))
    (number,) = np.flatnonzero(old != new).tolist()
    assert piece_of(BOX, number)[:3] == (1, "v", 2)
    assert new.tolist() == wanted(case)


async def test_a_few_of_them_are_those_that_the_reader_expects(case: Case) -> None:
    told = await case.reader.ask(digest(case, one_in=3))

    chosen = chosen_pieces(BOX, offer_id=case.offer_id, one_in=3).tolist()
    should_be = wanted(case)
    assert 0 < len(chosen) < num_pieces(BOX)
    assert np.frombuffer(told.digests, "<u8").tolist() == [should_be[one] for one in chosen]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"agent_boot": "earlier"}, ErrorCode.STALE, "earlier process"),
        ({"engine_id": "another"}, ErrorCode.ENGINE_LOST, "has ended"),
        ({"memory_id": "earlier"}, ErrorCode.STALE, "other memory"),
        ({"access": SECRET}, ErrorCode.FORBIDDEN, "not yours"),
        ({"secret": SECRET}, ErrorCode.FORBIDDEN, "not yours"),
        ({"offer_id": "another"}, ErrorCode.OFFER_UNKNOWN, "no offer"),
        ({"rank": 1}, ErrorCode.GEOMETRY, "rank 1"),
        ({"table": BlockTable.of([7, 3])}, ErrorCode.GEOMETRY, "need 3 blocks"),
        ({"table": BlockTable.of([7, 3, NUM_BLOCKS])}, ErrorCode.GEOMETRY, "out of range"),
        ({"table": BlockTable.of([7, 3, 6])}, ErrorCode.GEOMETRY, "not those of the offer"),
        ({"box__group": "none"}, ErrorCode.GEOMETRY, "no group 'none'"),
        ({"box__layers": (0, 2)}, ErrorCode.GEOMETRY, "layers"),
        ({"box__parts": ("latent",)}, ErrorCode.GEOMETRY, "parts"),
        ({"box__num_heads": FULL.num_kv_heads}, ErrorCode.GEOMETRY, "heads 1 to 7"),
        ({"box__num_heads": 2**31 - 1}, ErrorCode.GEOMETRY, "smaller one"),
        ({"box__stop": 41}, ErrorCode.GEOMETRY, "token 41"),
        ({"box__start": 40}, ErrorCode.GEOMETRY, "0 blocks"),
    ],
)
async def test_what_is_not_the_readers_to_see_is_refused(
    case: Case, changes: dict[str, Any], code: ErrorCode, words: str
) -> None:
    with pytest.raises(RequestRefused, match=words) as refused:
        await case.reader.ask(digest(case, **changes))

    assert refused.value.code is code


async def test_an_offer_that_is_over_has_none(case: Case) -> None:
    await case.confirm()

    with pytest.raises(RequestRefused) as refused:
        await case.reader.ask(digest(case))

    assert refused.value.code is ErrorCode.OFFER_COMPLETED


async def test_tokens_that_are_not_ready_have_none(case: Case) -> None:
    offer = await case.source.prefill.offer(
        "open", num_tokens=20, block_ids={"full": [1, 2]}, sealed=False
    )
    table = BlockTable.of([1, 2])
    own = {"offer_id": offer.offer_id, "secret": offer.ticket["secret"], "table": table}

    ready = await case.reader.ask(digest(case, **own, box__stop=20))
    with pytest.raises(RequestRefused) as refused:
        await case.reader.ask(digest(case, **own, box__stop=21))
    await offer.withdraw()

    assert len(ready.digests) == 8 * num_pieces(msgspec.structs.replace(BOX, stop=20))
    assert refused.value.code is ErrorCode.GEOMETRY


async def test_another_engines_offer_opens_nothing(case: Case) -> None:
    async with case.agent.engine() as other:
        memory = {"engine_id": other.spec.engine_id, "access": case.agent.local(other).access}
        asked = digest(case, **memory, memory_id=case.agent.local(other).memory_id)
        with pytest.raises(RequestRefused) as refused:
            await case.reader.ask(asked)

    assert refused.value.code is ErrorCode.FORBIDDEN
