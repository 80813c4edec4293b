"""Frames that decode and lie, 100,000 of them, at every socket where requests are answered.

Each gets one answer and has no effect, nobody is connected to, and handoffs beside are right.
"""

import socket
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.protocol import (
    DECODE_PEER_REQUESTS,
    DECODE_REQUESTS,
    ENGINE_REQUESTS,
    PREFILL_PEER_REQUESTS,
    PREFILL_REQUESTS,
    Detach,
    Ticket,
)
from tests.agents import AgentProcess
from tests.engines import Engine, engine, works
from tests.keyring import KeyRing
from tests.plain_sockets import Attached
from tests.security.conftest import signed
from tests.security.liar import Known, Liar, Lies, lying

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

PEER_REQUESTS = {"prefill": PREFILL_PEER_REQUESTS, "decode": DECODE_PEER_REQUESTS}
STAYING = tuple(kind for kind in ENGINE_REQUESTS if kind is not Detach)
LOCAL_REQUESTS = {
    "prefill": (*STAYING, *PREFILL_REQUESTS),
    "decode": (*STAYING, *DECODE_REQUESTS),
}
OF_COST = ("engine_unknown", "invalid")
"""What a request is refused with that observers may make, and that names engines."""
HARMLESS = {"status", "trace", "cost", "ping", "unpack", "abort_delegate", "forgo"}
"""What anybody with the role may ask; slots, reads and names that are not there are given back."""
NUM_HANDOFFS = 12
SIDES = ("prefill", "decode")


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """An address that lies name, and that nobody may connect to."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


def what_is_true(
    agent: AgentProcess, source: Engine, ticket: Ticket, rights: list[str], trap: str
) -> Known:
    """Names that are those of others, rights that are rights to something else, and the trap."""
    boot = agent.started["boot_id"]
    return {
        "agent_boot": [boot],
        "engine_id": [source.spec.engine_id],
        "engine_instance": [ticket.engine_instance],
        "offer_id": [ticket.offer_id],
        "epoch": [1, 2],
        "secret": rights,
        "token": rights,
        "access": rights,
        "endpoint": [trap],
        "ticket": [signed(ticket, endpoint=trap, secret=right).to_json() for right in rights],
    }


async def test_a_hundred_thousand_lies_have_one_answer_each_and_no_effect(
    site: list[AgentProcess], ring: KeyRing, trap: socket.socket
) -> None:
    liars: list[Liar] = []
    async with (
        engine(PrefillSession, site[0].attach, seed=1) as source,
        engine(DecodeSession, site[1].attach, seed=2) as target,
    ):
        shape: dict[str, Any] = {"num_tokens": 16, "block_ids": source.some_blocks(9, 16)}
        held, other = [await source.prefill.offer(name, **shape) for name in ("held", "other")]
        rights = [other.ticket["secret"], "0" * 32]
        endpoint = f"tcp://127.0.0.1:{trap.getsockname()[1]}"
        for number, (side, agent) in enumerate(zip(SIDES, site, strict=True)):
            known = what_is_true(agent, source, Ticket.from_json(held.ticket), rights, endpoint)
            peers = Lies(PEER_REQUESTS[side], known, seed=number)
            engines = Lies(LOCAL_REQUESTS[side], known, seed=number)
            with Attached(agent.attach) as process:
                boot = uuid.uuid4().hex
                ipc = process.hello(engine_id="liar", boot=boot)["ok"]["engine_endpoint"]
                these = [
                    Liar(agent.peer, peers, 10_000, ring.curve("any-observer", side)),
                    Liar(agent.peer, peers, 20_000, ring.curve("any-decode", side)),
                    Liar(ipc, engines, 10_000),
                    Liar(ipc, engines, 10_000, boot=boot),
                ]
                with lying(*these):
                    for _ in range(NUM_HANDOFFS):
                        assert await works(source, target)
            liars += these
        for offer in (held, other):
            await offer.withdraw()
            await offer.released()

    assert sum(liar.num for liar in liars) == 100_000
    for liar in liars:
        assert sum(liar.answers.values()) == liar.num
        assert not liar.twice
        assert liar.accepted <= HARMLESS
    for observer in liars[0::4]:
        assert set(observer.answers) <= {"ok", "forbidden", "busy", *OF_COST}
