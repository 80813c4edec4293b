"""Who hears the events and reaches the peer socket has no right, and so no effect."""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgpack
import pytest
import zmq

from kvbus.engine import PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome, Ticket
from tests.agents import AgentProcess, until
from tests.engines import engine, failure_of, pair, same, works
from tests.plain_sockets import REPLY_WITHIN_S, ask
from tests.security.rights import Body, Leased, delegate_of, handshake, pack_of
from tests.security.wire import FORGED

pytestmark = pytest.mark.anyio
NUM_LIES, AT_A_TIME = 10_000, 200
OFFER_KEYS = ("engine_instance", "offer_id", "secret")


def without_a_right(ticket: Body) -> dict[str, Body]:
    """What strangers can show of an offer, and what they can make up."""
    published = {key: ticket[key] for key in ("engine_instance", "offer_id")}
    return {
        "nothing": {},
        "the instance": {"engine_instance": ticket["engine_instance"]},
        "all that is published": published,
        "a forged secret": {**published, "secret": FORGED},
        "the ranks": {"ranks": [0]},
        "a forged access": {"ranks": [0], "access": FORGED},
        "the secret as access": {"ranks": [0], "access": ticket["secret"]},
        "no ranks and a forged access": {"ranks": [], "access": FORGED},
    }


async def test_an_engine_is_told_to_who_shows_a_ticket_of_it_that_is_good(
    prefill: AgentProcess,
) -> None:
    async with (
        engine(PrefillSession, prefill.attach) as source,
        engine(PrefillSession, prefill.attach) as other,
    ):
        offer, others = [
            await one.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
            for one in (source, other)
        ]
        ticket = dict(offer.ticket)
        refused = {
            what: ask(prefill.peer, "handshake", handshake(source, **shown))["error"]
            for what, shown in without_a_right(ticket).items()
        }
        right = {key: ticket[key] for key in OFFER_KEYS}
        good = ask(prefill.peer, "handshake", handshake(source, **right))
        named = {**right, "engine_instance": others.ticket["engine_instance"]}
        crossed = ask(prefill.peer, "handshake", handshake(other, **named))["error"]
        for one in (offer, others):
            await one.withdraw()
            await one.released()
        late = ask(prefill.peer, "handshake", handshake(source, **right))

    assert good["ok"]["memory"]["engine"]["engine_id"] == source.spec.engine_id
    assert {error["code"] for error in refused.values()} <= {"forbidden", "offer_unknown"}
    assert {key for error in refused.values() for key in error["detail"]} <= {"offer_id"}
    assert (crossed["code"], crossed["detail"]) == ("forbidden", {})
    assert late["error"]["code"] == ErrorCode.OFFER_WITHDRAWN


