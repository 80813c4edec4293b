"""Somebody who only reaches the ports floods them: memory stays, and handoffs go on beside it."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import anyio
import msgpack
import pytest

from kvbus.bus import ask_agent
from kvbus.protocol import Status
from tests.agents import WITHIN_S, AgentProcess, Agents, wait_until
from tests.engines import pair, works
from tests.security.wire import address_of, connected, frame, send_until_cut, watched

pytestmark = pytest.mark.anyio
MIB = 1 << 20
NUM_DESCRIPTORS = 300


async def handoffs_beside(
    prefill: AgentProcess, decode: AgentProcess, attack: Callable[[], int]
) -> tuple[int, int]:
    """How many bytes an attack could send, and how many handoffs went right meanwhile."""
    sent: list[int] = []
    num_handoffs = 0

    async def run_attack() -> None:
        sent.append(await anyio.to_thread.run_sync(attack))

    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_attack)
            while not sent:
                assert await works(source, target)
                num_handoffs += 1
        assert await works(source, target)
    await ask_agent(prefill.peer, Status(), timeout_s=WITHIN_S)
    return sent[0], num_handoffs


def request(op: str, request_id: int = 1, boot: str = "greedy", **body: object) -> bytes:
    asked = {"v": 1, "op": op, "boot": boot, "secret": "s" * 32, "id": request_id, "body": body}
    return frame(msgpack.packb(asked))


def subscriptions(topic_bytes: int) -> Iterator[bytes]:
    """Ever new topics, many at a time where they are short."""
    most = max(1, min(200, MIB // topic_bytes))
    for first in count(step=most):
        topics = (number.to_bytes(topic_bytes, "big") for number in range(first, first + most))
        yield b"".join(frame(b"\x01" + topic) for topic in topics)


# Subscriptions hold the call that sends an event. Without a bound they would hold it for as long as
# they come, and ZeroMQ would keep them all.
@pytest.mark.parametrize(
    "topic_bytes",
    [8, 1000, pytest.param(12 * MIB, marks=pytest.mark.long)],
    ids=["short topics", "long topics", "topics of megabytes"],
)
async def test_subscriptions_without_end_are_cut_off_and_handoffs_go_on_beside_them(
    prefill: AgentProcess, decode: AgentProcess, topic_bytes: int
) -> None:
    def attack() -> int:
        wire = connected(prefill.started["events"], "SUB")
        return send_until_cut(wire, subscriptions(topic_bytes), most_bytes=50 * MIB)

    with watched(prefill) as seen:
        num_sent, num_handoffs = await handoffs_beside(prefill, decode, attack)

    assert num_sent < 50 * MIB
    assert seen.grown_bytes < 200 * MIB
    assert num_handoffs > 0


async def test_connections_without_end_leave_room_for_handoffs_between_those_that_know_each_other(
    fresh: Agents,
) -> None:
    """The descriptors of an agent are many fewer than the connections that are made to it."""
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    prefill.runner = ("prlimit", f"--nofile={NUM_DESCRIPTORS}")
    prefill.expected_trouble.add("descriptors.exhausted")
    fresh.start(prefill, decode)

    def attack() -> int:
        with ExitStack() as stack:
            for _ in range(5 * NUM_DESCRIPTORS):
                wire = stack.enter_context(socket.socket())
                wire.setblocking(False)
                wire.connect_ex(address_of(prefill.peer))
            wait_until(
                lambda: len(list(Path(f"/proc/{prefill.pid}/fd").iterdir())) == NUM_DESCRIPTORS,
                "all descriptors are taken",
            )
        return 0

    _, num_handoffs = await handoffs_beside(prefill, decode, attack)

    assert num_handoffs > 0


def test_refusals_are_logged_so_many_a_second_and_the_others_are_counted(fresh: Agents) -> None:
    prefill = fresh.prepare("prefill")
    fresh.start(prefill)

    with connected(prefill.peer, "DEALER") as wire:
        for number in range(1, 501):
            wire.sendall(request("no.such", number, f"noisy-{number % 50}"))
        prefill.says("lines.left_out")
    num_refused = prefill.metric("refusals_total", code="unknown_op")

    assert num_refused == 500
    assert len(prefill.logged("request.refused")) < 250
