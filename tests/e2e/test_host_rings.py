"""A bounded ring between a device and its agent: who gets blocks, and for how long."""

import anyio
import pytest
import torch

from kvbus.engine import PrefillSession
from kvbus.errors import ClosedError, ErrorCode, GeometryError, LocalError
from kvbus.protocol import Outcome
from tests.agents import until
from tests.e2e.host_pairs import NUM_BLOCKS, SIZE, STATE, TENTH, saved, two
from tests.engines import FULL, failure_of, make_spec, same
from tests.expected import expected_after
from tests.host_engines import host_engine
from tests.memories import Memory

pytestmark = pytest.mark.anyio


async def test_a_cache_of_ten_rings_moves_in_requests_that_take_turns(prefill, decode):
    num_tokens = 2 * SIZE + 5
    async with two(prefill, decode) as (source, target):
        theirs = source.whole_blocks(5, NUM_BLOCKS * SIZE)["full"]
        ours = target.whole_blocks(6, NUM_BLOCKS * SIZE)["full"]
        wanted = target.snapshot()
        for at in range(0, NUM_BLOCKS, 3):
            some = [{"full": blocks[at : at + 3]} for blocks in (theirs, ours)]
            args = {"num_tokens": num_tokens}
            wanted = expected_after(wanted, source, some[0], target, some[1], **args)

        async def one(at: int) -> None:
            offer = await source.prefill.offer(
                str(at), num_tokens=num_tokens, block_ids={"full": theirs[at : at + 3]}
            )
            fetch = target.decode.fetch(
                offer.ticket, num_tokens=num_tokens, block_ids={"full": ours[at : at + 3]}
            )
            await fetch.completed()
            assert await offer.released() is Outcome.COMPLETED

        async with anyio.create_task_group() as tasks:
            for at in range(0, NUM_BLOCKS, 3):
                tasks.start_soon(one, at)

        assert same(target.snapshot(), wanted)
        assert source.ring.num_held == 0


async def test_a_full_ring_is_busy_until_an_offer_is_released(prefill, decode):
    async with two(prefill, decode) as (source, target):
        first = await saved(source, 6 * SIZE)

        with pytest.raises(LocalError, match="the host buffer is full") as refused:
            await source.host.begin("s", num_tokens=1)
        ticket = await first.offer()
        await first.seal()
        fetch = target.decode.fetch(ticket, num_tokens=SIZE, block_ids={"full": [7]})
        await fetch.completed()
        await first.released()
        second = await source.host.begin("s", num_tokens=1)
        await second.abort()

        assert refused.value.code is ErrorCode.BUSY


async def test_the_engines_blocks_are_its_own_as_soon_as_they_are_saved(prefill, decode):
    async with two(prefill, decode) as (source, target):
        before = source.views()[0, 0, "k"][3].clone()
        offer = await saved(source)
        source.fill(9)
        ticket = await offer.offer()
        await offer.seal()

        await target.decode.fetch(ticket, num_tokens=SIZE, block_ids={"full": [7]}).completed()

        assert torch.equal(target.views()[0, 0, "k"][7], before)


async def test_what_is_saved_arrives_on_the_other_device_while_the_rest_is_computed(
    prefill, decode
):
    async with two(prefill, decode) as (source, target):
        theirs, ours = source.views()[0, 0, "k"], target.views()[0, 0, "k"]
        offer = await source.host.begin("r", num_tokens=3 * SIZE)
        ticket = await offer.offer()
        fetch = target.decode.fetch(ticket, num_tokens=3 * SIZE, block_ids={"full": [10, 11, 12]})

        await offer.save(SIZE + 3, {"full": [3, 4]})
        await until(lambda: torch.equal(ours[10], theirs[3]))
        early = torch.equal(ours[11, :3], theirs[4, :3])
        await offer.save(3 * SIZE, {"full": [5]})
        await offer.seal()
        await fetch.completed()

        assert not early, "a block is loaded when all of it has landed"
        assert torch.equal(ours[10:13], theirs[3:6])


