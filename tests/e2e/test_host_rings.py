"""A bounded ring between a device and its agent: who gets blocks, and who gives them back when."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Event

import anyio
import pytest
import torch
from torch import Tensor

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.engine.host import CopyBlocks, Direction, HostBlocks, HostOffer
from kvbus.errors import ClosedError, ErrorCode, GeometryError, LocalError
from kvbus.geometry import StatePart, state_group
from kvbus.protocol.engine import Outcome
from tests.agents import AgentProcess, until
from tests.engines import FULL, failure_of, make_spec, same, works
from tests.expected import expected_after
from tests.host_engines import HostEngine, host_engine
from tests.memories import Memory

pytestmark = pytest.mark.anyio

STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))
NUM_BLOCKS, SIZE = 60, FULL.block_size
TENTH = {"full": NUM_BLOCKS // 10}


@dataclass
class Gate:
    """Stops copies in one direction while it is shut, and counts them; they may fail."""

    direction: Direction
    open: Event = field(default_factory=Event)
    fails: bool = False
    num_begun: int = 0

    def wrap(self, copy: CopyBlocks) -> CopyBlocks:
        def gated(blocks: HostBlocks, view: Tensor, direction: Direction) -> None:
            if direction is self.direction:
                self.num_begun += 1
                if not self.open.wait(60):
                    raise TimeoutError("the gate stayed shut")
                if self.fails:
                    raise OSError("the device fell off the bus")
            copy(blocks, view, direction)

        return gated


@asynccontextmanager
async def two(
    prefill: AgentProcess,
    decode: AgentProcess,
    *,
    rings: tuple[dict[str, int], dict[str, int]] = (TENTH, TENTH),
    wraps: tuple[Callable[[CopyBlocks], CopyBlocks], ...] = (lambda copy: copy,) * 2,
    **more: float,
) -> AsyncIterator[tuple[HostEngine, HostEngine]]:
    """A prefill and a decode engine, each with a cache of ten times its ring."""
    shape = {"memory": Memory(), "num_blocks": NUM_BLOCKS, **more}
    specs = [make_spec(groups=(FULL,)) for _ in range(2)]
    async with (
        host_engine(
            PrefillSession,
            prefill.attach,
            specs[0],
            seed=1,
            ring_blocks=rings[0],
            wrap_copy=wraps[0],
            **shape,
        ) as source,
        host_engine(
            DecodeSession,
            decode.attach,
            specs[1],
            seed=2,
            ring_blocks=rings[1],
            wrap_copy=wraps[1],
            **shape,
        ) as target,
    ):
        yield source, target


async def saved(source: HostEngine, num_tokens: int = SIZE, block: int = 3) -> HostOffer:
    """A request of ``num_tokens`` tokens from ``block`` on, saved and not offered."""
    offer = await source.host.begin("r", num_tokens=num_tokens, wait_s=20.0)
    blocks = -(-num_tokens // SIZE)
    await offer.save(num_tokens, {"full": list(range(block, block + blocks))})
    return offer


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

        with pytest.raises(LocalError, match="the ring is full") as refused:
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


async def test_requests_that_abort_give_their_blocks_back_whatever_they_have_done(prefill, decode):
    async with two(prefill, decode) as (source, _):
        begun = await source.host.begin("a", num_tokens=SIZE)
        only_saved = await saved(source)
        offered = await saved(source)
        await offered.offer()
        held = source.ring.num_held

        for offer in (begun, only_saved, offered):
            await offer.abort()
        outcome = await offered.released()

        assert (held, source.ring.num_held) == (3, 0)
        assert outcome is Outcome.WITHDRAWN
        for offer in (begun, only_saved, offered):
            with pytest.raises(ClosedError, match="it was aborted"):
                await offer.save(SIZE, {"full": [3]})


async def test_blocks_that_are_copied_into_are_kept_though_the_request_aborts(prefill, decode):
    gate = Gate(Direction.SAVE)
    async with two(prefill, decode, wraps=(gate.wrap, lambda copy: copy)) as (source, _):
        offer = await source.host.begin("r", num_tokens=SIZE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fails_to_save, offer, "it was aborted")
            await until(lambda: gate.num_begun)
            tasks.start_soon(offer.abort)
            await anyio.wait_all_tasks_blocked()
            held = source.ring.num_held
            gate.open.set()

        assert (held, source.ring.num_held) == (1, 0)


async def test_blocks_that_are_copied_into_are_kept_though_the_offer_ends(prefill, decode):
    gate = Gate(Direction.SAVE)
    async with two(prefill, decode, wraps=(gate.wrap, lambda copy: copy)) as (source, _):
        offer = await source.host.begin("r", num_tokens=SIZE)
        await offer.offer(ttl_s=0.1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fails_to_save, offer, "its offer has ended")
            await until(lambda: gate.num_begun)
            outcome = await offer.released()
            held = source.ring.num_held
            gate.open.set()

        assert outcome is Outcome.EXPIRED
        assert (held, source.ring.num_held) == (1, 0)


async def fails_to_save(offer: HostOffer, reason: str) -> None:
    """It does not get its block into the offer."""
    with pytest.raises(ClosedError, match=reason):
        await offer.save(SIZE, {"full": [3]})


async def test_a_cancelled_save_ends_after_its_copy_and_then_only_abort_is_left(prefill, decode):
    gate = Gate(Direction.SAVE)
    async with two(prefill, decode, wraps=(gate.wrap, lambda copy: copy)) as (source, _):
        offer = await source.host.begin("r", num_tokens=2 * SIZE)
        await offer.offer()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offer.save, SIZE, {"full": [3]})
            await until(lambda: gate.num_begun)
            tasks.cancel_scope.cancel()
            gate.open.set()

        with pytest.raises(ClosedError, match="did not end well"):
            await offer.save(2 * SIZE, {"full": [4]})
        await offer.abort()
        await offer.released()

        assert source.ring.num_held == 0


async def test_what_the_engines_copy_raises_comes_out_of_save(prefill, decode):
    gate = Gate(Direction.SAVE, fails=True)
    gate.open.set()
    async with two(prefill, decode, wraps=(gate.wrap, lambda copy: copy)) as (source, _):
        offer = await source.host.begin("r", num_tokens=SIZE)

        with pytest.raises(OSError, match="fell off the bus"):
            await offer.save(SIZE, {"full": [3]})
        await offer.abort()

        assert source.ring.num_held == 0


async def test_what_the_engines_copy_raises_ends_the_fetch_though_more_would_come(prefill, decode):
    gate = Gate(Direction.LOAD, fails=True)
    gate.open.set()
    async with two(prefill, decode, wraps=(lambda copy: copy, gate.wrap)) as (source, target):
        offer = await source.host.begin("r", num_tokens=3 * SIZE)
        await offer.save(SIZE, {"full": [3]})
        ticket = await offer.offer()
        fetch = target.decode.fetch(ticket, num_tokens=3 * SIZE, block_ids={"full": [10, 11, 12]})

        with anyio.fail_after(20):  # much sooner than the fetch's deadline
            failure = await failure_of(fetch)
        await offer.abort()

        assert (failure.stage, failure.code) == ("loading", ErrorCode.TRANSFER_FAILED)
        assert "fell off the bus" in failure.message
        assert isinstance(failure.__cause__, OSError)
        gate.fails = False
        assert await works(source, target)


@pytest.mark.parametrize("landed", [False, True], ids=["while reading", "while loading"])
async def test_a_cancelled_fetch_ends_when_nothing_is_loaded_any_more(prefill, decode, landed):
    gate = Gate(Direction.LOAD)
    async with two(prefill, decode, wraps=(lambda copy: copy, gate.wrap)) as (source, target):
        offer = await source.host.begin("r", num_tokens=3 * SIZE)
        ticket = await offer.offer()
        before = target.snapshot()
        fetch = target.decode.fetch(ticket, num_tokens=3 * SIZE, block_ids={"full": [10, 11, 12]})
        if landed:
            await offer.save(SIZE, {"full": [3]})
            await until(lambda: gate.num_begun)

        await fetch.cancel()
        early = fetch.over.is_set()
        gate.open.set()
        failure = await failure_of(fetch)
        await offer.abort()

        assert not early
        assert (failure.code, failure.blocks_free) == (ErrorCode.CANCELLED, True)
        assert same(target.snapshot(), before) is not landed
        assert await works(source, target)


async def test_a_fetch_that_waits_for_room_fails_as_busy_after_a_while(prefill, decode):
    async with two(prefill, decode, wait_s=0.1) as (_, target):
        held = await target.ring.take(TENTH)

        failure = await failure_of(
            target.decode.fetch({}, num_tokens=SIZE, block_ids={"full": [7]})
        )
        target.ring.give(held)

        assert (failure.stage, failure.code) == ("requested", ErrorCode.BUSY)
        assert failure.blocks_free


async def test_a_fetch_that_waits_for_room_is_cancelled_at_once(prefill, decode):
    async with two(prefill, decode, wait_s=60.0) as (_, target):
        held = await target.ring.take(TENTH)
        fetch = target.decode.fetch({}, num_tokens=SIZE, block_ids={"full": [7]})
        await until(lambda: target.ring.num_waiting)

        await fetch.cancel()
        failure = await failure_of(fetch)
        target.ring.give(held)

        assert (failure.stage, failure.code) == ("requested", ErrorCode.CANCELLED)
        assert target.ring.num_waiting == 0


async def test_a_fetch_that_is_cancelled_before_anything_is_not_asked_for(prefill, decode):
    async with two(prefill, decode) as (_, target):
        fetch = target.decode.fetch({}, num_tokens=SIZE, block_ids={"full": [7]})

        await fetch.cancel()
        failure = await failure_of(fetch)

        assert (failure.stage, failure.code) == ("requested", ErrorCode.CANCELLED)


async def test_closing_a_host_decode_cancels_what_is_left(prefill, decode):
    async with two(prefill, decode) as (source, target):
        offer = await source.host.begin("r", num_tokens=SIZE)
        ticket = await offer.offer()
        fetch = target.decode.fetch(ticket, num_tokens=SIZE, block_ids={"full": [7]})
        await until(lambda: decode.status()["counts"]["fetches"])

        await target.host.__aexit__(None, None, None)
        failure = await failure_of(fetch)
        await offer.abort()

        assert failure.code is ErrorCode.CANCELLED
        assert target.ring.num_held == 0
        with pytest.raises(ClosedError, match="not open"):
            target.decode.fetch(ticket, num_tokens=SIZE, block_ids={"full": [7]})


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
        with pytest.raises(GeometryError, match="the whole ring has 6: make the ring larger"):
            await source.host.begin("r", num_tokens=7 * SIZE)
        with pytest.raises(GeometryError, match="the whole ring has 6: make the ring larger"):
            target.decode.fetch({}, num_tokens=7 * SIZE, block_ids={"full": list(range(7))})
        with pytest.raises(GeometryError, match="need 2 blocks"):
            target.decode.fetch({}, num_tokens=SIZE + 1, block_ids={"full": [1]})
