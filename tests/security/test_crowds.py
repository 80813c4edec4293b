"""One party asks for all that an agent has room for: the handoffs of others go on."""

import os
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
import msgpack
import pytest
import zmq

from kvbus.engine import PrefillSession
from kvbus.protocol import Rendezvous
from tests.agents import Agents
from tests.engines import Engine, engine, pair, works
from tests.plain_sockets import REPLY_WITHIN_S, Attached, ask
from tests.security.rights import Body, Leased, pack_of
from tests.security.wire import watched

pytestmark = pytest.mark.anyio
MIB = 1 << 20
NUM_SENDERS, NUM_EACH = 1100, 5
SEGMENT_BYTES = 4096
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


class Crowd:
    """One connection of many senders; each asks under a boot id and a secret of its own.

    A thread has whoever has waited in vain wait again, so that all that wait go on.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._asked: list[tuple[str, Body, str]] = []
        self._full, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._go_on)

    def ask(self, op: str, body: Body, sender: str) -> None:
        """Before the thread starts, or in it."""
        self._asked.append((op, body, sender))
        asked = {"v": 1, "op": op, "id": len(self._asked), "boot": sender, "secret": sender}
        self._socket.send(msgpack.packb(asked | {"body": body}))

    def start(self) -> None:
        """Return once something was refused because there is too much."""
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
    """Hangs up at the end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.connect(endpoint)
        crowd = Crowd(socket)
        try:
            yield crowd
        finally:
            crowd.stop()


async def is_met(prefill: Any, source: Engine, target: Engine) -> bool:
    """Whether a fetch that comes before its offer gets it."""
    meets = Rendezvous(uuid.uuid4().hex, prefill.peer).to_json()
    ours, theirs = target.some_blocks(6, 16), source.some_blocks(5, 16)
    fetch = target.decode.fetch(meets, num_tokens=16, block_ids=ours, timeout_s=60)
    offer = await source.prefill.offer(
        uuid.uuid4().hex, num_tokens=16, block_ids=theirs, transfer_id=meets["transfer_id"]
    )
    await fetch.completed()
    await offer.released()
    return True


async def test_senders_that_wait_for_names_keep_no_handoff_from_going_on(fresh: Agents) -> None:
    """Of one connection, more than an agent has sessions; also for an agent that comes later."""
    prefill, early, late = (fresh.prepare(role) for role in ("prefill", "decode", "decode"))
    fresh.start(prefill, early, late)
    async with pair(prefill.attach, early.attach) as (source, target):
        assert await works(source, target)
        with crowd_at(prefill.peer) as crowd, watched(prefill) as seen:
            for number in range(NUM_SENDERS * NUM_EACH):
                wait_s = 6.0 * (1 + number // NUM_SENDERS)  # so that some of each always wait
                body = {"transfer_id": uuid.uuid4().hex, "wait_s": wait_s}
                crowd.ask("meet", body, f"sender-{number % NUM_SENDERS}")
            await anyio.to_thread.run_sync(crowd.start)
            assert await works(source, target)
            assert await is_met(prefill, source, target)
            async with pair(prefill.attach, late.attach) as (another, newcomer):
                assert await works(another, newcomer)
                assert await is_met(prefill, another, newcomer)

    assert seen.grown_bytes < 100 * MIB


async def test_a_lease_with_a_thousand_boxes_that_wait_keeps_no_other_from_being_packed(
    fresh: Agents,
) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode", path="packed")
    fresh.start(prefill, decode)
    async with engine(PrefillSession, prefill.attach) as own:
        offer = await own.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        reader = Leased(prefill, own, dict(offer.ticket))
        rights = {"token": reader.token, "access": reader.access, "slot_lease_s": 30.0}
        box = {**pack_of(reader.memory, reader.lease["offer_id"]), **reader.lease, **rights}
        async with pair(prefill.attach, decode.attach) as (source, target):
            assert await works(source, target)
            with crowd_at(prefill.peer) as crowd:
                for _ in range(1100):
                    crowd.ask("pack", box, "greedy")
                await anyio.to_thread.run_sync(crowd.start)
                for _ in range(3):
                    assert await works(source, target)
        await offer.withdraw()


async def test_who_has_many_reads_served_makes_room_for_another(fresh: Agents) -> None:
    prefill = fresh.prepare("prefill", max_offers=4)
    fresh.start(prefill)
    async with engine(PrefillSession, prefill.attach) as own:
        offer = await own.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        reader = Leased(prefill, own, dict(offer.ticket))
        served = {**reader.memory, "access": reader.access, "progress_s": 30.0}
        with crowd_at(prefill.peer) as crowd:
            for number in range(5):
                crowd.ask("check", {**served, "offer_id": f"offer-{number}"}, "greedy")
            await anyio.to_thread.run_sync(crowd.start)
            reply = await anyio.to_thread.run_sync(
                ask, prefill.peer, "check", {**served, "offer_id": "another"}
            )
        await offer.withdraw()

    assert "ok" in reply


def num_taken(process: Attached, most: int) -> tuple[int, dict[str, Any]]:
    """How many segments are taken before one is refused, and how that is."""
    fd = os.memfd_create("segment", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SEGMENT_BYTES)
    try:
        for number in range(most):
            segment = {"segment_id": str(number), "size_bytes": SEGMENT_BYTES, "direct": True}
            reply = process.ask("segment", segment, (fd,))
            if "error" in reply:
                return number, reply["error"]
    finally:
        os.close(fd)
    raise AssertionError(f"{most} segments were taken")


async def test_one_process_passes_so_many_segments_and_no_more(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill", max_process_segments=50), fresh.prepare("decode")
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        with Attached(prefill.attach) as process:
            process.hello()
            taken, refused = await anyio.to_thread.run_sync(num_taken, process, 1000)
            mapped = prefill.memory_maps("memfd:segment")
            still_works = await works(source, target)

    assert (taken, mapped) == (50, 50)
    assert refused["code"] == "busy"
    assert "max_process_segments" in refused["message"]
    assert still_works


async def test_one_process_takes_so_many_connections_and_leaves_some_to_others(
    fresh: Agents,
) -> None:
    agent = fresh.prepare("prefill", max_engine_processes=64)
    fresh.start(agent)
    with ExitStack() as stack:
        processes = [stack.enter_context(Attached(agent.attach)) for _ in range(64)]
        for process in processes[:48]:
            assert "ok" in process.hello()
        refusals = [process.receive()["error"] for process in processes[48:]]
        command = [sys.executable, "-c", CONNECT, str(agent.attach)]
        other = await anyio.run_process(command, check=False)

    assert {refused["code"] for refused in refusals} == {"busy"}
    assert "max_process_connections" in refusals[0]["message"]
    assert other.stdout == b"", "it was turned away"
    assert other.returncode == 0
