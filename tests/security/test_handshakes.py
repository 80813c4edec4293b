"""What an engine's memory is like, and where it is, is told to who holds a right to read it."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import EngineMemory, to_body
from tests.engines import Engine, engine, failure_of, pair, same, works
from tests.plain_sockets import ask
from tests.security.listening import FORGED

pytestmark = pytest.mark.anyio
Body = dict[str, Any]


def handshake(source: Engine, **right: Any) -> Body:
    """As a decode agent would, of an engine that fits."""
    reader = EngineMemory(source.spec, tuple(cache.rank for cache in source.caches))
    return {
        "min_protocol": 1,
        "max_protocol": 1,
        "agent_id": "stranger",
        "engine_id": source.spec.engine_id,
        "reader": to_body(reader),
        **right,
    }


WITHOUT_A_RIGHT: dict[str, Callable[[Body], Body]] = {
    "nothing": lambda _: {},
    "the instance": lambda ticket: {"engine_instance": ticket["engine_instance"]},
    "all that is published": lambda ticket: {
        key: ticket[key] for key in ("engine_instance", "offer_id")
    },
    "a forged secret": lambda ticket: {
        **{key: ticket[key] for key in ("engine_instance", "offer_id")},
        "secret": FORGED,
    },
    "the ranks": lambda _: {"ranks": [0]},
    "a forged access": lambda _: {"ranks": [0], "access": FORGED},
    "the secret as access": lambda ticket: {"ranks": [0], "access": ticket["secret"]},
    "no ranks and a forged access": lambda _: {"ranks": [], "access": FORGED},
}


@pytest.mark.parametrize("shown", WITHOUT_A_RIGHT.values(), ids=WITHOUT_A_RIGHT)
async def test_a_stranger_is_told_nothing_of_an_engine(prefill, shown):
    async with engine(PrefillSession, prefill.attach) as source:
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})

        reply = ask(prefill.peer, "handshake", handshake(source, **shown(offer.ticket)))

        assert reply["error"]["code"] in (ErrorCode.FORBIDDEN, ErrorCode.OFFER_UNKNOWN)
        assert {*reply["error"]["detail"]} <= {"offer_id"}
        await offer.withdraw()


async def test_a_ticket_opens_its_own_engine_and_no_other_and_nothing_once_it_ended(prefill):
    async with (
        engine(PrefillSession, prefill.attach) as source,
        engine(PrefillSession, prefill.attach) as other,
    ):
        offers = [
            await one.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
            for one in (source, other)
        ]
        keys = ("engine_instance", "offer_id", "secret")
        right = {key: offers[0].ticket[key] for key in keys}
        others_name = {**right, "engine_instance": offers[1].ticket["engine_instance"]}

        good = ask(prefill.peer, "handshake", handshake(source, **right))
        crossed = ask(prefill.peer, "handshake", handshake(other, **others_name))
        for offer in offers:
            await offer.withdraw()
            await offer.released()
        late = ask(prefill.peer, "handshake", handshake(source, **right))

    assert good["ok"]["memory"]["engine"]["engine_id"] == source.spec.engine_id
    assert (crossed["error"]["code"], crossed["error"]["detail"]) == (ErrorCode.FORBIDDEN, {})
    assert late["error"]["code"] == ErrorCode.OFFER_WITHDRAWN


async def test_what_is_asked_of_an_engines_memory_needs_the_access_to_it(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        keys = ("engine_instance", "offer_id", "secret")
        shake = handshake(source, **{key: offer.ticket[key] for key in keys})
        done = ask(prefill.peer, "handshake", shake)["ok"]
        about = {
            "agent_boot": offer.ticket["agent_boot"],
            "engine_id": source.spec.engine_id,
            "memory_id": done["memory_id"],
        }
        check = {**about, "progress_s": 60.0}

        right = ask(prefill.peer, "check", {**about, "access": done["access"]})
        wrong = ask(prefill.peer, "check", {**check, "access": FORGED})
        none = ask(prefill.peer, "check", check)
        forged = ask(prefill.peer, "pack", pack_of(about, offer.offer_id))
        delegated = ask(decode.peer, "delegate", delegate_of(target, offer.ticket))
        await offer.withdraw()

    assert right["ok"] == {}
    refusals = [reply["error"]["code"] for reply in (wrong, none, forged, delegated)]
    assert refusals == ["forbidden", "invalid", "forbidden", "forbidden"]


def pack_of(about: Body, offer_id: str) -> Body:
    box = {"group": "full", "layers": [0], "parts": ["k"], "first_head": 0, "num_heads": 1}
    axes = ["layer", "kv", "token", "head", "dim", "block"]
    return {
        **about,
        "offer_id": offer_id,
        "epoch": 1,
        "token": FORGED,
        "access": FORGED,
        "rank": 0,
        "box": {**box, "start": 0, "stop": 16},
        "order": {"axes": axes, "block_size": 1},
        "table": {"ids": b"\1\0\0\0"},
        "slot_lease_s": 1.0,
    }


def delegate_of(target: Engine, ticket: Body) -> Body:
    """Reads the offer into the engine's first block."""
    table = {"full": {"ids": b"\0\0\0\0"}}
    return {
        "fetch_id": uuid.uuid4().hex,
        "engine_id": target.spec.engine_id,
        "access": FORGED,
        "ranks": [0],
        "ticket": dict(ticket),
        "memory_ids": ["x"],
        "epoch": 1,
        "token": FORGED,
        "source": table,
        "target": table,
        "first_token": 0,
        "num_tokens": 16,
        "start": 0,
        "stop": 16,
        "last": True,
        "zero_tail": False,
        "timeout_s": 5.0,
    }


async def test_a_fetch_with_a_forged_ticket_does_not_fail_those_that_come_with_it(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        before = target.snapshot()
        offers = [
            await source.prefill.offer(f"r{n}", num_tokens=0, block_ids={"full": []})
            for n in range(4)
        ]
        tickets = [offer.ticket for offer in offers]
        forged = [{**ticket, "secret": FORGED} for ticket in tickets]

        fetches = [
            target.decode.fetch(ticket, num_tokens=0, block_ids={"full": []})
            for pair_of in zip(forged, tickets, strict=True)
            for ticket in pair_of
        ]
        codes = [(await failure_of(fetch)).code for fetch in fetches[::2]]
        for fetch in fetches[1::2]:
            await fetch.completed()

        assert codes == [ErrorCode.FORBIDDEN] * 4
        assert same(target.snapshot(), before)
        assert await works(source, target)


async def test_engines_that_know_each_other_hand_over_after_either_came_back(prefill, decode):
    async with engine(DecodeSession, decode.attach, seed=2) as target:
        for seed in (3, 4):
            async with engine(PrefillSession, prefill.attach, seed=seed) as source:
                assert await works(source, target)
                assert await works(source, target)
