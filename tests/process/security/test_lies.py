"""Random requests with valid types, and names and rights of others, at every socket.

Each gets one reply and has no effect, no agent connects elsewhere, and handoffs beside are right.
"""

import random
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import msgpack
import pytest
from msgspec import inspect as types

from kvbus.protocol import REQUESTS, Detach, Request, Socket, Ticket
from tests.process.security.conftest import signed
from tests.support.agents import AgentProcess
from tests.support.engines import Engine, engine, works
from tests.support.examples import num_examples
from tests.support.keyring import KeyRing
from tests.support.plain_sockets import Attached, Curve, plain_socket

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

PEER_REQUESTS = {
    "prefill": tuple(REQUESTS[Socket.PREFILL_PEER].values()),
    "decode": tuple(REQUESTS[Socket.DECODE_PEER].values()),
}
STAYING = tuple(kind for kind in REQUESTS[Socket.ENGINE].values() if kind is not Detach)
LOCAL_REQUESTS = {
    "prefill": (*STAYING, *REQUESTS[Socket.PREFILL].values()),
    "decode": (*STAYING, *REQUESTS[Socket.DECODE].values()),
}
OF_COST = ("engine_unknown", "invalid")
"""Refusals of a permitted request with wrong names."""
HARMLESS = {
    "status", "trace", "cost", "ping", "unpack", "cancel_part", "cancel_request", "decline",
    "commits", "committed", "keep_offers",
}  # fmt: skip
"""Requests without a right; unknown slots and names are released."""
NUM_HANDOFFS = num_examples(12)
NUM_LIES = num_examples(10_000)
SIDES = ("prefill", "decode")

Known = Mapping[str, Sequence[Any]]
"""Real values of other engines, by field."""
WINDOW = 64
"""Requests that wait for their reply at the same time."""