async def test_what_is_asked_of_an_engines_memory_needs_the_access_to_it(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        shake = handshake(source, **{key: offer.ticket[key] for key in OFFER_KEYS})
        done = ask(prefill.peer, "handshake", shake)["ok"]
        about = {
            "agent_boot": offer.ticket["agent_boot"],
            "engine_id": source.spec.engine_id,
            "memory_id": done["memory_id"],
        }
        check = {**about, "progress_s": 60.0}

        right = ask(prefill.peer, "check", {**about, "access": done["access"]})
        refusals = [
            ask(prefill.peer, "check", {**check, "access": FORGED}),
            ask(prefill.peer, "check", check),
            ask(prefill.peer, "pack", pack_of(about, offer.offer_id)),
            ask(decode.peer, "delegate", delegate_of(target, offer.ticket)),
        ]
        await offer.withdraw()

    assert right["ok"] == {}
    codes = [reply["error"]["code"] for reply in refusals]
    assert codes == ["forbidden", "invalid", "forbidden", "forbidden"]


async def test_a_fetch_with_a_forged_ticket_does_not_fail_those_that_come_with_it(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    nothing: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
    async with pair(prefill.attach, decode.attach) as (source, target):
        before = target.snapshot()
        offers = [await source.prefill.offer(f"r{n}", **nothing) for n in range(4)]
        fetches = [
            target.decode.fetch({**offer.ticket, **changes}, **nothing)
            for offer in offers
            for changes in ({"secret": FORGED}, {})
        ]
        codes = [(await failure_of(fetch)).code for fetch in fetches[::2]]
        for fetch in fetches[1::2]:
            await fetch.completed()

        assert codes == [ErrorCode.FORBIDDEN] * 4
        assert same(target.snapshot(), before)
        assert await works(source, target)


def lies(readers: list[Leased], random: Random) -> Iterator[tuple[str, Body]]:
    """Requests that name all as it is, with a right of another reader, of another kind, or none."""
    while True:
        victim, liar = random.sample(readers, 2)
        op, (body, field) = random.choice(list(victim.requests().items()))
        right = victim.rights()[field]
        others = {*liar.rights().values(), *victim.rights().values(), FORGED} - {right}
        yield op.partition(" ")[0], {**body, field: random.choice(sorted(others))}


def refusals_of(
    agent: AgentProcess, asks: Iterator[tuple[str, Body]], readers: list[Leased]
) -> list[Body]:
    """The errors that one connection gets for many requests; the readers renew meanwhile."""
    errors: list[Body] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVTIMEO, round(REPLY_WITHIN_S * 1000))
        dealer.connect(agent.peer)
        envelope = {"v": 1, "boot": uuid.uuid4().hex, "secret": uuid.uuid4().hex}
        for start in range(0, NUM_LIES, AT_A_TIME):
            for reader in readers if start % 1000 == 0 else ():
                renewal = {**reader.lease, "token": reader.token, "lease_s": 30.0}
                assert "ok" in ask(agent.peer, "renew", renewal)
            for number in range(start, start + AT_A_TIME):
                op, body = next(asks)
                dealer.send(msgpack.packb({**envelope, "op": op, "id": 1 + number, "body": body}))
            replies = [msgpack.unpackb(dealer.recv()) for _ in range(AT_A_TIME)]
            errors += [reply.get("error", {"code": "none", **reply}) for reply in replies]
    return errors


async def test_rights_of_others_and_of_other_kinds_open_nothing(prefill: AgentProcess) -> None:
    async with (
        engine(PrefillSession, prefill.attach) as one,
        engine(PrefillSession, prefill.attach) as other,
    ):
        made = [
            (source, await source.prefill.offer(name, num_tokens=16, block_ids={"full": [1]}))
            for source in (one, other)
            for name in ("r1", "r2")
        ]
        readers = [Leased(prefill, source, dict(offer.ticket)) for source, offer in made]

        errors = refusals_of(prefill, lies(readers, Random(1)), readers)
        confirmed = [
            ask(prefill.peer, "confirm", {**reader.lease, "token": reader.token})
            for reader in readers
        ]
        outcomes = [await offer.released() for _, offer in made]

    assert {error["code"] for error in errors} == {ErrorCode.FORBIDDEN}
    assert len(errors) == NUM_LIES
    assert all(error["detail"] == {} for error in errors)
    assert ["ok" in reply for reply in confirmed] == [True] * 4
    assert outcomes == [Outcome.COMPLETED] * 4


@contextmanager
def events_of(*agents: AgentProcess) -> Iterator["zmq.Socket[bytes]"]:
    """A SUB that hears all events of the agents."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.set(zmq.LINGER, 0)
        sub.set(zmq.RCVHWM, 0)
        sub.subscribe(b"")
        for agent in agents:
            sub.connect(agent.started["events"])
        yield sub


async def test_no_event_log_line_status_metric_or_story_has_a_right(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    blocks: list[dict[str, Any]] = [
        {"num_tokens": 16, "block_ids": {"full": [number]}} for number in (1, 2)
    ]
    async with pair(prefill.attach, decode.attach) as (source, target):
        rights = [source.control.boot, target.control.boot]
        with events_of(prefill, decode) as events:
            await until(lambda: events.poll(0))
            forged = await source.prefill.offer("forged", **blocks[0])
            fetch = target.decode.fetch({**forged.ticket, "secret": FORGED}, **blocks[1])
            failure = await failure_of(fetch)
            await forged.withdraw()
            plain = await source.prefill.offer("plain", **blocks[0])
            reader = Leased(prefill, source, dict(plain.ticket))
            lease = {**reader.lease, "token": reader.token}
            refused = ask(prefill.peer, "confirm", {**lease, "token": FORGED})
            ask(prefill.peer, "confirm", lease)
            offer = await source.prefill.offer("ours", **blocks[0])
            completed = target.decode.fetch(offer.ticket, **blocks[1])
            ended = await completed.completed()
            rights += [one.ticket["secret"] for one in (forged, plain, offer)]
            rights += [reader.access, reader.token]
            heard: list[list[bytes]] = []
            told = offer.offer_id.encode()

            def is_released() -> bool:
                while events.poll(0):
                    heard.append(events.recv_multipart())
                return any(b"offer.released" in one[0] and told in one[1] for one in heard)

            await until(is_released)
            story = [
                ask(agent.peer, op, {kind: name})
                for agent in (prefill, decode)
                for op in ("status", "trace")
                for kind, name in (("offer_id", plain.offer_id), ("fetch_id", fetch.fetch_id))
            ]
        texts = {
            "events": repr(heard),
            "logs": "\n".join(prefill.lines() + decode.lines()),
            "metrics": prefill.page("/metrics")[1] + decode.page("/metrics")[1],
            "status": json.dumps(story),
            "refusals": repr(refused),
            "reprs": repr((offer, fetch, failure, ended, Ticket.from_json(offer.ticket))),
        }

    assert decode.says("handoff.story")
    assert "Confirmed" in texts["status"]
    assert len(rights) == 7
    for secret in rights:
        assert [where for where, text in texts.items() if secret in text] == []
