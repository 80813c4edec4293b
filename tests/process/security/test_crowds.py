"""One tenant asks for all that an agent has room for: the handoffs of others go on."""

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

from kvbus.protocol import Rendezvous
from tests.process.security.wire import bounded_growth
from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import pair, works
from tests.support.plain_sockets import REPLY_WITHIN_S, Attached

pytestmark = pytest.mark.anyio
MIB = 1 << 20
NUM_SENDERS, NUM_EACH = 1100, 5
SEGMENT_BYTES = 4096
MAX_SEGMENTS = 4096
NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
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
        self._asked: list[tuple[str, dict[str, Any], str]] = []
        self._full, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._go_on)

    def ask(self, op: str, body: dict[str, Any], sender: str) -> None:
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


async def test_senders_waiting_for_names_hold_up_no_handoff(fresh: Agents) -> None:
    """Of one connection, more than an agent has sessions; also for an agent that comes later."""
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
                meets = Rendezvous(uuid.uuid4().hex, prefill.peer).to_json()
                fetch = newcomer.decode.fetch(meets, **NOTHING, timeout_s=60)
                met = await another.prefill.offer(
                    "met", **NOTHING, transfer_id=meets["transfer_id"]
                )
                await fetch.ended
                await met.ended


def is_let_in(agent: AgentProcess) -> bool:
    with Attached(agent.attach) as process:
        return "ok" in process.hello()


async def test_segments_and_connections_of_one_process_are_bounded(
    fresh: Agents,
) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    fresh.start(prefill, decode)
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
