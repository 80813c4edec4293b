"""Floods by strangers and by one tenant: memory stays bounded, and handoffs of others continue."""

import os
import socket
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgpack
import psutil
import pytest
import zmq
from msgspec.structs import replace

from kvbus.errors import KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol import Empty, FetchPart, HoldOffer, Outcome, Rendezvous, to_body
from tests.process.security.wire import address_of
from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import NOTHING, ONE_BLOCK, Engine, engine, pair, works
from tests.support.plain_sockets import REPLY_WITHIN_S, Attached, ask, plain_socket
from tests.unit.vectors.golden import example

pytestmark = pytest.mark.anyio
NUM_DESCRIPTORS, NUM_HANDOFFS = 300, 5
NUM_PARTS, PART_BYTES = 100, 1 << 20
NUM_HELD_AT_ONCE, MAX_HANDOFFS = 1000, 4096
ASKED = {"v": 1, "op": "no.such", "secret": "s" * 32, "body": {}}

MIB = 1 << 20
NUM_SENDERS, NUM_EACH = 1100, 5
SEGMENT_BYTES = 4096
MAX_SEGMENTS = 4096
CONNECT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connected:
    connected.connect(sys.argv[1])
    connected.settimeout(1)
    try:
        sys.stdout.buffer.write(connected.recv(4096))
    except TimeoutError:
        pass  # it is let in, and not spoken to
"""


@contextmanager
def bounded_growth(agent: AgentProcess, *, most_bytes: int) -> Iterator[None]:
    """Fail if the agent ever had so much more resident memory meanwhile."""
    status, limit = Path(f"/proc/{agent.pid}/status"), Path(f"/proc/{agent.pid}/clear_refs")

    def resident_bytes(name: str) -> int:
        (line,) = [line for line in status.read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) * 1024

    limit.write_text("5")  # the kernel notes the most from now on
    before = resident_bytes("VmRSS")
    yield
    assert resident_bytes("VmHWM") - before < most_bytes


async def test_endless_connections_leave_room_for_known_peers(fresh: Agents) -> None:
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
    with plain_socket(prefill.peer) as dealer:
        for number in range(1, 501):
            dealer.send(msgpack.packb({**ASKED, "boot": f"noisy-{number % 50}", "id": number}))
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


class Crowd:
    """One connection of many senders with different boot ids; a thread repeats their requests."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._asked: list[tuple[str, dict[str, Any], str]] = []
        self._full, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._go_on)

    def ask(self, op: str, body: dict[str, Any], sender: str) -> None:
        self._asked.append((op, body, sender))
        asked = {"v": 1, "op": op, "id": len(self._asked), "boot": sender, "secret": sender}
        self._socket.send(msgpack.packb(asked | {"body": body}))

    def start(self) -> None:
        self._thread.start()
        assert self._full.wait(REPLY_WITHIN_S)

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _go_on(self) -> None:
        while not self._stopping.is_set():
            if not self._socket.poll(100):
                continue
            reply = msgpack.unpackb(self._socket.recv())
            message = reply.get("error", {}).get("message", "")
            if "not made this offer yet" in message:
                self.ask(*self._asked[reply["re"] - 1])
            elif message:
                self._full.set()


@contextmanager
def crowd_at(endpoint: str) -> Iterator[Crowd]:
    with plain_socket(endpoint) as socket:
        crowd = Crowd(socket)
        try:
            yield crowd
        finally:
            crowd.stop()


