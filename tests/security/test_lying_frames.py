"""Well-formed frames whose fields lie, from keys that may ask: one refusal each, no more."""

from collections.abc import Iterator
from itertools import count, islice
from random import Random
from typing import Any

import msgpack
import msgspec
import pytest
import zmq

from kvbus.engine import PrefillSession
from kvbus.keys.roles import Role
from kvbus.protocol.message import Request
from kvbus.protocol.peer import DECODE_PEER_REQUESTS, PREFILL_PEER_REQUESTS
from tests.agents import AgentProcess
from tests.engines import engine
from tests.keyring import envelope, hand_over
from tests.plain_sockets import apply

pytestmark = pytest.mark.anyio


@pytest.fixture
def prefill(keyed_prefill: AgentProcess) -> AgentProcess:
    return keyed_prefill


@pytest.fixture
def decode(keyed_decode: AgentProcess) -> AgentProcess:
    return keyed_decode


SECRETS = ("00" * 16, "ff" * 16, "a", "")
HARMLESS = {"status", "unpack", "abort_delegate"}
"""Answered ok to whoever may ask: nothing of theirs is named, or nothing is told."""


def lies(kinds: tuple[type[Request[Any]], ...], known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Requests without end whose fields are of a real ticket, of nobody, or of a wrong type."""
    draw = Random(7)
    for number in count(1):
        kind = draw.choice(kinds)
        body = {
            field.name: draw.choice((known.get(field.name, 1), *SECRETS, 1, 2**63 - 1, 0.5, [], {}))
            for field in msgspec.structs.fields(kind)
        }
        for name in {"secret", "token", "access"} & body.keys():
            body[name] = draw.choice(SECRETS)
        yield envelope(kind.op, number) | {"boot": "liar", "body": body}


@pytest.mark.parametrize("role", [Role.DECODE, Role.OBSERVER])
@pytest.mark.parametrize(
    ("side", "kinds"), [("prefill", PREFILL_PEER_REQUESTS), ("decode", DECODE_PEER_REQUESTS)]
)
async def test_frames_that_lie_get_one_refusal_each_and_nothing_else(  # noqa: PLR0917 - fixtures
    ring, prefill, decode, role, side, kinds
) -> None:
    num_frames, window = 4000, 100
    agent = {"prefill": prefill, "decode": decode}[side]
    async with engine(PrefillSession, prefill.attach) as source:
        offer = await source.prefill.offer("r", num_tokens=32, block_ids=source.some_blocks(1, 32))
        frames = islice(lies(kinds, {**offer.ticket, "epoch": 1}), num_frames)
        told = {}
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVTIMEO, 30_000)
            apply(dealer, ring.curve(f"any-{role}", side))
            dealer.connect(agent.peer)
            ops = {}
            for batch in batched(frames, window):
                for frame in batch:
                    ops[frame["id"]] = frame["op"]
                    dealer.send(msgpack.packb(frame))
                for _ in batch:
                    reply = msgpack.unpackb(dealer.recv())
                    assert reply["re"] not in told
                    told[reply["re"]] = reply.get("error", {}).get("code", "ok")
            assert not dealer.poll(0)
        await offer.withdraw()
        await offer.released()
    await hand_over(prefill, decode)

    assert told.keys() == ops.keys()
    assert {ops[number] for number, code in told.items() if code == "ok"} <= HARMLESS
    if role is Role.OBSERVER:
        assert {code for number, code in told.items() if ops[number] != "status"} == {"forbidden"}


def batched(frames: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(frames, size)):
        yield batch
