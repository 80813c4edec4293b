"""Offers that wait for a queued request of the decode engine, between two real agents."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import Outcome, Rendezvous, new_secret
from kvbus.errors import RequestRefused
from kvbus.protocol import HoldOffer
from tests.support.agents import until
from tests.support.engines import ONE_BLOCK, Engine, engine, failure_of, make_spec
from tests.support.pageless import link_without_page
from tests.unit.decode.neighbours import Neighbours, neighbours

pytestmark = pytest.mark.anyio

TTL_S = 0.6
NUM_TOKENS = 32


@pytest.fixture(autouse=True)
def _short_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus_decode.holds.KEEP_S", 0.9)
    monkeypatch.setattr("kvbus.engine.holds.HOLD_AFTER_S", 0.01)
    monkeypatch.setattr("kvbus.engine.holds.RETRY_S", 0.05)


async def offered(source: Engine, name: str = "r", **options: Any) -> Any:
    blocks = source.some_blocks(3, NUM_TOKENS)
    options = {"ttl_s": TTL_S, **options}
    return await source.prefill.offer(name, num_tokens=NUM_TOKENS, block_ids=blocks, **options)


def holds(both: Neighbours) -> int:
    return both.decode.service.counts()["holds"]


async def fetched(target: Engine, ticket: Any) -> None:
    blocks = target.some_blocks(4, NUM_TOKENS)
    await target.decode.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=blocks).ended


async def outlives_others(source: Engine, hold: Any, number: int = 2) -> None:
    """Each offer without a hold is made later than the held one, and ends earlier."""
    for one in range(number):
        other = await offered(source, f"other {one}", ttl_s=2 * TTL_S)
        assert await other.ended is Outcome.EXPIRED
        assert not hold.ended.done()


async def test_held_offer_outlives_its_ttl_and_is_read(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        offer = await offered(source)
        target.decode.hold(offer.ticket)
        await outlives_others(source, offer)
        assert holds(both) == 1
        await fetched(target, offer.ticket)
        assert await offer.ended is Outcome.COMPLETED
        assert holds(both) == 0


@pytest.mark.parametrize("is_named", [False, True])
async def test_offer_of_a_fetch_that_waits_in_the_agent_is_held(
    both: Neighbours, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Its data process does not run, so no handshake ends."""
    monkeypatch.setattr("kvbus_decode.holds.LATE_S", 0.05)
    async with both.engines() as (source, target):
        endpoint = both.prefill.runtime.agent.identity.peer_endpoint
        name = new_secret() if is_named else None
        offer = await offered(source, transfer_id=name)
        ticket = offer.ticket
        if name is not None:
            ticket = Rendezvous(transfer_id=name, endpoint=endpoint).to_json()
        os.kill(both.decode.agent.data.status().pid, signal.SIGSTOP)
        try:
            blocks = target.some_blocks(4, NUM_TOKENS)
            fetch = target.decode.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=blocks)
            await outlives_others(source, offer)
            assert holds(both) == 1
        finally:
            os.kill(both.decode.agent.data.status().pid, signal.SIGCONT)
        await fetch.ended
        assert await offer.ended is Outcome.COMPLETED
        assert holds(both) == 0


