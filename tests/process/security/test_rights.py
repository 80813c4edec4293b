"""A stranger that gets events and reaches the peer socket has no right, and no effect."""

import json
from typing import Any

import msgspec
import pytest
import zmq

from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome, Ticket
from tests.process.security.wire import FORGED
from tests.support.agents import AgentProcess, until
from tests.support.engines import NOTHING, Engine, engine, failure_of, pair, same, works
from tests.support.plain_sockets import ask

pytestmark = pytest.mark.anyio

Body = dict[str, Any]
OFFER_KEYS = ("engine_instance", "offer_id", "secret")
"""The fields of a ticket in a handshake."""


def handshake(source: Engine, **right: Any) -> Body:
    return {
        "min_protocol": 1,
        "max_protocol": 1,
        "agent_id": "stranger",
        "engine_id": source.spec.engine_id,
        "reader": msgspec.to_builtins(source.spec),
        **right,
    }


class Leased:
    """An offer that a plain reader has the lease of, and all that this reader knows."""

    def __init__(self, agent: AgentProcess, source: Engine, ticket: Body) -> None:
        shown = {key: ticket[key] for key in OFFER_KEYS}
        done = ask(agent.peer, "handshake", handshake(source, **shown))["ok"]
        self.offer = {key: ticket[key] for key in ("agent_boot", "offer_id")}
        self.memory = {
            "agent_boot": ticket["agent_boot"],
            "engine_id": ticket["engine_id"],
            "memory_id": done["memory_id"],
        }
        acquire = {**self.offer, "secret": ticket["secret"], "reader_id": "r", "lease_s": 30.0}
        granted = ask(agent.peer, "acquire", acquire)["ok"]
        self.lease = {**self.offer, "epoch": granted["epoch"]}
        self.rights = {
            "secret": ticket["secret"],
            "rank_secret": done["rank_secret"],
            "token": granted["token"],
        }

    @property
    def renewal(self) -> Body:
        return {**self.lease, "token": self.rights["token"], "lease_s": 30.0}

    @property
    def pack(self) -> Body:
        axes = ["layer", "kv", "token", "head", "dim", "block"]
        tile = {"group": "full", "layers": [0], "parts": ["k"], "first_head": 0, "num_heads": 1}
        return {
            **self.memory,
            **self.lease,
            "token": self.rights["token"],
            "rank_secret": self.rights["rank_secret"],
            "rank": 0,
            "tile": {**tile, "start": 0, "stop": 16},
            "order": {"axes": axes, "block_size": 1},
            "table": {"ids": b"\1\0\0\0"},
            "slot_lease_s": 30.0,
        }

    def requests(self) -> dict[str, tuple[Body, str]]:
        return {
            "acquire": ({**self.offer, "reader_id": "x", "lease_s": 1e-3}, "secret"),
            "commit": ({**self.offer, "reader_id": "x", "token": FORGED, "tables": {}}, "secret"),
            "withdraw": (self.offer, "secret"),
            "renew": ({**self.renewal, "lease_s": 1e-3}, "token"),
            "release": ({**self.lease, "code": "cancelled"}, "token"),
            "check": ({**self.memory, "progress_s": 0.0}, "rank_secret"),
            "await_work": ({**self.memory, "after": 512}, "rank_secret"),
            "pack": (self.pack, "rank_secret"),
            "pack under another lease": (self.pack, "token"),
        }


def without_a_right(ticket: Body) -> dict[str, Body]:
    published = {key: ticket[key] for key in ("engine_instance", "offer_id")}
    return {
        "nothing": {},
        "the instance": {"engine_instance": ticket["engine_instance"]},
        "all that is published": published,
        "a forged secret": {**published, "secret": FORGED},
        "the ranks": {"ranks": [0]},
        "a forged access": {"ranks": [0], "rank_secret": FORGED},
        "the secret as access": {"ranks": [0], "rank_secret": ticket["secret"]},
        "no ranks and a forged access": {"ranks": [], "rank_secret": FORGED},
    }


async def test_handshake_needs_a_valid_ticket_of_the_engine(prefill: AgentProcess) -> None:
    async with engine(prefill.attach) as source, engine(prefill.attach) as other:
        offers = [await one.prefill.offer("r", **NOTHING) for one in (source, other)]
        ticket, others = (dict(offer.ticket) for offer in offers)
        right = {key: ticket[key] for key in OFFER_KEYS}
        crossed = {**right, "engine_instance": others["engine_instance"]}
        refused = {
            what: ask(prefill.peer, "handshake", handshake(source, **shown))["error"]
            for what, shown in without_a_right(ticket).items()
        }
        good = ask(prefill.peer, "handshake", handshake(source, **right))
        of_another = ask(prefill.peer, "handshake", handshake(other, **crossed))["error"]
        for offer in offers:
            await offer.withdraw()
            await offer.ended
        late = ask(prefill.peer, "handshake", handshake(source, **right))
    assert good["ok"]["memory"]["engine"]["engine_id"] == source.spec.engine_id
    assert {error["code"] for error in refused.values()} <= {"forbidden", "offer_unknown"}
    assert {key for error in refused.values() for key in error["detail"]} <= {"offer_id"}
    assert (of_another["code"], of_another["detail"]) == ("forbidden", {})
    assert late["error"]["code"] == ErrorCode.OFFER_WITHDRAWN


