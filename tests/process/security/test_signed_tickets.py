"""A site that signs its tickets refuses forged and altered ones."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import structs

from kvbus.engine import Fetch
from kvbus.errors import ErrorCode, FetchFailed
from kvbus.geometry import BlockTable
from kvbus.protocol import Outcome, Rendezvous, Ticket, TicketKeys, packed_tables
from tests.process.security.conftest import TICKET_KEY, signed, trap_at
from tests.process.security.wire import FORGED
from tests.support.agents import AgentProcess, Agents
from tests.support.engines import NOTHING, Engine, failure_of, pair, same, works
from tests.support.keyring import KeyRing

pytestmark = pytest.mark.anyio
NUM_REPLAYED = 20
Pair = tuple[Engine, Engine]


@pytest.fixture
async def engines(site: list[AgentProcess]) -> AsyncIterator[Pair]:
    prefill, decode = site
    async with pair(prefill.attach, decode.attach) as both:
        yield both


def fetch_of(target: Engine, ticket: Ticket, **more: Any) -> Fetch:
    return target.control.fetch(ticket.to_json(), **NOTHING, **more)


async def test_altered_ticket_is_refused_before_any_connection(engines: Pair, trap: str) -> None:
    source, target = engines
    offer = await source.prefill.offer("r", **NOTHING)
    ticket, before = Ticket.from_json(offer.ticket), target.snapshot()
    changes: list[dict[str, Any]] = [
        {"endpoint": trap},
        {"signature": ""},
        {"endpoint": trap, "signature": ""},
        {"secret": FORGED},
        {"prompt_digest": "another"},
        {"expires_at_s": 2**40},
    ]
    bad = [structs.replace(ticket, **change) for change in changes]
    fetches = [fetch_of(target, one) for one in bad for _ in range(NUM_REPLAYED)]
    failures = [await failure_of(fetch) for fetch in fetches]
    forged = Rendezvous(uuid.uuid4().hex, trap)
    other_site = TicketKeys([b"f" * 32]).sign(forged, now_s=time.time(), lifetime_s=9)
    failures += [
        await failure_of(target.decode.fetch(one.to_json(), **NOTHING))
        for one in (forged, other_site)
    ]
    assert {(failure.code, failure.stage) for failure in failures} == {
        (ErrorCode.FORBIDDEN, "requested")
    }
    assert same(target.snapshot(), before)
    await fetch_of(target, ticket).ended


async def test_ticket_of_either_key_is_speculative_other_blocks_refused(
    engines: Pair, site: list[AgentProcess]
) -> None:
    source, target = engines
    theirs, ours = source.some_blocks(5, 40), target.some_blocks(6, 40)
    assert await works(source, target)
    offer = await source.prefill.offer("r", num_tokens=40, block_ids=theirs)
    ticket, before = Ticket.from_json(offer.ticket), target.snapshot()
    others = packed_tables({"full": BlockTable.of(theirs["full"][::-1])}, max_blocks=9)
    wanted: dict[str, Any] = {"num_tokens": 40, "block_ids": ours}
    failures = [
        await failure_of(
            target.decode.fetch(structs.replace(ticket, blocks=blocks).to_json(), **wanted)
        )
        for blocks in (others, "")
    ]
    unchanged = same(target.snapshot(), before)
    fetch = target.decode.fetch(signed(ticket).to_json(), **wanted)
    await fetch.ended
    assert len(ticket.signature) == 64
    assert [failure.code for failure in failures] == [ErrorCode.FORBIDDEN] * 2
    assert unchanged
    (line,) = site[1].says("handoff.completed", fetch_id=fetch.fetch_id)
    assert line["speculative"]


@pytest.mark.parametrize(
    ("changes", "ago_s", "code", "said"),
    [
        ({}, 700, ErrorCode.OFFER_EXPIRED, "expired .* s ago, by the clock of this machine"),
        ({}, -60, ErrorCode.FORBIDDEN, "in the future, by the clock"),
        ({"audience": "another engine"}, 0, ErrorCode.FORBIDDEN, "is for 'another engine'"),
        ({"prompt_digest": "another"}, 0, ErrorCode.PROMPT_MISMATCH, "of another prompt"),
        ({"prompt_digest": ""}, 0, ErrorCode.PROMPT_MISMATCH, "of another prompt"),
        ({"endpoint": "tcp://127.0.0.2:7"}, 0, ErrorCode.FORBIDDEN, "not in 'allowed_peers'"),
    ],
    ids=["expired", "early", "for another", "of another prompt", "of any prompt", "not allowed"],
)
async def test_a_ticket_that_the_site_signed_is_good_for_what_it_says(
    engines: Pair, changes: dict[str, Any], ago_s: float, code: ErrorCode, said: str
) -> None:
    source, target = engines
    offer = await source.prefill.offer("r", **NOTHING, prompt_digest="prompt")
    ticket = signed(Ticket.from_json(offer.ticket), ago_s=ago_s, **changes)
    with pytest.raises(FetchFailed, match=said) as refused:
        await fetch_of(target, ticket, prompt_digest="prompt").ended
    assert refused.value.code is code
    await fetch_of(target, Ticket.from_json(offer.ticket), prompt_digest="prompt").ended


async def test_a_ticket_for_a_named_engine_or_agent_is_used_by_it_once(
    engines: Pair, site: list[AgentProcess]
) -> None:
    source, target = engines
    for audience in (target.spec.engine_id, site[1].settings["agent_id"]):
        offer = await source.prefill.offer(audience, **NOTHING, audience=audience)
        ticket = Ticket.from_json(offer.ticket)
        await fetch_of(target, ticket).ended
        again = [await failure_of(fetch_of(target, ticket)) for _ in range(NUM_REPLAYED)]
        assert {(failure.code, failure.stage) for failure in again} == {
            (ErrorCode.OFFER_COMPLETED, "requested")
        }


async def test_fetch_of_a_signed_rendezvous_completes(
    engines: Pair, site: list[AgentProcess], ring: Any
) -> None:
    source, target = engines
    named = Rendezvous(uuid.uuid4().hex, site[0].peer, server_key=ring.pair("prefill").public)
    rendezvous = TicketKeys([TICKET_KEY]).sign(named, now_s=time.time(), lifetime_s=60)
    ours, theirs = target.some_blocks(3, 40), source.some_blocks(3, 40)
    fetch = target.decode.fetch(rendezvous.to_json(), num_tokens=40, block_ids=ours)
    offer = await source.prefill.offer(
        "r", num_tokens=40, block_ids=theirs, transfer_id=rendezvous.transfer_id
    )
    await fetch.ended
    await offer.ended


async def test_an_allow_list_holds_without_keys(fresh: Agents) -> None:
    agents = fresh.prepare("prefill"), fresh.prepare("decode", allowed_peers=["127.0.0.1"])
    fresh.start(*agents)
    with trap_at("127.0.0.2") as elsewhere:
        async with pair(agents[0].attach, agents[1].attach) as (source, target):
            offer = await source.prefill.offer("r", **NOTHING)
            redirected = structs.replace(Ticket.from_json(offer.ticket), endpoint=elsewhere)
            failure = await failure_of(fetch_of(target, redirected))
            assert await works(source, target)
            await offer.withdraw()
        assert failure.code is ErrorCode.FORBIDDEN


async def test_unsigned_rendezvous_ends_its_offer_at_known_agent(
    engines: Pair, site: list[AgentProcess], ring: KeyRing
) -> None:
    source, target = engines
    assert await works(source, target)
    named = Rendezvous(uuid.uuid4().hex, site[0].peer, server_key=ring.pair("prefill").public)
    offer = await source.prefill.offer("r", transfer_id=named.transfer_id, ttl_s=600.0, **NOTHING)
    failure = await failure_of(target.decode.fetch(named.to_json(), **NOTHING))
    outcome = await offer.ended
    assert failure.code is ErrorCode.FORBIDDEN
    assert "the rendezvous is not signed: the router must sign it" in failure.message
    assert outcome is Outcome.WITHDRAWN