async def test_rendezvous_is_held_by_name_before_its_offer(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        endpoint = both.prefill.runtime.agent.identity.peer_endpoint
        named = Rendezvous(transfer_id=new_secret(), endpoint=endpoint).to_json()
        target.decode.hold(named)
        await until(lambda: holds(both) == 1)
        offer = await offered(source, transfer_id=named["transfer_id"])
        await outlives_others(source, offer)
        await fetched(target, named)
        assert await offer.ended is Outcome.COMPLETED
        assert holds(both) == 0


async def test_released_ticket_is_held_no_longer(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        offer = await offered(source, ttl_s=60.0)
        target.decode.hold(offer.ticket)
        await until(lambda: holds(both) == 1)
        target.decode.release(offer.ticket)
        assert await offer.ended is Outcome.COMPLETED
        await until(lambda: holds(both) == 0)


@pytest.mark.parametrize("why", ["no time", "never reached", "no blocks"])
async def test_refused_fetch_ends_the_hold(both: Neighbours, why: str) -> None:
    both.service.ordering.wait_s = 0.05
    async with both.engines() as (source, target):
        offer = await offered(source, ttl_s=60.0)
        target.decode.hold(offer.ticket)
        await until(lambda: holds(both) == 1)
        options: dict[str, Any] = {"after": target.control.record()}
        if why != "no blocks":
            options = {"after": 7, "timeout_s": 0.05 if why == "no time" else 60.0}
        blocks = {} if why == "no blocks" else target.some_blocks(4, NUM_TOKENS)
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, block_ids=blocks, **options
        )
        assert (await failure_of(fetch)).stage == "requested"
        assert holds(both) == 0
        await offer.withdraw()


async def test_fetch_of_engine_without_page_ends_its_hold(both: Neighbours) -> None:
    async with both.engines() as (source, _):
        offer = await offered(source, ttl_s=60.0)
        async with link_without_page(both.decode.config.attach_path) as target:
            target.hold(offer.ticket)
            await until(lambda: holds(both) == 1)
            await failure_of(target.fetch(offer.ticket, after=7, **ONE_BLOCK))
            assert holds(both) == 0
        await offer.withdraw()


async def test_lost_engine_holds_nothing(both: Neighbours) -> None:
    theirs, ours = both.prefill.attach, both.decode.config.attach_path
    async with engine(theirs, make_spec(), seed=1) as source:
        async with engine(ours, make_spec(), seed=2) as target:
            offer = await offered(source)
            target.decode.hold(offer.ticket)
            await until(lambda: holds(both) == 1)
        await until(lambda: holds(both) == 0)
        assert await offer.ended is Outcome.EXPIRED


async def test_prefill_agent_ends_holds_that_are_over(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        offer = await offered(source)
        target.decode.hold({**offer.ticket, "secret": new_secret()})
        await until(lambda: holds(both) == 1)
        await until(lambda: holds(both) == 0)
        assert await offer.ended is Outcome.EXPIRED
        offer = await offered(source, "withdrawn", ttl_s=60.0)
        target.decode.hold(offer.ticket)
        await until(lambda: holds(both) == 1)
        await offer.withdraw()
        await until(lambda: holds(both) == 0)


async def test_holds_are_bounded_fairly_and_wait_their_turn(folder: Path) -> None:
    async with (
        neighbours(folder, decode={"max_handoffs": 4}) as both,
        both.engines() as (source, target),
    ):
        offers = [await offered(source, f"r{one}", ttl_s=60.0) for one in range(8)]
        for offer in offers[:6]:
            target.decode.hold(offer.ticket)
        await until(lambda: holds(both) == 4)
        with pytest.raises(RequestRefused) as refused:
            await target.decode.connection.request(HoldOffer(offers[6].ticket))
        assert refused.value.code == "busy"
        async with engine(both.decode.config.attach_path, make_spec(), seed=3) as other:
            await other.decode.connection.request(HoldOffer(offers[6].ticket))
            assert holds(both) == 4
        await until(lambda: holds(both) == 4)  # the place is free, and the link tries again
        for offer in offers:
            await fetched(target, offer.ticket)
        assert holds(both) == 0


async def test_holds_at_many_places_leave_connections_to_others(folder: Path) -> None:
    async with (
        neighbours(folder, decode={"max_peers": 6}) as both,
        both.engines() as (source, target),
    ):
        offer = await offered(source, ttl_s=60.0)
        connection = target.decode.connection
        places = [{**offer.ticket, "endpoint": f"tcp://127.0.0.1:{one}"} for one in range(1, 5)]
        for number, ticket in enumerate(places[:3]):
            await connection.request(HoldOffer({**ticket, "offer_id": f"{number}"}))
        for ticket in (places[3], offer.ticket):
            with pytest.raises(RequestRefused) as refused:
                await connection.request(HoldOffer(ticket))
            assert refused.value.code == "busy"
        await connection.request(HoldOffer({**places[0], "offer_id": "another"}))
        assert holds(both) == 4
        async with engine(both.decode.config.attach_path, make_spec(), seed=3) as other:
            await other.decode.connection.request(HoldOffer(offer.ticket))
            assert holds(both) == 4  # the newest place of the first engine is lost, and its hold
            await fetched(other, offer.ticket)
        assert holds(both) == 3


async def test_hold_of_an_agent_that_may_not_be_reached_is_refused(folder: Path) -> None:
    async with (
        neighbours(folder, decode={"allowed_peers": ["10.9.9.9"]}) as both,
        both.engines() as (source, target),
    ):
        offer = await offered(source)
        for ticket in (offer.ticket, {**offer.ticket, "kvbus": 2}, {"offer_id": "o"}):
            with pytest.raises(RequestRefused):
                await target.decode.connection.request(HoldOffer(ticket))
            target.decode.hold(ticket)
        assert await offer.ended is Outcome.EXPIRED
        assert holds(both) == 0
