"""Parked offers at the prefill agent: where readers are led, and what makes a copy worthless."""

import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbus import protocol
from kvbus.engine import Offer, Outcome, Park
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import Request
from tests.support.agents import until
from tests.support.engines import Engine, make_spec
from tests.unit.prefill.inside import PrefillAgent, Reader, prefill_agent
from tests.unit.prefill.leases import IDS, NUM_TOKENS, TABLE, Case, changed

pytestmark = pytest.mark.anyio

POOL: dict[str, Any] = {"park_bytes": 1 << 20, "park_after_s": 3600.0}
COPIED_S = 0.3
"""A copy of three blocks has ended by then."""


@pytest.fixture
async def agent(folder: Path) -> AsyncIterator[PrefillAgent]:
    async with prefill_agent(folder, **POOL) as started:
        yield started


async def offered(
    agent: PrefillAgent, source: Engine, reader: Reader, **options: Any
) -> tuple[Offer, Case]:
    request = {"num_tokens": NUM_TOKENS, "block_ids": {"full": IDS}, **options}
    offer: Offer = await source.prefill.offer(uuid.uuid4().hex, **request)
    return offer, Case(agent, source, reader, offer.offer_id, 1, offer.ticket["secret"])


async def park(offer: Offer) -> None:
    await offer.park()
    assert await offer.ended is Outcome.PARKED


def pool_of(agent: PrefillAgent) -> dict[str, str]:
    ((engine_id, pool),) = agent.runtime.service.pools().items()
    return {"engine_id": engine_id, "engine_instance": pool.engine_instance}


async def refusal(reader: Reader, message: Request[Any]) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        await reader.ask(message)
    return refused.value


def requests_of(case: Case) -> dict[str, Request[Any]]:
    """The requests of a reader without a lease, by which it names the engine of its ticket."""
    spec, instance = case.source.spec, case.local.instance
    of = {"agent_boot": case.agent.boot, "reader_id": "reader", **case.right}
    read: dict[str, Any] = {
        "tables": {"full": TABLE},
        "num_tokens": NUM_TOKENS,
        "engine_id": spec.engine_id,
    }
    named = {"engine_id": spec.engine_id, "engine_instance": instance, **case.right}
    return {
        "acquire": protocol.Acquire(lease_s=5.0, engine_id=spec.engine_id, **of),
        "commit": protocol.Commit(token="token-of-the-reader", **of, **read),
        "digest": case.digest(),
        "handshake": protocol.Handshake(1, 1, "decode", reader=spec, **named),
    }


async def test_readers_of_a_parked_offer_are_led_to_its_pool(agent: PrefillAgent) -> None:
    async with agent.reader() as reader:
        async with agent.engine() as source:
            offer, case = await offered(agent, source, reader)
            requests, before = requests_of(case), await reader.ask(case.digest())
            await park(offer)
            assert (await refusal(reader, requests["digest"])).code is ErrorCode.OFFER_PARKED
        pool = pool_of(agent)
        for name, message in requests.items():
            refused = await refusal(reader, message)
            assert (refused.code, refused.detail) == (ErrorCode.OFFER_PARKED, pool), name
            refused = await refusal(reader, changed(message, {"secret": 32 * "x"}))
            assert (refused.code, refused.detail) == (ErrorCode.FORBIDDEN, {}), name
        done = await reader.ask(changed(requests["handshake"], pool))
        in_pool = {"engine_id": pool["engine_id"]}
        granted = await reader.ask(changed(requests["acquire"], in_pool))
        there = {"memory_id": done.memory_id, "rank_secret": done.rank_secret, **in_pool}
        table = granted.tables["full"]
        again = await reader.ask(changed(requests["digest"], {"table": table, **there}))
        assert done.memory.engine.groups == case.source.spec.groups
        assert again.digests == before.digests
        await reader.ask(protocol.PeerWithdraw(agent.boot, case.offer_id, case.secret))
        await until(lambda: not agent.runtime.service.pools())


