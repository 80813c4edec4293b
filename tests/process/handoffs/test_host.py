"""Engines with a ring of host blocks, in an event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import anyio
import pytest
from torch import Tensor

from kvbus.bus import call_agent
from kvbus.engine import KvCache
from kvbus.engine.bounce import BlockCopy, CopyBlocks, Direction, HostFetch, HostOffer
from kvbus.errors import ClosedError, ErrorCode, GeometryError
from kvbus.geometry import StatePart, state_group
from kvbus.lab.lab_engine import device_copy
from kvbus.protocol import Outcome, PeerWithdraw, Ticket
from tests.support.agents import AgentProcess, until
from tests.support.engines import (
    FULL,
    Blocks,
    Engine,
    engine,
    failure_of,
    make_spec,
    pair,
    same,
    works,
)
from tests.support.expected import expected_after

pytestmark = pytest.mark.anyio

NUM_BLOCKS, SIZE = 60, FULL.block_size
TENTH = {"full": NUM_BLOCKS // 10}
ONE_BLOCK: dict[str, Any] = {"num_tokens": SIZE, "block_ids": {"full": [7]}}
THREE_BLOCKS: dict[str, Any] = {"num_tokens": 3 * SIZE, "block_ids": {"full": [10, 11, 12]}}
STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))
OFF_THE_BUS = OSError("the device fell off the bus")


@dataclass
class Gate:
    """Stops copies in one direction while it is shut, and counts them; they may fail."""

    direction: Direction
    raises: BaseException | None = None
    open: Event = field(default_factory=Event)
    num_begun: int = 0

    def copy_of(self, caches: Sequence[KvCache]) -> CopyBlocks:
        copy = device_copy(caches)

        def gated(blocks: BlockCopy, view: Tensor, direction: Direction) -> None:
            if direction is self.direction:
                self.num_begun += 1
                if self.raises is not None:
                    raise self.raises
                assert self.open.wait(60), "the gate stayed shut"
            copy(blocks, view, direction)

        return gated


def source_at(prefill: AgentProcess, **more: Any) -> AbstractAsyncContextManager[Engine]:
    """An engine with a state beside its KV."""
    spec = make_spec(groups=(FULL, STATE))
    return engine(prefill.attach, spec, num_blocks=8, ring_blocks=8, **more)


def two(
    prefill: AgentProcess, decode: AgentProcess, **more: Any
) -> AbstractAsyncContextManager[tuple[Engine, Engine]]:
    """Engines with caches of ten times the blocks of their rings."""
    more |= {"num_blocks": NUM_BLOCKS, "ring_blocks": TENTH}
    return pair(prefill.attach, decode.attach, **more)


async def offered(source: Engine, num_tokens: int = SIZE) -> HostOffer:
    return await source.host.offer("r", num_tokens=num_tokens, wait_s=60.0)


async def whole_fetch(source: Engine, target: Engine) -> HostFetch:
    offer = await offered(source, 3 * SIZE)
    await offer.save(3 * SIZE, {"full": [3, 4, 5]})
    await offer.seal()
    return target.fetch(offer.ticket, **THREE_BLOCKS)


async def withdraw(ticket: Mapping[str, Any]) -> None:
    read = Ticket.from_json(ticket)
    message = PeerWithdraw(agent_boot=read.agent_boot, offer_id=read.offer_id, secret=read.secret)
    await call_agent(read.endpoint, message, timeout_s=60.0)


async def test_wrong_request_fails_alone_and_releases_host_blocks(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    wrong: dict[str, Any] = {"nonsense": 1}
    async with two(prefill, decode) as (source, target):
        offer = await offered(source)
        with pytest.raises(TypeError, match="nonsense"):
            await source.host.offer("other", num_tokens=SIZE, **wrong)
        assert source.host.pool.num_held == 1
        failure = await failure_of(target.decode.fetch(offer.ticket, **ONE_BLOCK, **wrong))
        no_ticket = await failure_of(target.decode.fetch({"v": object()}, **ONE_BLOCK))
        assert failure.code is no_ticket.code is ErrorCode.INVALID
        assert "nonsense" in failure.message
        assert target.host.pool.num_held == 0
        await offer.withdraw()
        assert await works(source, target)


async def test_a_cache_of_ten_rings_moves_in_requests_that_take_turns(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    num_tokens = 2 * SIZE + 5
    async with two(prefill, decode) as (source, target):
        blocks = [one.whole_blocks(5, NUM_BLOCKS * SIZE)["full"] for one in (source, target)]
        wanted = target.snapshot()

        async def one(theirs: Blocks, ours: Blocks) -> None:
            offer = await source.prefill.offer(str(theirs), num_tokens=num_tokens, block_ids=theirs)
            fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
            await fetch.ended
            assert await offer.ended is Outcome.COMPLETED

        async with anyio.create_task_group() as tasks:
            for at in range(0, NUM_BLOCKS, 3):
                theirs, ours = ({"full": some[at : at + 3]} for some in blocks)
                wanted = expected_after(wanted, source, theirs, target, ours, num_tokens=num_tokens)
                tasks.start_soon(one, theirs, ours)
        assert same(target.snapshot(), wanted)


async def test_engine_gets_saved_blocks_before_the_rest_is_computed(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with two(prefill, decode) as (source, target):
        theirs, ours = source.views()[0, 0, "k"], target.views()[0, 0, "k"]
        sent = theirs[3:6].clone()
        offer = await offered(source, 3 * SIZE)
        fetch = target.decode.fetch(offer.ticket, **THREE_BLOCKS)
        await offer.save(SIZE + 3, {"full": [3, 4]})
        theirs[3] = 0
        await offer.save(3 * SIZE, {"full": [5]})
        await offer.seal()
        await fetch.ended
        assert ours[10:13].equal(sent)


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["after a while", "cancelled"])
async def test_a_fetch_that_waits_for_room_fails_and_was_not_asked_for(
    prefill: AgentProcess, decode: AgentProcess, is_cancelled: bool
) -> None:
    async with two(prefill, decode, wait_s=60.0 if is_cancelled else 0.1) as (_, target):
        held = await target.ring.acquire(TENTH)
        fetch = target.decode.fetch({}, **ONE_BLOCK)
        if is_cancelled:
            await anyio.wait_all_tasks_blocked()
            await fetch.cancel()
        failure = await failure_of(fetch)
        target.ring.release(held)
        code = ErrorCode.CANCELLED if is_cancelled else ErrorCode.BUSY
        assert (failure.stage, failure.code, failure.blocks_free) == ("requested", code, True)
        assert target.ring.num_held == 0


REFUSED: list[tuple[int, dict[str, list[int]], str]] = [
    (17, {"full": [3]}, "need 2 blocks from block 0 on, the table has 1"),
    (16, {"full": [3], "other": [1]}, "the engine has no group other"),
    (21, {"full": [3, 4]}, "num_tokens must be 0 to 20, not 21"),
    (16, {"full": [-3]}, "block ids must be"),
    (16, {"full": [3], "state": [1, 2]}, "need 1 blocks from block 0 on, the table has 2"),
]


async def test_offer_seals_only_when_all_is_saved_in_fitting_blocks(prefill: AgentProcess) -> None:
    async with source_at(prefill) as source:
        offer = await offered(source, 20)
        for num_tokens, block_ids, reason in REFUSED:
            with pytest.raises(GeometryError, match=reason):
                await offer.save(num_tokens, block_ids)
        await offer.save(16, {"full": [3], "state": [1]})
        with pytest.raises(GeometryError, match="16 of 20 tokens"):
            await offer.seal()
        await offer.save(20, {"full": [4]})
        with pytest.raises(GeometryError, match=r"not the states \['state'\]"):
            await offer.seal()
        await offer.save(20, {"state": [1]})
        await offer.seal()
        with pytest.raises(ClosedError, match="it is sealed"):
            await offer.save(20, {"state": [2]})
        await offer.withdraw()
        assert await offer.ended is Outcome.WITHDRAWN


@pytest.mark.parametrize("who", ["the engine", "a router"])
async def test_blocks_under_copy_are_kept_when_offer_is_withdrawn(
    prefill: AgentProcess, who: str
) -> None:
    gate = Gate(Direction.SAVE)
    why = "its offer has ended" if who == "a router" else "it was withdrawn"
    async with source_at(prefill, copy_of=gate.copy_of) as source:
        offer = await offered(source, 2 * SIZE)

        async def fails_to_save(num_tokens: int, block: int) -> None:
            with pytest.raises(ClosedError, match=why):
                await offer.save(num_tokens, {"full": [block]})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fails_to_save, SIZE, 3)
            await until(lambda: gate.num_begun)
            await (withdraw(offer.ticket) if who == "a router" else offer.withdraw())
            await offer.ended
            held = source.ring.num_held
            gate.open.set()
        await fails_to_save(2 * SIZE, 4)
        assert held
        assert (offer.num_saved, source.ring.num_held) == (0, 0)


async def test_error_of_engines_copy_fails_save_and_fetch(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with source_at(prefill, copy_of=Gate(Direction.SAVE, OFF_THE_BUS).copy_of) as source:
        offer = await offered(source)
        with pytest.raises(OSError, match="fell off the bus"):
            await offer.save(SIZE, {"full": [3]})
        await offer.withdraw()
    gate = Gate(Direction.LOAD, OFF_THE_BUS)
    async with two(prefill, decode, copy_of=gate.copy_of) as (source, target):
        failure = await failure_of(await whole_fetch(source, target))
        await until(lambda: not target.ring.num_held)
        assert (failure.stage, failure.code) == ("loading", ErrorCode.TRANSFER_FAILED)
        assert "fell off the bus" in failure.message
        assert failure.__cause__ is OFF_THE_BUS
        gate.raises = None
        gate.open.set()
        assert await works(source, target)


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_load_completes_before_the_end_is_reported(
    prefill: AgentProcess, decode: AgentProcess, how: str
) -> None:
    gate = Gate(Direction.LOAD)
    async with two(prefill, decode, copy_of=gate.copy_of) as (source, target):
        fetch = await whole_fetch(source, target)
        await until(lambda: gate.num_begun)
        seen: list[Any] = []

        async def open_later() -> None:
            await anyio.sleep(0.1)
            seen.extend([fetch.ended.done(), target.ring.num_held])
            gate.open.set()

        opening = asyncio.create_task(open_later())  # a task group here would be left in disorder
        await (fetch.cancel() if how == "cancelled" else target.control.aclose())
        await opening
        fetched = await fetch.ended
        assert seen == [False, 3]
        assert fetched.outcome is Outcome.COMPLETED
        assert target.views()[0, 0, "k"][10:13].equal(source.views()[0, 0, "k"][3:6])
        if how == "cancelled":
            await until(lambda: not target.ring.num_held)
            assert await works(source, target)


@pytest.mark.parametrize("ends", ["cancelled", "withdrawn"])
async def test_an_abort_before_all_is_saved_loads_nothing(
    prefill: AgentProcess, decode: AgentProcess, ends: str
) -> None:
    gate = Gate(Direction.LOAD)
    async with two(prefill, decode, copy_of=gate.copy_of) as (source, target):
        offer = await offered(source, 3 * SIZE)
        await offer.save(SIZE, {"full": [3]})
        fetch = target.decode.fetch(offer.ticket, **THREE_BLOCKS)
        await until(lambda: decode.status()["counts"]["fetches"])
        await (fetch.cancel() if ends == "cancelled" else offer.withdraw())
        failure = await failure_of(fetch)
        await offer.withdraw()
        await until(lambda: not target.ring.num_held)
        assert failure.blocks_free
        assert (failure.code is ErrorCode.CANCELLED) is (ends == "cancelled")
        assert gate.num_begun == 0
        gate.open.set()
        assert await works(source, target)
