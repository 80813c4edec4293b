"""What ends a fetch is told by name, and a decode engine that gives up can free the offer."""

import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import DecodeSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import until, wait_until
from tests.engines import engine, failure_of, pair, story_of, works
from tests.plain_sockets import Attached, ask

pytestmark = pytest.mark.anyio

NOTHING = {"num_tokens": 0, "block_ids": {"full": []}}
ONE_BLOCK = {"num_tokens": 16, "block_ids": {"full": [1]}}


@pytest.fixture
async def engines(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        yield source, target


async def test_a_decode_engine_that_gives_up_frees_the_offer_that_it_reads(engines, prefill):
    source, target = engines
    offer = await source.prefill.offer("r", **NOTHING, sealed=False, ttl_s=600.0)
    fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK)
    await until(lambda: prefill.status()["counts"]["leases"] == 1)

    await fetch.cancel(release_offer=True)
    failure = await failure_of(fetch)

    assert failure.code is ErrorCode.CANCELLED
    assert await offer.released() is Outcome.WITHDRAWN
    assert await works(source, target)


async def test_a_decode_engine_whose_fetch_failed_frees_the_offer_by_the_fetch(engines):
    source, target = engines
    offer = await source.prefill.offer("r", **NOTHING, ttl_s=600.0)
    fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK)
    failure = await failure_of(fetch)

    await fetch.cancel(release_offer=True)

    assert failure.code is ErrorCode.INVALID
    assert await offer.released() is Outcome.WITHDRAWN


async def test_a_decode_engine_that_cancels_and_says_no_more_leaves_the_offer(engines, prefill):
    source, target = engines
    offer = await source.prefill.offer("r", **NOTHING, sealed=False, ttl_s=600.0)
    fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK)
    await until(lambda: prefill.status()["counts"]["leases"] == 1)

    await fetch.cancel()
    await failure_of(fetch)
    await until(lambda: prefill.status()["counts"]["leases"] == 0)
    again = target.decode.fetch(offer.ticket, **NOTHING)
    await offer.seal()
    await again.completed()

    assert await offer.released() is Outcome.COMPLETED


async def test_a_fetch_whose_prefill_agent_stops_is_told_draining(fresh):
    prefill, decode = fresh.prefill(drain_timeout_s=0.2), fresh.decode()
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        prefill.signal(signal.SIGTERM)
        failure = await failure_of(fetch)

        assert failure.code is ErrorCode.DRAINING
        assert await offer.released() is Outcome.WITHDRAWN


def test_a_boot_id_that_was_ended_is_stale_when_it_says_hello(prefill):
    boot = uuid.uuid4().hex
    first, again = Attached(prefill.attach), Attached(prefill.attach)
    first.hello(boot=boot)

    first.socket.close()
    wait_until(lambda: code_of(again.hello(boot=boot)) != "engine_conflict", "its end is seen")

    assert code_of(again.hello(boot=boot)) == "stale"
    assert "ok" in again.hello()
    again.socket.close()


def test_a_boot_id_is_as_long_on_the_attach_socket_as_on_the_others(prefill):
    engine = Attached(prefill.attach)

    too_long = engine.hello(boot="b" * 65)
    longest = engine.hello(boot="b" * 64)
    engine.socket.close()

    assert code_of(too_long) == "invalid"
    assert "ok" in longest


def test_an_agent_says_at_hello_what_it_can(prefill):
    engine = Attached(prefill.attach)

    features = engine.hello()["ok"]["features"]
    engine.socket.close()

    assert {"release_offer", "end_codes"} <= set(features)


async def test_a_lease_is_given_back_by_a_reader_whose_code_is_new_here(engines, prefill):
    source, target = engines
    offer = await source.prefill.offer("r", **NOTHING)
    claim = {
        "agent_boot": offer.ticket["agent_boot"],
        "offer_id": offer.offer_id,
        "secret": offer.ticket["secret"],
        "reader_id": "a newer one",
        "lease_s": 600.0,
    }
    granted = ask(prefill.peer, "claim", claim)["ok"]
    lease = {"epoch": granted["epoch"], "token": granted["token"]}
    release = {**claim, **lease, "code": "moon_phase"}

    reply = ask(prefill.peer, "release", release)
    fetch = target.decode.fetch(offer.ticket, **NOTHING)

    assert "ok" in reply
    await fetch.completed()
    assert await offer.released() is Outcome.COMPLETED


def code_of(reply: dict[str, Any]) -> str:
    """Why a request was refused, empty when it was not."""
    return str(reply.get("error", {}).get("code", ""))


async def test_the_death_of_a_prefill_agent_is_told_by_name_long_before_the_lease_ends(fresh):
    patient = {"lease_s": 300.0, "request_timeout_s": 300.0}
    prefill, decode = fresh.prefill(max_lease_s=300.0), fresh.decode(**patient)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK, timeout_s=300.0)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        prefill.kill()
        failure = await failure_of(fetch)
        again = target.decode.fetch(offer.ticket, **NOTHING, timeout_s=300.0)
        late = await failure_of(again)

        assert (failure.code, failure.blocks_free) == (ErrorCode.PEER_LOST, True)
        assert late.code is ErrorCode.PEER_LOST
        assert decode.says("peer.lost", peer=prefill.peer, level="warning", num_fetches=1)


async def test_a_prefill_agent_that_is_only_stopped_is_not_told_lost(fresh):
    prefill, decode = fresh.prefill(), fresh.decode()
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        prefill.signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        prefill.signal(signal.SIGCONT)

        assert failure.code is ErrorCode.LEASE_EXPIRED
        assert not decode.logged("peer.lost")
        await offer.withdraw()


async def test_a_reader_that_waits_for_a_leased_offer_hears_that_the_lease_has_ended(fresh):
    prefill, readers = fresh.prefill(), [fresh.decode() for _ in range(2)]
    fresh.start(prefill, *readers)
    async with (
        pair(prefill.attach, readers[0].attach) as (source, target),
        engine(DecodeSession, readers[1].attach, seed=3) as other,
    ):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False, ttl_s=600.0)
        first = target.decode.fetch(offer.ticket, **ONE_BLOCK)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)
        waiting = other.decode.fetch(offer.ticket, **ONE_BLOCK)
        await until(lambda: "StepFailed" in str(story_of(other, waiting)))
        assert "OfferAdvanced" not in str(story_of(other, waiting))

        await first.cancel()
        await until(lambda: "OfferAdvanced" in str(story_of(other, waiting)))

        await until(lambda: "LeaseGranted" in str(story_of(other, waiting)))
        await offer.withdraw()
        await failure_of(waiting)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_agent_that_ends_by_itself_leaves_no_socket_behind(fresh, role):
    agent = getattr(fresh, role)()
    fresh.start(agent)
    folder = Path(agent.settings["runtime_dir"])
    there = {path.name for path in folder.iterdir() if path.is_socket()}

    agent.signal(signal.SIGTERM)

    assert agent.exit_status() == 0
    assert {"attach.sock", "engine.sock"} <= there
    assert not [path for path in folder.iterdir() if path.is_socket()]