async def test_copy_that_ended_as_its_engine_hung_up_is_worth_nothing(agent: PrefillAgent) -> None:
    """An engine hangs up before it writes to its blocks; the loop may see the copy's end first."""
    async with agent.engine() as source, agent.reader() as reader:
        offer, case = await offered(agent, source, reader)
        await until(agent.runtime.service.pools)
        os.kill(agent.data_pid, signal.SIGSTOP)
        await offer.park()
        await until(lambda: agent.runtime.agent.data.num_jobs == 1)
        os.kill(agent.data_pid, signal.SIGCONT)
        time.sleep(COPIED_S)  # noqa: ASYNC251 - the loop is to find both at once
        control = agent.local(source).control
        assert control is not None
        control.connection.shut_down()
        await until(lambda: not agent.counts["offers"])
        requests = {"acquire": protocol.Acquire(agent.boot, case.offer_id, "r", 5.0, case.secret)}
        assert (await refusal(reader, requests["acquire"])).code is ErrorCode.ENGINE_LOST


async def test_an_engine_of_the_same_shape_uses_the_pool_again(agent: PrefillAgent) -> None:
    spec = make_spec()
    async with agent.reader() as reader:
        async with agent.engine(spec) as source:
            first, _ = await offered(agent, source, reader)
            await park(first)
            pool = pool_of(agent)
        async with agent.engine(spec) as source:
            second, _ = await offered(agent, source, reader)
            await park(second)
            assert pool_of(agent) == pool
        async with agent.engine(spec, num_blocks=32) as source:
            third, _ = await offered(agent, source, reader)
            await park(third)
            assert len(agent.runtime.service.pools()) == 2
            for offer in (first, second, third):
                withdraw = protocol.PeerWithdraw(agent.boot, offer.offer_id, offer.ticket["secret"])
                await reader.ask(withdraw)
            await until(lambda: len(agent.runtime.service.pools()) == 1)
        await until(lambda: not agent.runtime.service.pools())


async def test_engine_whose_pool_does_not_fit_works_without(folder: Path) -> None:
    small = prefill_agent(folder, park_bytes=4096, park_after_s=0.0)
    async with small as agent, agent.engine() as source, agent.reader() as reader:
        offer, _ = await offered(agent, source, reader)
        await offer.park()
        assert not agent.runtime.service.pools()
        assert offer.outcome is None
        await offer.withdraw()


async def test_agent_without_parking_opens_no_pool_and_refuses(folder: Path) -> None:
    async with prefill_agent(folder) as agent, agent.engine() as source, agent.reader() as reader:
        offer, _ = await offered(agent, source, reader)
        with pytest.raises(RequestRefused) as refused:
            await offer.park()
        assert refused.value.code is ErrorCode.CONFIG
        assert offer.outcome is None
        assert not agent.runtime.service.pools()
        await offer.withdraw()


async def test_engine_chooses_which_of_its_offers_are_parked(agent: PrefillAgent) -> None:
    async with agent.engine() as source, agent.reader() as reader:
        kept, always = [
            (await offered(agent, source, reader, park=park))[0]
            for park in (Park.NEVER, Park.ALWAYS)
        ]
        assert await always.ended is Outcome.PARKED
        when_full, _ = await offered(agent, source, reader)
        assert when_full.outcome is None
        source.prefill.report_blocks(free=0, low=1)
        assert await when_full.ended is Outcome.PARKED
        for _ in range(3):  # each look at offers would park `kept`, too
            later, _ = await offered(agent, source, reader)
            assert await later.ended is Outcome.PARKED
        assert kept.outcome is None
        await kept.park()
        assert await kept.ended is Outcome.PARKED


async def test_a_wish_to_park_at_an_agent_without_a_pool_is_named_once(folder: Path) -> None:
    async with prefill_agent(folder) as agent, agent.engine() as source, agent.reader() as reader:
        with capture_logs() as lines:
            for _ in range(2):
                offer, _ = await offered(agent, source, reader, park=Park.ALWAYS)
                await offer.withdraw()
        warnings = [line["reason"] for line in lines if line["event"] == "park.unavailable"]
        assert warnings == ["this agent parks no offers (park_bytes = 0)"]