async def test_fetch_with_forged_ticket_fails_no_fetch_beside_it(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        before = target.snapshot()
        offers = [await source.prefill.offer(f"r{at}", **NOTHING) for at in range(4)]
        fetches = [
            target.decode.fetch({**offer.ticket, **forged}, **NOTHING)
            for offer in offers
            for forged in ({"secret": FORGED}, {})
        ]
        codes = [(await failure_of(fetch)).code for fetch in fetches[::2]]
        for fetch in fetches[1::2]:
            await fetch.ended
        assert codes == [ErrorCode.FORBIDDEN] * 4
        assert same(target.snapshot(), before)
        assert await works(source, target)


async def test_rights_of_others_and_of_other_kinds_open_nothing(prefill: AgentProcess) -> None:
    async with engine(prefill.attach) as one, engine(prefill.attach) as other:
        made = [
            (source, await source.prefill.offer(name, num_tokens=16, block_ids={"full": [1]}))
            for source in (one, other)
            for name in ("r1", "r2")
        ]
        readers = [Leased(prefill, source, dict(offer.ticket)) for source, offer in made]
        everything = {FORGED, *(right for one in readers for right in one.rights.values())}
        errors = [
            ask(prefill.peer, op.partition(" ")[0], {**body, field: wrong})["error"]
            for reader in readers
            for op, (body, field) in reader.requests().items()
            for wrong in sorted(everything - {reader.rights[field]})
        ]
        for reader in readers:
            assert "ok" in ask(prefill.peer, "renew", reader.renewal)
            body, field = reader.requests()["release"]
            assert "ok" in ask(prefill.peer, "release", {**body, field: reader.rights[field]})
        for _, offer in made:
            await offer.withdraw()
        outcomes = [await offer.ended for _, offer in made]
    assert {error["code"] for error in errors} == {ErrorCode.FORBIDDEN}
    assert all(error["detail"] == {} for error in errors)
    assert outcomes == [Outcome.WITHDRAWN] * 4


async def test_no_event_log_status_metric_or_history_shows_a_right(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    theirs: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}
    ours = {**theirs, "block_ids": {"full": [2]}}
    heard: list[list[bytes]] = []
    async with pair(prefill.attach, decode.attach) as (source, target):
        with zmq.Context() as context, context.socket(zmq.SUB) as events:
            events.set(zmq.LINGER, 0)
            events.subscribe(b"")
            for agent in (prefill, decode):
                events.connect(agent.started["events"])
            await until(lambda: events.poll(0))
            forged = await source.prefill.offer("forged", **theirs)
            fetch = target.decode.fetch({**forged.ticket, "secret": FORGED}, **ours)
            failure = await failure_of(fetch)
            leased = await source.prefill.offer("leased", **theirs)
            reader = Leased(prefill, source, dict(leased.ticket))
            refused = ask(prefill.peer, "renew", {**reader.renewal, "token": FORGED})
            fetched = await source.prefill.offer("fetched", **theirs)
            completed = await target.decode.fetch(fetched.ticket, **ours).ended
            for offer in (forged, leased):
                await offer.withdraw()
            body, field = reader.requests()["release"]
            ask(prefill.peer, "release", {**body, field: reader.rights[field]})

            def is_released() -> bool:
                while events.poll(0):
                    heard.append(events.recv_multipart())
                told = leased.offer_id.encode()
                return any(b"offer.released" in one[0] and told in one[1] for one in heard)

            await until(is_released)
        histories = [
            ask(agent.peer, op, {kind: name})
            for agent in (prefill, decode)
            for op in ("status", "trace")
            for kind, name in (("offer_id", leased.offer_id), ("fetch_id", fetch.fetch_id))
        ]
        texts = {
            "events": repr(heard),
            "logs": "\n".join(prefill.lines() + decode.lines()),
            "metrics": prefill.page("/metrics")[1] + decode.page("/metrics")[1],
            "histories": json.dumps(histories),
            "refusals": repr(refused),
            "reprs": repr((fetched, fetch, failure, completed, Ticket.from_json(fetched.ticket))),
        }
    assert decode.says("handoff.history")
    assert "Acquire" in texts["histories"]
    rights = [
        source.control.connection.boot,
        target.control.connection.boot,
        *reader.rights.values(),
    ]
    rights += [one.ticket["secret"] for one in (forged, fetched)]
    for right in rights:
        assert [where for where, text in texts.items() if right in text] == []
