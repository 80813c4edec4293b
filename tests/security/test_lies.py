"""Frames that decode and lie: with rights of another reader, or of another kind, open nothing."""

import uuid
from collections.abc import Iterator
from random import Random
from typing import Any

import msgpack
import pytest
import zmq

from kvbus.engine import PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import AgentProcess
from tests.engines import Engine, engine
from tests.plain_sockets import REPLY_WITHIN_S, ask
from tests.security.listening import FORGED
from tests.security.test_handshakes import handshake, pack_of

pytestmark = pytest.mark.anyio
NUM_LIES, AT_A_TIME = 10_000, 200
Body = dict[str, Any]


class Leased:
    """An offer that a plain reader has the lease of, and all that this reader knows."""

    def __init__(self, agent: AgentProcess, source: Engine, ticket: Body) -> None:
        shown = {key: ticket[key] for key in ("engine_instance", "offer_id", "secret")}
        done = ask(agent.peer, "handshake", handshake(source, **shown))["ok"]
        self.offer = {key: ticket[key] for key in ("agent_boot", "offer_id")}
        self.memory = {
            "agent_boot": ticket["agent_boot"],
            "engine_id": ticket["engine_id"],
            "memory_id": done["memory_id"],
        }
        reader = {"reader_id": uuid.uuid4().hex, "lease_s": 30.0}
        granted = ask(agent.peer, "claim", {**self.offer, **reader, "secret": ticket["secret"]})
        self.lease = {**self.offer, "epoch": granted["ok"]["epoch"]}
        self.secret, self.access = ticket["secret"], done["access"]
        self.token = granted["ok"]["token"]

    def requests(self) -> dict[str, tuple[Body, str]]:
        """All that may be asked, and the right to it."""
        pack = {**pack_of(self.memory, self.lease["offer_id"]), **self.lease}
        return {
            "claim": ({**self.offer, "reader_id": "x", "lease_s": 1e-3}, "secret"),
            "take": ({**self.offer, "reader_id": "x", "token": FORGED, "tables": {}}, "secret"),
            "withdraw": (self.offer, "secret"),
            "renew": ({**self.lease, "lease_s": 1e-3}, "token"),
            "confirm": (self.lease, "token"),
            "release": ({**self.lease, "code": "cancelled"}, "token"),
            "check": ({**self.memory, "progress_s": 0.0}, "access"),
            "pack": ({**pack, "token": self.token}, "access"),
            "pack under another lease": ({**pack, "access": self.access}, "token"),
        }

    def rights(self) -> dict[str, str]:
        return {"secret": self.secret, "token": self.token, "access": self.access}


def lies(readers: list[Leased], random: Random) -> Iterator[tuple[str, Body]]:
    while True:
        victim, liar = random.sample(readers, 2)
        op, (body, field) = random.choice(list(victim.requests().items()))
        right = victim.rights()[field]
        others = {*liar.rights().values(), *victim.rights().values(), FORGED} - {right}
        yield op.partition(" ")[0], {**body, field: random.choice(sorted(others))}


def refusals_of(agent: AgentProcess, asks: Iterator[tuple[str, Body]]) -> list[Body]:
    """The errors that one connection gets for many requests."""
    errors: list[Body] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVTIMEO, round(REPLY_WITHIN_S * 1000))
        dealer.connect(agent.peer)
        envelope = {"v": 1, "boot": uuid.uuid4().hex, "secret": uuid.uuid4().hex}
        for start in range(0, NUM_LIES, AT_A_TIME):
            for number in range(start, start + AT_A_TIME):
                op, body = next(asks)
                dealer.send(msgpack.packb({**envelope, "op": op, "id": 1 + number, "body": body}))
            replies = [msgpack.unpackb(dealer.recv()) for _ in range(AT_A_TIME)]
            errors += [reply.get("error", {"code": "none", **reply}) for reply in replies]
    return errors


async def test_rights_of_others_and_of_other_kinds_open_nothing(prefill):
    async with (
        engine(PrefillSession, prefill.attach) as one,
        engine(PrefillSession, prefill.attach) as other,
    ):
        offers = [
            await source.prefill.offer(name, num_tokens=16, block_ids={"full": [1]})
            for source in (one, other)
            for name in ("r1", "r2")
        ]
        sources = [one, one, other, other]
        readers = [
            Leased(prefill, source, offer.ticket)
            for source, offer in zip(sources, offers, strict=True)
        ]

        errors = refusals_of(prefill, lies(readers, Random(1)))
        confirmed = [
            ask(prefill.peer, "confirm", {**reader.lease, "token": reader.token})
            for reader in readers
        ]
        outcomes = [await offer.released() for offer in offers]

    assert {error["code"] for error in errors} == {ErrorCode.FORBIDDEN}
    assert len(errors) == NUM_LIES
    assert all(error["detail"] == {} for error in errors)
    assert ["ok" in reply for reply in confirmed] == [True] * 4
    assert outcomes == [Outcome.COMPLETED] * 4
