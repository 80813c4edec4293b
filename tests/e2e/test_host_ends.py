"""Requests through a ring that abort, are cancelled or fail: what ends, and who has what then."""

import asyncio

import anyio
import pytest

from kvbus.bus import ask_agent
from kvbus.engine.bounce import Direction, HostOffer
from kvbus.errors import ClosedError, ErrorCode
from kvbus.protocol import Outcome, PeerWithdraw, Ticket
from tests.agents import until
from tests.e2e.host_pairs import SIZE, Gate, saved, two
from tests.engines import failure_of, same, works

pytestmark = pytest.mark.anyio

OFF_THE_BUS = OSError("the device fell off the bus")


@pytest.fixture
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is slow to say that a fetch is cancelled is waited for."""
    monkeypatch.setattr("kvbus.engine.bounce.decode.CLOSE_TIMEOUT_S", 30.0)


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
        ticket = Ticket.from_json(await offer.offer())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fails_to_save, offer, "its offer has ended")
            await until(lambda: gate.num_begun)
            by_router = PeerWithdraw(
                agent_boot=ticket.agent_boot, offer_id=ticket.offer_id, secret=ticket.secret
            )
            await ask_agent(ticket.endpoint, by_router, timeout_s=20.0)
            outcome = await offer.released()
            held = source.ring.num_held
            gate.open.set()

        assert outcome is Outcome.WITHDRAWN
        assert (held, source.ring.num_held) == (1, 0)


async def test_nothing_is_copied_into_blocks_that_were_released_between_two_pieces(prefill, decode):
    gate = Gate(Direction.SAVE)
    gate.open.set()
    wraps = (gate.wrap, lambda copy: copy)
    async with two(prefill, decode, wraps=wraps, piece_bytes=1) as (source, _):
        offer = await source.host.begin("r", num_tokens=2 * SIZE)
        await offer.offer()
        inner = offer._offer
        extend = inner.extend

        async def extend_and_lose(*args: object) -> None:
            """The reply is looked at when the offer has ended."""
            await extend(*args)
            await inner.withdraw()
            await inner.released()

        inner.extend = extend_and_lose
        with pytest.raises(ClosedError, match="its offer has ended"):
            await offer.save(2 * SIZE, {"full": [3, 4]})

        assert gate.num_begun == 1
        assert source.ring.num_held == 0


async def fails_to_save(offer: HostOffer, reason: str) -> None:
    """It does not get its block into the offer."""
    with pytest.raises(ClosedError, match=reason):
        await offer.save(SIZE, {"full": [3]})


@pytest.mark.parametrize("is_offered", [False, True], ids=["saved", "offered"])
async def test_a_cancelled_save_ends_after_its_copy_and_then_only_abort_is_left(
    prefill, decode, is_offered
):
    gate = Gate(Direction.SAVE)
    async with two(prefill, decode, wraps=(gate.wrap, lambda copy: copy)) as (source, _):
        offer = await source.host.begin("r", num_tokens=2 * SIZE)
        if is_offered:
            await offer.offer()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offer.save, SIZE, {"full": [3]})
            await until(lambda: gate.num_begun)
            tasks.cancel_scope.cancel()
            gate.open.set()

        with pytest.raises(ClosedError, match="did not end well"):
            await offer.save(2 * SIZE, {"full": [4]})
        await offer.abort()
        if is_offered:
            await offer.released()

        assert offer.num_saved == 0
        assert source.ring.num_held == 0


async def test_copies_are_not_cancelled_wherever_they_run(prefill, decode):
    async with two(prefill, decode) as (source, _):
        begun, goes_on = anyio.Event(), anyio.Event()
        inner = source.host.copier

        async def elsewhere(*args: object) -> None:
            """As one that asks other processes: any await of it could be cancelled."""
            begun.set()
            await goes_on.wait()
            await inner(*args)

        source.host.copier = elsewhere
        offer = await source.host.begin("r", num_tokens=SIZE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offer.save, SIZE, {"full": [3]})
            await begun.wait()
            tasks.cancel_scope.cancel()
            aborting = asyncio.create_task(offer.abort())
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            held = source.ring.num_held
            goes_on.set()
        await aborting

        assert (held, source.ring.num_held) == (1, 0)


async def test_what_the_engines_copy_raises_comes_out_of_save(prefill, decode):
    gate = Gate(Direction.SAVE, raises=OFF_THE_BUS)
    gate.open.set()
    async with two(prefill, decode, wraps=(gate.wrap, lambda copy: copy)) as (source, _):
        offer = await source.host.begin("r", num_tokens=SIZE)

        with pytest.raises(OSError, match="fell off the bus"):
            await offer.save(SIZE, {"full": [3]})
        await offer.abort()

        assert source.ring.num_held == 0


async def test_what_the_engines_copy_raises_ends_the_fetch_though_more_would_come(prefill, decode):
    gate = Gate(Direction.LOAD, raises=OFF_THE_BUS)
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
        gate.raises = None
        assert await works(source, target)


async def test_a_fetch_that_is_cancelled_while_it_is_read_leaves_the_device_alone(prefill, decode):
    async with two(prefill, decode) as (source, target):
        offer = await source.host.begin("r", num_tokens=3 * SIZE)
        ticket = await offer.offer()
        before = target.snapshot()
        fetch = target.decode.fetch(ticket, num_tokens=3 * SIZE, block_ids={"full": [10, 11, 12]})
        await until(lambda: decode.status()["counts"]["fetches"])

        await fetch.cancel()
        failure = await failure_of(fetch)
        await offer.abort()

        assert (failure.code, failure.blocks_free) == (ErrorCode.CANCELLED, True)
        assert decode.says("handoff.cancelled", fetch_id=fetch.fetch_id)
        assert same(target.snapshot(), before)
        assert await works(source, target)


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_no_end_is_reported_while_something_is_loaded(prefill, decode, patient_close, how):
    gate = Gate(Direction.LOAD)
    async with two(prefill, decode, wraps=(lambda copy: copy, gate.wrap)) as (source, target):
        offer = await source.host.begin("r", num_tokens=3 * SIZE)
        ticket = await offer.offer()
        fetch = target.decode.fetch(ticket, num_tokens=3 * SIZE, block_ids={"full": [10, 11, 12]})
        await offer.save(SIZE, {"full": [3]})
        await until(lambda: gate.num_begun)
        ends: list[object] = []
        fetch.when_ended(lambda: ends.append(target.snapshot()))

        seen: list[object] = []

        async def open_later() -> None:
            await until(lambda: not decode.status()["counts"]["fetches"])
            seen.extend([list(ends), target.ring.num_held])
            gate.open.set()

        opening = asyncio.create_task(open_later())  # a task group here would be left in disorder
        await (fetch.cancel() if how == "cancelled" else target.host.aclose())
        await opening
        failure = await failure_of(fetch)
        await until(lambda: not target.ring.num_held)
        await offer.abort()

        assert seen == [[], 3]
        assert failure.code is ErrorCode.CANCELLED
        assert same(ends[0], target.snapshot())


async def test_a_ticket_that_is_none_fails_its_fetch_alone(prefill, decode):
    async with two(prefill, decode) as (source, target):
        fetches = [
            target.decode.fetch({"v": odd}, num_tokens=SIZE, block_ids={"full": [7]})
            for odd in (object(), 3)
        ]

        failures = [await failure_of(fetch) for fetch in fetches]

        assert [failure.code for failure in failures] == [ErrorCode.INVALID] * 2
        assert await works(source, target)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_a_copy_that_ends_with_no_exception_fails_its_fetch_alone(prefill, decode, kind):
    gate = Gate(Direction.LOAD, raises=kind("panic"))
    gate.open.set()
    async with two(prefill, decode, wraps=(lambda copy: copy, gate.wrap)) as (source, target):
        offer = await saved(source)
        ticket = await offer.offer()
        await offer.seal()
        fetch = target.decode.fetch(ticket, num_tokens=SIZE, block_ids={"full": [7]})

        failure = await failure_of(fetch)
        await until(lambda: not target.ring.num_held)

        assert (failure.stage, failure.code) == ("loading", ErrorCode.TRANSFER_FAILED)
        assert f"ended with {kind.__name__}: panic" in failure.message
        gate.raises = None
        assert await works(source, target)


async def test_closing_a_host_decode_cancels_what_is_left(prefill, decode, patient_close):
    async with two(prefill, decode) as (source, target):
        offer = await source.host.begin("r", num_tokens=SIZE)
        ticket = await offer.offer()
        fetch = target.decode.fetch(ticket, num_tokens=SIZE, block_ids={"full": [7]})
        await until(lambda: decode.status()["counts"]["fetches"])

        await target.host.aclose()
        failure = await failure_of(fetch)
        await offer.abort()

        assert failure.code is ErrorCode.CANCELLED
        assert target.ring.num_held == 0
        with pytest.raises(ClosedError, match="not open"):
            target.decode.fetch(ticket, num_tokens=SIZE, block_ids={"full": [7]})
