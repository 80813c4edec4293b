"""Somebody who only reaches the ports floods them: memory stays, and handoffs go on beside it."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, repeat
from pathlib import Path

import anyio
import msgpack
import pytest

from kvbus.bus import ask_agent
from kvbus.protocol import Status
from tests.agents import WITHIN_S, AgentProcess, Agents
from tests.engines import pair, works
from tests.security.wire import (
    MORE,
    address_of,
    connected,
    cpu_s,
    frame,
    send_until_cut,
    watched,
)

pytestmark = pytest.mark.anyio
MIB = 1 << 20
NUM_DESCRIPTORS = 300
SLOW_SERVER = Path(__file__).parent / "processes" / "slow_server.py"


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
    await ask_agent(prefill.peer, Status(), timeout_s=WITHIN_S)  # it lets this address in again
    return sent[0], num_handoffs


@pytest.mark.parametrize(
    ("piece", "most_bytes"),
    [
        (frame(bytes(MIB), MORE), 700 * MIB),
        pytest.param(frame(bytes(16), MORE) * 10_000, 150 * MIB, marks=pytest.mark.long),
        pytest.param(frame(b"", MORE) * 100_000, 22 * MIB, marks=pytest.mark.long),
    ],
    ids=["large frames", "small frames", "empty frames"],
)
async def test_a_message_whose_frames_never_end_is_cut_off(
    prefill: AgentProcess, decode: AgentProcess, piece: bytes, most_bytes: int
) -> None:
    """Without a bound each of these takes some 700 MiB: ZeroMQ keeps an empty frame in 64 bytes."""

    def attack() -> int:
        wire = connected(prefill.peer, "DEALER")
        return send_until_cut(wire, repeat(piece), most_bytes=most_bytes)

    prefill.skip_log()
    with watched(prefill) as seen:
        num_sent, num_handoffs = await handoffs_beside(prefill, decode, attack)

    assert num_sent < most_bytes
    assert seen.grown_bytes < 400 * MIB
    assert num_handoffs > 0
    prefill.says("connection.ended", socket="peer")


async def test_frames_full_of_small_items_hold_nobody_up(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    """Each would take a second and a half, and the others behind it ten."""
    header = (
        b"\x86\xa1v\x01\xa2op\xa4ping\xa2id\x01\xa4boot\xa1b\xa6secret\xa1s\xa4body\x81\xa1x\xdd"
    )
    count_bytes = 4 * MIB - 64
    piece = frame(header + count_bytes.to_bytes(4, "big") + b"\x90" * count_bytes)

    def attack() -> int:
        wire = connected(prefill.peer, "DEALER")
        return send_until_cut(wire, repeat(piece, 12), most_bytes=100 * MIB)

    slow = prefill.metric("event_loop_lag_seconds_bucket", le="1.0")
    lags = prefill.metric("event_loop_lag_seconds_count")
    with watched(prefill) as seen:
        await handoffs_beside(prefill, decode, attack)
    within = prefill.metric("event_loop_lag_seconds_bucket", le="1.0") - slow
    all_lags = prefill.metric("event_loop_lag_seconds_count") - lags

    assert all_lags - within <= 1
    assert seen.grown_bytes < 200 * MIB


@pytest.mark.parametrize(
    "attack_bytes",
    [8, pytest.param(900, marks=pytest.mark.long), pytest.param(12 * MIB, marks=pytest.mark.long)],
    ids=["short topics", "long topics", "one of megabytes"],
)
async def test_subscriptions_without_end_are_cut_off(
    prefill: AgentProcess, decode: AgentProcess, attack_bytes: int
) -> None:
    """They hold the call that sends an event, and would hold it for as long as they come."""

    def attack() -> int:
        wire = connected(prefill.started["events"], "SUB")
        return send_until_cut(wire, subscriptions(attack_bytes), most_bytes=50 * MIB)

    prefill.skip_log()
    with watched(prefill) as seen:
        num_sent, _ = await handoffs_beside(prefill, decode, attack)

    assert num_sent < 50 * MIB
    assert seen.grown_bytes < 300 * MIB
    prefill.says("connection.ended", socket="events")


def subscriptions(topic_bytes: int) -> Iterator[bytes]:
    """Ever new topics, many at a time where they are short."""
    most = max(1, min(200, MIB // topic_bytes))
    for first in count(step=most):
        topics = (number.to_bytes(topic_bytes, "big") for number in range(first, first + most))
        yield b"".join(frame(b"\x01" + topic) for topic in topics)


async def test_who_asks_without_reading_the_answers_and_goes_holds_nobody_up(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    body = {"filling": bytes(2048)}
    ping = {"v": 1, "op": "ping", "boot": "greedy", "secret": "s" * 32, "id": 1, "body": body}
    pings = frame(msgpack.packb(ping)) * 100

    def attack() -> int:
        """Ends each time while more is on its way than the agent may have read."""
        wires = (connected(prefill.peer, "DEALER") for _ in range(4))
        return sum(send_until_cut(wire, repeat(pings), most_bytes=30 * MIB) for wire in wires)

    with watched(prefill) as seen:
        await handoffs_beside(prefill, decode, attack)

    assert seen.grown_bytes < 100 * MIB


@contextmanager
def connections(endpoint: str, number: int) -> Iterator[None]:
    """So many connections, as fast as they can be made; none says anything."""
    with ExitStack() as stack:
        for at in range(number):
            wire = stack.enter_context(socket.socket())
            wire.setblocking(False)
            wire.connect_ex(address_of(endpoint))
            if at % 20 == 0:
                time.sleep(0.005)
        yield


async def test_connections_without_end_leave_room_for_handoffs(fresh: Agents) -> None:
    """The descriptors of an agent are many fewer than the connections that are made to it."""
    quick = {"max_new_by_address_s": 1 << 20}
    prefill, decode = fresh.prepare("prefill", connections=quick), fresh.prepare("decode")
    prefill.runner = ("prlimit", f"--nofile={NUM_DESCRIPTORS}")
    prefill.expected_trouble.add("descriptors.exhausted")
    fresh.start(prefill, decode)

    def attack() -> int:
        with connections(prefill.peer, 5 * NUM_DESCRIPTORS), watched(prefill) as idle:
            time.sleep(2)
        assert idle.cpu_s < 1
        return 0

    with watched(prefill) as seen:
        _, num_handoffs = await handoffs_beside(prefill, decode, attack)

    assert num_handoffs > 0
    prefill.says("connection.ended", reason="descriptors are short")
    assert seen.fds_peak <= NUM_DESCRIPTORS
    assert len(prefill.logged("connection.ended")) < 100


@pytest.mark.long
def test_an_agent_without_descriptors_says_so_once_and_does_not_spin(fresh: Agents) -> None:
    """They are taken by way of the data plane, which kvbus cannot guard; ZeroMQ would spin."""
    agent = fresh.prepare("prefill", mapped=False)  # so UCX listens
    agent.runner = ("prlimit", f"--nofile={NUM_DESCRIPTORS}")
    agent.expected_trouble.add("descriptors.exhausted")
    fresh.start(agent)

    with connections(f"tcp://{agent.started['data'][0]}", 2 * NUM_DESCRIPTORS):
        agent.says("descriptors.exhausted")
        with connections(agent.peer, 50), watched(agent) as seen:
            agent.says("connection.ended", reason="descriptors are short")
            time.sleep(2)
        num_told = len(agent.logged("descriptors.exhausted"))
    agent.kill()  # UCX keeps what has connected to it

    assert num_told == 1
    assert seen.cpu_s < 1


def test_refusals_are_logged_so_many_a_second_and_the_others_are_counted(
    prefill: AgentProcess,
) -> None:
    asked = {"v": 1, "op": "no.such", "secret": "s" * 32, "body": {}}
    prefill.skip_log()
    before = prefill.metric("refusals_total", code="unknown_op")

    with connected(prefill.peer, "DEALER") as wire:
        for number in range(1, 501):
            boot = f"noisy-{number % 50}"
            wire.sendall(frame(msgpack.packb({**asked, "boot": boot, "id": number})))
        prefill.says("lines.left_out")
    num_refused = prefill.metric("refusals_total", code="unknown_op") - before

    assert num_refused == 500
    assert len(prefill.logged("request.refused")) < 250


@pytest.mark.long
def test_a_thousand_questions_for_the_status_cost_little(prefill: AgentProcess) -> None:
    """Each had the agent look at all its sockets: ten milliseconds in which it heard nobody."""
    asked = {"v": 1, "op": "status", "boot": "curious", "secret": "s" * 32, "body": {}}
    pieces = (frame(msgpack.packb({**asked, "id": number})) for number in range(1, 1001))
    prefill.status()

    before = cpu_s(prefill.pid)
    with connected(prefill.peer, "DEALER") as wire:
        wire.sendall(b"".join(pieces))
        replies = b""
        while replies.count(b"data_endpoints") < 1000:
            replies += wire.recv(65536)

    assert cpu_s(prefill.pid) - before < 3


@pytest.mark.long
def test_who_goes_while_its_queue_is_full_does_not_end_the_process() -> None:
    """libzmq 4.3.5 does so when its timer for heartbeats comes round after that: "!_io_error"."""
    with subprocess.Popen(
        [sys.executable, str(SLOW_SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        for _ in range(4):
            wire = connected(endpoint, "DEALER")
            wire.settimeout(1)  # some beats
            send_until_cut(wire, repeat(frame(bytes(100)) * 1000), most_bytes=256 * MIB)
        connected(endpoint, "DEALER").close()
        said, _ = server.communicate("end\n", timeout=WITHIN_S)

    assert (server.returncode, said) == (0, "alive\n")