def lies(
    kinds: Sequence[type[Request[Any]]], known: Known, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    rng = random.Random(seed)
    shapes = {kind: types.type_info(kind) for kind in kinds}
    while True:
        kind = rng.choice(kinds)
        yield kind.op, _value(rng, known, shapes[kind])


def _value(rng: random.Random, known: Known, of: Any, name: str = "") -> Any:  # noqa: PLR0911, PLR0912  one return a kind of type
    value = partial(_value, rng, known)
    if name in known and rng.random() < 0.8:
        return rng.choice(known[name])
    match of:
        case types.StructType(fields=fields):
            return {
                each.encode_name: value(each.type, each.encode_name)
                for each in fields
                if each.required or rng.random() < 0.7
            }
        case types.IntType():
            low = of.ge if of.ge is not None else -(2**63)
            high = of.le if of.le is not None else 2**63 - 1
            return rng.choice((low, high, rng.randint(low, high), min(high, max(low, 1))))
        case types.FloatType():
            return rng.choice((1e-3, 1.0, 86_400.0))
        case types.StrType(pattern=None):
            return "x" * min(of.max_length or 32, max(of.min_length or 0, rng.choice((1, 32))))
        case types.StrType():
            return "tcp://127.0.0.1:1"
        case types.BytesType():
            return rng.randbytes(4 * rng.randint(0, 4))
        case types.EnumType(cls=cls):
            return rng.choice(list(cls)).value
        case types.LiteralType(values=values):
            return rng.choice(values)
        case types.DictType(key_type=key, value_type=item):
            return {value(key): value(item) for _ in range(rng.randint(0, 2))}
        case types.VarTupleType(item_type=item):
            return [value(item) for _ in range(max(of.min_length or 0, rng.randint(0, 2)))]
        case types.UnionType(types=options):
            return value(rng.choice(options))
        case types.Metadata(type=inner):
            return value(inner)
        case types.BoolType():
            return rng.random() < 0.5
        case types.NoneType():
            return None
    return {}


@dataclass
class Liar:
    """Sends ``num`` lies to an endpoint; counts what each was answered, by code, "ok" for yes."""

    endpoint: str
    lies: Iterator[tuple[str, dict[str, Any]]]
    num: int
    curve: Curve | None = None
    boot: str = field(default_factory=lambda: uuid.uuid4().hex)
    answers: Counter[str] = field(default_factory=Counter)
    accepted: set[str] = field(default_factory=set)
    twice: int = 0

    def run(self) -> None:
        with plain_socket(self.endpoint, self.curve) as dealer:
            waiting = dict[int, str]()
            for number, (op, body) in zip(range(1, self.num + 1), self.lies, strict=False):
                fields = {"v": 1, "op": op, "id": number, "boot": self.boot, "body": body}
                waiting[number] = op
                dealer.send(msgpack.packb(fields))
                while len(waiting) >= WINDOW:
                    self._note(msgpack.unpackb(dealer.recv()), waiting)
            while waiting:
                self._note(msgpack.unpackb(dealer.recv()), waiting)
            self.twice += int(bool(dealer.poll(0)))

    def _note(self, reply: dict[str, Any], waiting: dict[int, str]) -> None:
        op = waiting.pop(reply["re"], None)
        if op is None:
            self.twice += 1
        elif code := reply["ok" if "ok" in reply else "error"].get("code"):
            self.answers[code] += 1  # a part that failed is a reply with a code
        else:
            self.answers["ok"] += 1
            self.accepted.add(op)


def what_is_true(
    agent: AgentProcess, source: Engine, ticket: Ticket, rights: list[str], trap: str
) -> Known:
    boot = agent.started["boot_id"]
    return {
        "agent_boot": [boot],
        "engine_id": [source.spec.engine_id],
        "engine_instance": [ticket.engine_instance],
        "offer_id": [ticket.offer_id],
        "epoch": [1, 2],
        "secret": rights,
        "token": rights,
        "rank_secret": rights,
        "endpoint": [trap],
        "ticket": [signed(ticket, endpoint=trap, secret=right).to_json() for right in rights],
    }


async def test_lies_get_one_answer_each_and_have_no_effect(
    site: list[AgentProcess], ring: KeyRing, trap: str
) -> None:
    liars: list[Liar] = []
    async with engine(site[0].attach, seed=1) as source, engine(site[1].attach, seed=2) as target:
        shape: dict[str, Any] = {"num_tokens": 16, "block_ids": source.some_blocks(9, 16)}
        held, other = [await source.prefill.offer(name, **shape) for name in ("held", "other")]
        rights = [other.ticket["secret"], "0" * 32]
        for side, agent in zip(SIDES, site, strict=True):
            known = what_is_true(agent, source, Ticket.from_json(held.ticket), rights, trap)
            peers, engines = (
                partial(lies, requests[side], known) for requests in (PEER_REQUESTS, LOCAL_REQUESTS)
            )
            with Attached(agent.attach) as process:
                boot = uuid.uuid4().hex
                ipc = process.hello(engine_id="liar", boot=boot)["ok"]["engine_endpoint"]
                these = [
                    Liar(agent.peer, peers(1), NUM_LIES, ring.curve("any-observer", side)),
                    Liar(agent.peer, peers(2), 2 * NUM_LIES, ring.curve("any-decode", side)),
                    Liar(ipc, engines(3), NUM_LIES),
                    Liar(ipc, engines(4), NUM_LIES, boot=boot),
                ]
                async with anyio.create_task_group() as tasks:
                    for liar in these:
                        tasks.start_soon(anyio.to_thread.run_sync, liar.run)
                    for _ in range(NUM_HANDOFFS):
                        assert await works(source, target)
            liars += these
        for offer in (held, other):
            await offer.withdraw()
            await offer.ended
    assert sum(liar.num for liar in liars) == 10 * NUM_LIES
    for liar in liars:
        assert sum(liar.answers.values()) == liar.num
        assert not liar.twice
        assert liar.accepted <= HARMLESS
    for observer in liars[0::4]:
        assert set(observer.answers) <= {"ok", "forbidden", "busy", *OF_COST}
