"""Somebody who only reaches the ports floods them: memory stays, and handoffs go on beside it."""

import socket
import uuid
from contextlib import ExitStack

import msgpack
import psutil
import pytest
from msgspec.structs import replace

from kvbus.geometry import BlockTable
from kvbus.protocol import FetchPart, to_body
from tests.process.security.wire import address_of, bounded_growth, connected, frame
from tests.support.agents import AgentProcess, Agents
from tests.support.engines import pair, works
from tests.support.plain_sockets import ask
from tests.unit.vectors.golden import example

pytestmark = pytest.mark.anyio
NUM_DESCRIPTORS, NUM_HANDOFFS = 300, 5
NUM_PARTS, PART_BYTES = 100, 1 << 20
ASKED = {"v": 1, "op": "no.such", "secret": "s" * 32, "body": {}}


async def test_endless_connections_leave_room_for_known_peers(
    fresh: Agents,
) -> None:
    """The descriptors of an agent are many fewer than the connections that are made to it."""
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    prefill.runner = ("prlimit", f"--nofile={NUM_DESCRIPTORS}")
    prefill.expected_trouble.add("descriptors.exhausted")
    fresh.start(prefill, decode)

    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        with ExitStack() as stack:
            for _ in range(5 * NUM_DESCRIPTORS):
                wire = stack.enter_context(socket.socket())
                wire.setblocking(False)
                wire.connect_ex(address_of(prefill.peer))
            while psutil.Process(prefill.pid).num_fds() < NUM_DESCRIPTORS:
                assert await works(source, target)
            for _ in range(NUM_HANDOFFS):
                assert await works(source, target)
        assert await works(source, target)


def test_refusals_are_logged_at_bounded_rate_and_all_counted(fresh: Agents) -> None:
    prefill = fresh.prepare("prefill")
    fresh.start(prefill)

    with connected(prefill.peer, "DEALER") as wire:
        for number in range(1, 501):
            asked = {**ASKED, "boot": f"noisy-{number % 50}", "id": number}
            wire.sendall(frame(msgpack.packb(asked)))
        prefill.says("lines.left_out")
    num_refused = prefill.metric("refusals_total", code="unknown_op")

    assert num_refused == 500
    assert len(prefill.logged("request.refused")) < 250


def test_decode_agent_keeps_nothing_of_refused_parts(decode: AgentProcess) -> None:
    part = replace(example(FetchPart), tables={"full": BlockTable(bytes(PART_BYTES))})

    with bounded_growth(decode, most_bytes=NUM_PARTS * PART_BYTES // 2):
        for _ in range(NUM_PARTS):
            asked = to_body(replace(part, token=uuid.uuid4().hex))
            refused = ask(decode.peer, "fetch_part", asked)
            assert refused["error"]["code"] == "engine_unknown"
