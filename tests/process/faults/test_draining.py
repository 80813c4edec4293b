"""Requests to draining agents, and errors with a code. `tests/sim` shows the decisions."""

import os
import signal
import sys
import time
import uuid
from pathlib import Path

import anyio
import pytest

from kvbus.engine import Link
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import CancelFetch, Outcome
from tests.process.faults.conftest import LONG, LONG_TOKENS, Started
from tests.support.agents import AgentProcess, until, wait_until
from tests.support.engines import (
    NOTHING,
    ONE_BLOCK,
    begin,
    engine,
    failure_of,
    make_spec,
    pair,
    same,
)
from tests.support.plain_sockets import Attached, ask

pytestmark = pytest.mark.anyio

COPIES_HANG = """
import threading
from kvbus.memory import run_copy
run_copy.copy_runs = lambda job: threading.Event().wait()
"""
BUSY_S = 1.5
"""Longer than an agent with nothing to wait for takes to end."""


async def test_draining_agent_finishes_running_work_and_refuses_new(fresh: Started) -> None:
    prefill, decode = fresh.both()
    async with pair(prefill.attach, decode.attach, agent_wait_s=0.0) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)
        for agent in (prefill, decode):
            agent.signal(signal.SIGTERM)
        await until(lambda: prefill.status()["draining"] and decode.status()["draining"])
        with pytest.raises(RequestRefused) as no_offer:
            await source.prefill.offer("new", **NOTHING)
        no_fetch = await failure_of(target.decode.fetch(offer.ticket, **NOTHING))
        with pytest.raises(RequestRefused) as no_engine:
            await Link(decode.attach, make_spec()).__aenter__()
        await offer.extend(16, {"full": [1]})
        await offer.seal()
        await fetch.ended
        assert await offer.ended is Outcome.COMPLETED
        assert not same(target.snapshot(), before)
        codes = {no_offer.value.code, no_fetch.code, no_engine.value.code}
        assert codes == {ErrorCode.DRAINING}
        assert [agent.exit_status() for agent in (prefill, decode)] == [0, 0]
        assert prefill.says("agent.drained")[0]["left"] == {}
        assert not any(agent.attach.exists() for agent in (prefill, decode))


async def test_second_signal_fails_fetch_as_draining_and_agent_exits(fresh: Started) -> None:
    prefill, decode = fresh.both(decode={"drain_timeout_s": 600.0})
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)
        decode.signal(signal.SIGTERM)
        await until(lambda: decode.logged("agent.draining"))
        decode.signal(signal.SIGTERM)
        failure = await failure_of(fetch)
        assert (failure.code, failure.blocks_free) == (ErrorCode.DRAINING, True)
        assert decode.exit_status() == 0
        assert decode.says("agent.drained")[0]["left"]["fetches"] == 1
        await until(lambda: prefill.status()["counts"]["leases"] == 0)
        await offer.withdraw()


async def test_agent_with_hung_copy_ends_and_its_blocks_stay_in_doubt(
    fresh: Started, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(COPIES_HANG)
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    prefill, decode = fresh.both(decode={"mapped": True, "drain_timeout_s": 0.1, "env": env})
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        handoff = await begin(source, target, LONG_TOKENS)
        await until(lambda: decode.metric("data_jobs") == 1)
        decode.signal(signal.SIGTERM)
        failure = await failure_of(handoff.fetch)
        assert (failure.code, failure.blocks_free) == (ErrorCode.DRAINING, False)
        assert decode.exit_status() == 0
        assert decode.says("agent.stopped")
        await handoff.offer.withdraw()


async def test_busy_engine_hears_of_offers_withdrawn_in_drain(fresh: Started) -> None:
    prefill = fresh.prepare("prefill")
    fresh.start(prefill)
    async with engine(prefill.attach) as source:
        offer = await source.prefill.offer("r", **NOTHING)
        right = {name: offer.ticket[name] for name in ("agent_boot", "offer_id", "secret")}
        prefill.signal(signal.SIGINT)
        assert "error" not in ask(prefill.peer, "withdraw", right)
        time.sleep(BUSY_S)  # noqa: ASYNC251 - the engine hears nothing meanwhile
        assert await offer.ended is Outcome.WITHDRAWN
        assert prefill.exit_status() == 0


async def test_offer_left_by_drain_goes_on_unreported_at_next_agent(fresh: Started) -> None:
    prefill = fresh.prepare("prefill", drain_timeout_s=0.3)
    fresh.start(prefill)
    async with engine(prefill.attach) as source:
        offer = await source.prefill.offer("r", **NOTHING)
        prefill.signal(signal.SIGINT)
        assert await anyio.to_thread.run_sync(prefill.exit_status) == 0
        had_ended = offer.ended.done()
        prefill.launch()
        await anyio.to_thread.run_sync(prefill.wait_started)
        await until(lambda: prefill.status()["counts"]["offers"] == 1)
        await offer.withdraw()
        assert not had_ended
        assert await offer.ended is Outcome.WITHDRAWN


async def test_engines_with_equal_fetch_ids_cancel_only_their_own(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with (
        engine(prefill.attach, seed=1) as source,
        engine(decode.attach, seed=2) as one,
        engine(decode.attach, seed=3) as other,
        engine(decode.attach, seed=4) as third,
    ):
        offers = [await source.prefill.offer(name, **ONE_BLOCK, sealed=False) for name in "rs"]
        fetches = [
            target.decode.fetch(offer.ticket, **ONE_BLOCK, fetch_id="fetch-1")
            for target, offer in zip((one, other), offers, strict=True)
        ]
        await until(lambda: decode.status()["counts"]["fetches"] == len(fetches))
        with pytest.raises(RequestRefused) as unknown:
            await third.control.connection.request(
                CancelFetch(fetch_id="fetch-1", release_offer=True)
            )
        await fetches[0].cancel()
        failure = await failure_of(fetches[0])
        await offers[1].seal()
        await fetches[1].ended
        history = "\n".join(decode.status(fetch_id="fetch-1")["history"])
        await offers[0].withdraw()
        assert unknown.value.code is ErrorCode.FETCH_UNKNOWN
        assert failure.code is ErrorCode.CANCELLED
        assert [await offer.ended for offer in offers] == ["withdrawn", "completed"]
        assert "-> cancelled" in history
        assert "-> completed" in history


def test_a_boot_id_that_was_ended_is_stale_when_it_says_hello(prefill: AgentProcess) -> None:
    boot = uuid.uuid4().hex
    with Attached(prefill.attach) as first:
        first.hello(boot=boot)
    with Attached(prefill.attach) as again:
        wait_until(lambda: code_of(again.hello(boot=boot)) != "engine_conflict", "it is gone")
        code, other = code_of(again.hello(boot=boot)), again.hello()
    assert code == "stale"
    assert "ok" in other


async def test_reader_releases_lease_with_code_unknown_to_agent(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING)
        right = {key: offer.ticket[key] for key in ("agent_boot", "offer_id", "secret")}
        acquire = {**right, "reader_id": "a newer one", "lease_s": 600.0}
        granted = ask(prefill.peer, "acquire", acquire)["ok"]
        lease = {key: granted[key] for key in ("epoch", "token")}
        reply = ask(prefill.peer, "release", {**acquire, **lease, "code": "moon_phase"})
        await target.decode.fetch(offer.ticket, **NOTHING).ended
        assert "ok" in reply
        assert await offer.ended is Outcome.COMPLETED


def code_of(reply: dict[str, dict[str, str]]) -> str:
    return reply.get("error", {}).get("code", "")
