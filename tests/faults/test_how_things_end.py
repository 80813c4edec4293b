"""What ends a fetch is told by name, and a decode engine that gives up can free the offer."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, wait_until
from tests.engines import Engine, failure_of, pair
from tests.plain_sockets import Attached, ask

pytestmark = pytest.mark.anyio

NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
ONE_BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}


@pytest.fixture
async def engines(
    prefill: AgentProcess, decode: AgentProcess
) -> AsyncIterator[tuple[Engine, Engine]]:
    async with pair(prefill.attach, decode.attach) as (source, target):
        yield source, target


async def test_a_decode_engine_whose_fetch_failed_frees_the_offer_by_the_fetch(
    engines: tuple[Engine, Engine],
) -> None:
    source, target = engines
    offer = await source.prefill.offer("r", **NOTHING, ttl_s=600.0)
    fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK)
    failure = await failure_of(fetch)

    await fetch.cancel(release_offer=True)

    assert failure.code is ErrorCode.INVALID
    assert await offer.released() is Outcome.WITHDRAWN


def test_a_boot_id_that_was_ended_is_stale_when_it_says_hello(prefill: AgentProcess) -> None:
    boot = uuid.uuid4().hex
    first, again = Attached(prefill.attach), Attached(prefill.attach)
    first.hello(boot=boot)

    first.socket.close()
    wait_until(lambda: code_of(again.hello(boot=boot)) != "engine_conflict", "its end is seen")

    assert code_of(again.hello(boot=boot)) == "stale"
    assert "ok" in again.hello()
    again.socket.close()


def test_an_agent_says_at_hello_what_it_can(prefill: AgentProcess) -> None:
    engine = Attached(prefill.attach)

    features = engine.hello()["ok"]["features"]
    engine.socket.close()

    assert {"release_offer", "end_codes"} <= set(features)


async def test_a_lease_is_given_back_by_a_reader_whose_code_is_new_here(
    engines: tuple[Engine, Engine], prefill: AgentProcess
) -> None:
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
