"""A signal lets an agent finish what runs and nothing new begin; what is left then is failed."""

import signal
import time
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import Outcome
from tests.agents import until
from tests.engines import engine, failure_of, make_spec, pair, same, works
from tests.faults.conftest import Started
from tests.plain_sockets import ask

pytestmark = pytest.mark.anyio

NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
BUSY_S = 1.5
"""Longer than an agent with nothing to wait for takes to end."""


async def test_a_draining_agent_finishes_what_runs_and_refuses_what_is_new(fresh: Started) -> None:
    prefill, decode = fresh.prefill(), fresh.decode()
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        for agent in (prefill, decode):
            agent.signal(signal.SIGTERM)
        await until(lambda: prefill.status()["draining"] and decode.status()["draining"])
        with pytest.raises(RequestRefused) as refused_offer:
            await source.prefill.offer("new", **NOTHING)
        refused_fetch = target.decode.fetch(offer.ticket, **NOTHING)
        late = await failure_of(refused_fetch)
        async with DecodeSession(decode.attach, make_spec()) as newcomer:
            with pytest.raises(RequestRefused) as refused_engine:
                await newcomer.register()
        await offer.extend(16, {"full": [1]})
        await offer.seal()
        await fetch.completed()
        outcome = await offer.released()
        statuses = [agent.exit_status() for agent in (prefill, decode)]

        assert not same(target.snapshot(), before)
        assert outcome is Outcome.COMPLETED
        assert {refused_offer.value.code, late.code, refused_engine.value.code} == {
            ErrorCode.DRAINING
        }
        assert statuses == [0, 0]
        assert prefill.says("agent.drained")[0]["left"] == {}
        assert prefill.says("agent.stopped")
        assert decode.says("agent.stopped")


async def test_what_runs_at_a_second_signal_fails_by_name_and_the_agent_exits(
    fresh: Started,
) -> None:
    prefill, decode = fresh.prefill(), fresh.decode(drain_timeout_s=600.0)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        decode.signal(signal.SIGTERM)
        await until(lambda: decode.logged("agent.draining"))
        decode.signal(signal.SIGTERM)
        failure = await failure_of(fetch)
        status = decode.exit_status()
        await until(lambda: prefill.status()["counts"]["leases"] == 0)

        assert failure.code is ErrorCode.DRAINING
        assert failure.blocks_free
        assert status == 0
        assert decode.says("agent.drained")[0]["left"]["fetches"] == 1
        await offer.withdraw()


async def test_an_engine_that_is_busy_hears_that_its_offers_were_withdrawn_by_a_drain(
    fresh: Started,
) -> None:
    prefill = fresh.prefill(drain_timeout_s=0.3)
    fresh.start(prefill)
    async with engine(PrefillSession, prefill.attach) as source:
        offer = await source.prefill.offer("r", **NOTHING)

        prefill.signal(signal.SIGINT)
        time.sleep(BUSY_S)  # noqa: ASYNC251 - the engine hears nothing meanwhile
        outcome = await offer.released()

        assert outcome is Outcome.WITHDRAWN
        assert prefill.exit_status() == 0


def test_an_idle_agent_ends_at_once_and_leaves_no_socket(fresh: Started) -> None:
    prefill, decode = fresh.prefill(), fresh.decode()
    fresh.start(prefill, decode)

    for agent in (prefill, decode):
        agent.signal(signal.SIGTERM)

    for agent in (prefill, decode):
        assert agent.exit_status() == 0
        assert not agent.attach.exists()


async def test_full_tables_are_busy_and_have_room_again(fresh: Started) -> None:
    prefill, decode = fresh.prefill(max_offers=1), fresh.decode(max_fetches=1)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        source.prefill.retry_busy = target.decode.retry_busy = False
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **NOTHING)

        with pytest.raises(RequestRefused) as refused_offer:
            await source.prefill.offer("one too many", **NOTHING)
        one_too_many = target.decode.fetch(offer.ticket, **NOTHING)
        failure = await failure_of(one_too_many)
        await offer.seal()
        await fetch.completed()
        await offer.released()

        assert refused_offer.value.code is ErrorCode.BUSY
        assert float(refused_offer.value.detail["retry_after_s"]) > 0
        assert failure.code is ErrorCode.BUSY
        assert (failure.stage, failure.blocks_free) == ("requested", True)
        for agent in (prefill, decode):
            assert agent.metric("refusals_total", code="busy") == 1
            assert agent.says("request.refused", code="busy")
        assert await works(source, target)


async def test_more_engine_processes_than_an_agent_takes_are_turned_away(fresh: Started) -> None:
    prefill = fresh.prefill(max_engine_processes=2)
    fresh.start(prefill)
    async with engine(PrefillSession, prefill.attach):
        with pytest.raises(RequestRefused) as refused:
            await PrefillSession(prefill.attach, make_spec()).__aenter__()

    assert refused.value.code is ErrorCode.BUSY
    assert prefill.metric("attach_refused") == 1
    assert "ok" in ask(prefill.peer, "status", {})
