"""Frames that decode and lie, 100,000 of them, at every socket where requests are answered.

Each gets one answer and has no effect, nobody is connected to, and handoffs beside are right.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.protocol import (
    DECODE_PEER_REQUESTS,
    DECODE_REQUESTS,
    ENGINE_REQUESTS,
    PREFILL_PEER_REQUESTS,
    PREFILL_REQUESTS,
    Detach,
)
from tests.agents import AgentProcess
from tests.engines import Engine, engine, works
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
def agents(keyed_prefill: AgentProcess, keyed_decode: AgentProcess) -> dict[str, AgentProcess]:
    return {"prefill": keyed_prefill, "decode": keyed_decode}


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """An address that lies name, and that nobody may connect to."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


@contextmanager
def attached(path: Path) -> Iterator[tuple[str, str]]:
    """A process that said hello, and no more: its boot id, and where requests go."""
    boot = "f" * 32
    body = {"min_protocol": 1, "max_protocol": 1, "engine_id": "liar", "boot": boot}
    hello = msgpack.packb({"op": "hello", "body": body})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(struct.pack("<I", len(hello)) + hello)
        connection.settimeout(30.0)
        size = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))[0]
        welcome = msgpack.unpackb(connection.recv(size, socket.MSG_WAITALL))
        yield boot, welcome["ok"]["engine_endpoint"]


def what_is_true(
    agent: AgentProcess, source: Engine, ticket: dict[str, Any], rights: list[str], trap: str
) -> Known:
    """Names that are those of others, rights that are rights to something else, and the trap."""
    boot = agent.started["boot_id"]
    return {
        "agent_boot": [boot],
        "engine_id": [source.spec.engine_id],
        "engine_instance": [ticket["engine_instance"]],
        "offer_id": [ticket["offer_id"]],
        "epoch": [1, 2],
        "secret": rights,
        "token": rights,
        "access": rights,
        "endpoint": [trap],
        "ticket": [{**ticket, "endpoint": trap, "secret": right} for right in rights],
    }


async def test_a_hundred_thousand_lies_have_one_answer_each_and_no_effect(agents, ring, trap):
    liars: list[Liar] = []
    async with (
        engine(PrefillSession, agents["prefill"].attach, seed=1) as source,
        engine(DecodeSession, agents["decode"].attach, seed=2) as target,
    ):
        shape = {"num_tokens": 16, "block_ids": source.some_blocks(9, 16)}
        held, other = [await source.prefill.offer(name, **shape) for name in ("held", "other")]
        rights = [other.ticket["secret"], "0" * 32]
        endpoint = f"tcp://127.0.0.1:{trap.getsockname()[1]}"
        for number, side in enumerate(SIDES):
            agent = agents[side]
            known = what_is_true(agent, source, held.ticket, rights, endpoint)
            peers = Lies(PEER_REQUESTS[side], known, seed=number)
            engines = Lies(LOCAL_REQUESTS[side], known, seed=number)
            with attached(agent.attach) as (boot, ipc):
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