async def test_a_fetch_that_waits_for_room_fails_as_busy_after_a_while(prefill, decode):
    async with two(prefill, decode, wait_s=0.1) as (_, target):
        held = await target.ring.acquire(TENTH)

        failure = await failure_of(
            target.decode.fetch({}, num_tokens=SIZE, block_ids={"full": [7]})
        )
        target.ring.release(held)

        assert (failure.stage, failure.code) == ("requested", ErrorCode.BUSY)
        assert failure.blocks_free


async def test_a_fetch_that_waits_for_room_is_cancelled_at_once(prefill, decode):
    async with two(prefill, decode, wait_s=60.0) as (_, target):
        held = await target.ring.acquire(TENTH)
        fetch = target.decode.fetch({}, num_tokens=SIZE, block_ids={"full": [7]})
        await until(lambda: target.ring.num_waiting)

        await fetch.cancel()
        failure = await failure_of(fetch)
        target.ring.release(held)

        assert (failure.stage, failure.code) == ("requested", ErrorCode.CANCELLED)
        assert target.ring.num_waiting == 0


async def test_a_fetch_that_is_cancelled_before_anything_is_not_asked_for(prefill, decode):
    async with two(prefill, decode) as (_, target):
        fetch = target.decode.fetch({}, num_tokens=SIZE, block_ids={"full": [7]})

        await fetch.cancel()
        failure = await failure_of(fetch)

        assert (failure.stage, failure.code) == ("requested", ErrorCode.CANCELLED)


async def test_an_offer_is_sealed_only_when_all_of_it_is_saved(prefill):
    spec = make_spec(groups=(FULL, STATE))
    shape = {"memory": Memory(), "num_blocks": 8}
    async with host_engine(PrefillSession, prefill.attach, spec, **shape) as source:
        offer = await source.host.begin("r", num_tokens=20)
        await offer.offer()
        await offer.save(16, {"full": [3], "state": [1]})
        with pytest.raises(GeometryError, match="16 of 20 tokens"):
            await offer.seal()
        await offer.save(20, {"full": [4]})
        with pytest.raises(GeometryError, match="not the last state of state"):
            await offer.seal()
        await offer.save(20, {"state": [1]})
        await offer.seal()
        with pytest.raises(ClosedError, match="it is sealed"):
            await offer.save(20, {"state": [2]})

        await offer.abort()
        assert await offer.released() is Outcome.WITHDRAWN


@pytest.mark.parametrize(
    ("num_tokens", "block_ids", "reason"),
    [
        (17, {"full": [3]}, "17 tokens need 2 blocks of group 'full', 0 are known and 1 are given"),
        (16, {"full": [3, 4]}, "16 tokens need 1 blocks"),
        (16, {"full": [3], "other": [1]}, "the engine has no group other"),
        (21, {"full": [3, 4]}, "21 tokens are said to be ready, of 20"),
        (16, {"full": [-3]}, "block ids must be"),
        (16, {"full": [3], "state": [1, 2]}, "a state has one block, 2 are given"),
    ],
)
async def test_blocks_that_do_not_fit_the_tokens_are_refused_by_name(
    prefill, num_tokens, block_ids, reason
):
    spec = make_spec(groups=(FULL, STATE))
    shape = {"memory": Memory(), "num_blocks": 8}
    async with host_engine(PrefillSession, prefill.attach, spec, **shape) as source:
        offer = await source.host.begin("r", num_tokens=20)

        with pytest.raises(GeometryError, match=reason):
            await offer.save(num_tokens, block_ids)
        await offer.save(16, {"full": [3]})

        assert offer.num_saved == 16
        await offer.abort()


async def test_a_request_larger_than_the_ring_is_refused_on_either_side(prefill, decode):
    async with two(prefill, decode) as (source, target):
        with pytest.raises(GeometryError, match="there are only 6: make the host buffer larger"):
            await source.host.begin("r", num_tokens=7 * SIZE)
        with pytest.raises(GeometryError, match="there are only 6: make the host buffer larger"):
            target.decode.fetch({}, num_tokens=7 * SIZE, block_ids={"full": list(range(7))})
        with pytest.raises(GeometryError, match="need 2 blocks"):
            target.decode.fetch({}, num_tokens=SIZE + 1, block_ids={"full": [1]})