async def test_senders_waiting_for_names_hold_up_no_handoff(fresh: Agents) -> None:
    prefill, early, late = (fresh.prepare(role) for role in ("prefill", "decode", "decode"))
    fresh.start(prefill, early, late)
    async with pair(prefill.attach, early.attach) as (source, target):
        assert await works(source, target)
        with crowd_at(prefill.peer) as crowd, bounded_growth(prefill, most_bytes=100 * MIB):
            for number in range(NUM_SENDERS * NUM_EACH):
                wait_s = 6.0 * (1 + number // NUM_SENDERS)  # so that some of each always wait
                body = {"transfer_id": uuid.uuid4().hex, "wait_s": wait_s}
                crowd.ask("await_offer", body, f"sender-{number % NUM_SENDERS}")
            await anyio.to_thread.run_sync(crowd.start)
            assert await works(source, target)
            async with pair(prefill.attach, late.attach) as (another, newcomer):
                ticket = Rendezvous(uuid.uuid4().hex, prefill.peer).to_json()
                fetch = newcomer.decode.fetch(ticket, **NOTHING, timeout_s=60)
                offer = await another.prefill.offer(
                    "r", **NOTHING, transfer_id=ticket["transfer_id"]
                )
                await fetch.ended
                await offer.ended


class HoldFlood:
    """Holds of offers that do not exist, by id and by name, from one engine."""

    def __init__(self, engine: Engine, ticket: dict[str, Any]) -> None:
        self._connection, self._ticket = engine.control.connection, ticket
        self._num_in_flight = 0
        self.replies = Counter[str]()

    async def run(self, number: int) -> None:
        for one in range(number):
            named = Rendezvous(uuid.uuid4().hex, self._ticket["endpoint"]).to_json()
            ticket = named if one % 2 else {**self._ticket, "offer_id": f"forged-{one}"}
            self._num_in_flight += 1
            self._connection.send(HoldOffer(ticket), self._note)
            if self._num_in_flight >= NUM_HELD_AT_ONCE:
                await self._until_at_most(NUM_HELD_AT_ONCE // 2)
        await self._until_at_most(0)

    async def _until_at_most(self, number: int) -> None:
        await until(lambda: self._num_in_flight <= number)

    def _note(self, reply: Empty | KVBusError) -> None:
        self._num_in_flight -= 1
        self.replies["ok" if isinstance(reply, Empty) else reply.code] += 1


@pytest.mark.parametrize("number", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
async def test_flood_of_forged_holds_is_bounded_and_hurts_no_other(
    fresh: Agents, number: int
) -> None:
    prefill, decode = fresh.both(prefill={"engine_wait_s": 0.1})
    async with pair(prefill.attach, decode.attach) as (source, target):
        before = await source.control.offer("before", ttl_s=3.0, **ONE_BLOCK)
        target.control.hold(before.ticket)
        async with engine(decode.attach, seed=3) as hostile:
            flood = HoldFlood(hostile, before.ticket)
            with (
                bounded_growth(decode, most_bytes=50 * MIB),
                bounded_growth(prefill, most_bytes=20 * MIB),
            ):
                await flood.run(number)
            after = await source.control.offer("after", ttl_s=3.0, **ONE_BLOCK)
            target.control.hold(after.ticket)
            lost = await source.control.offer("lost", ttl_s=4.0, **ONE_BLOCK)
            assert await lost.ended is Outcome.EXPIRED
            assert decode.metric("holds") <= MAX_HANDOFFS
            assert prefill.metric("held_offers") == 2
            for offer in (before, after):
                await target.control.fetch(offer.ticket, **ONE_BLOCK).ended
                assert await offer.ended is Outcome.COMPLETED
        await until(lambda: decode.metric("holds") == 0)
    assert flood.replies.keys() == {"ok", "busy"}
    assert flood.replies.total() == number


def is_let_in(agent: AgentProcess) -> bool:
    with Attached(agent.attach) as process:
        return "ok" in process.hello()


async def test_segments_and_connections_of_one_process_are_bounded(fresh: Agents) -> None:
    prefill, decode = fresh.both()
    with ExitStack() as stack:
        processes = [stack.enter_context(Attached(prefill.attach)) for _ in range(64)]
        for process in processes[:48]:
            assert "ok" in process.hello()
        turned_away = [process.receive()["error"] for process in processes[48:]]
        other = await anyio.run_process([sys.executable, "-c", CONNECT, str(prefill.attach)])
        fd = os.memfd_create("segment", os.MFD_ALLOW_SEALING)
        stack.callback(os.close, fd)
        os.ftruncate(fd, SEGMENT_BYTES)
        replies = [
            processes[0].ask(
                "segment",
                {"segment_id": f"{number}", "size_bytes": SEGMENT_BYTES, "direct": True},
                (fd,),
            )
            for number in range(MAX_SEGMENTS + 1)
        ]
        num_kept = prefill.num_files("memfd:segment")
    await until(lambda: is_let_in(prefill))  # the agent has seen that they went
    async with pair(prefill.attach, decode.attach) as (source, target):
        still_works = await works(source, target)
    assert {error["code"] for error in turned_away} == {"busy"}
    assert "48 attach connections" in turned_away[0]["message"]
    assert other.stdout == b"", "a process that came later was turned away"
    assert (["error" in reply for reply in replies], num_kept) == (
        [False] * MAX_SEGMENTS + [True],
        MAX_SEGMENTS,
    )
    assert replies[-1]["error"]["code"] == "busy"
    assert f"{MAX_SEGMENTS} segments" in replies[-1]["error"]["message"]
    assert still_works
