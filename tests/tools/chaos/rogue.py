"""A peer without a right: it receives the events, reads the wire, and sends forged requests.

It acquires, commits, renews, releases and withdraws what belongs to others, also under their boot
ids. Every ``ok`` is a violation; where agents have keys, every answer is.
"""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from tests.process.security.wire import FORGED
from tests.tools.chaos.ledger import Ledger
from tests.tools.chaos.links import Link

COMMAND, LONG = 4, 2
MOST_PER_LOOK = 4
CHECK_S = 0.1
BIG_LEASE_S = 30.0
NUM_AHEAD = 8

Frame = dict[str, Any]


def frames_of(stream: bytes, at: int = 0) -> Iterator[Frame]:
    """The requests in a ZMTP stream that was overheard, from a frame on; none if encrypted."""
    while at + 9 < len(stream):
        flags, size, start = stream[at], stream[at + 1], at + 2
        if flags & LONG:
            size, start = int.from_bytes(stream[at + 1 : at + 9], "big"), at + 9
        body = stream[start : start + size]
        at = start + size
        if not flags & COMMAND and len(body) == size:
            with suppress(ValueError, msgpack.UnpackException):
                frame = msgpack.unpackb(body)
                if isinstance(frame, dict) and "id" in frame:
                    yield frame


class Rogue:
    """One of them, at one prefill agent; ``run`` it while there is chaos."""

    def __init__(self, peer: str, events: str, link: Link, ledger: Ledger, *, keyed: bool) -> None:
        self._peer, self._events, self._link, self._keyed = peer, events, link, keyed
        self._ledger = ledger
        self._boot = uuid.uuid4().hex
        context = self._context = zmq.asyncio.Context()
        self._sub, self._dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._asked: dict[int, str] = {}
        self._number = 0

    async def run(self) -> None:
        events, dealer = self._sub, self._dealer
        for socket in (events, dealer):
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.IMMEDIATE, 1)  # nothing is for who is not there
        events.subscribe(b"")
        events.connect(self._events)
        dealer.connect(self._peer)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._hear_replies(dealer))
                tasks.create_task(self._overhear(dealer))
                await self._hear_events(events, dealer)
        finally:
            self._context.destroy()

    async def _hear_events(self, events: Any, dealer: Any) -> None:
        while True:
            for _ in range(MOST_PER_LOOK):
                event = msgpack.unpackb((await events.recv_multipart())[1])
                self._ledger.count("rogue_heard")
                if self._keyed:
                    self._ledger.violate("rogue_heard", f"an event of {self._events}: {event}")
                if "offer_id" in event["body"]:
                    for op, body in self._asks(event):
                        await self._ask(dealer, op, body)
            await asyncio.sleep(CHECK_S)

    def _asks(self, event: Frame) -> Iterator[tuple[str, Frame]]:
        body = event["body"]
        offer = {"agent_boot": event["boot"], "offer_id": body["offer_id"]}
        for epoch in {body.get("epoch", 1), 1}:
            lease = {**offer, "epoch": epoch, "token": FORGED}
            yield "release", {**lease, "code": "cancelled"}
            yield "renew", {**lease, "lease_s": 1e-3}
        reader = {**offer, "secret": FORGED, "reader_id": "rogue"}
        yield "withdraw", {**offer, "secret": FORGED}
        yield "commit", {**reader, "token": FORGED, "tables": {}}
        yield "acquire", {**reader, "lease_s": BIG_LEASE_S}

    async def _ask(self, dealer: Any, op: str, body: Frame, **envelope: Any) -> None:
        self._number += 1
        number = envelope.get("id", self._number)
        self._asked[number] = op
        self._ledger.count("rogue_asked")
        fields = {"v": 1, "op": op, "id": number, "boot": self._boot, "body": body, **envelope}
        with suppress(zmq.Again):
            await dealer.send(msgpack.packb(fields), zmq.NOBLOCK)

    async def _overhear(self, dealer: Any) -> None:
        """Ask under the boot and id of others, after them and ahead of them."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._keyed:
                await self._ask(dealer, "status", {})
                continue
            for frame in list(frames_of(self._link.latest))[-1:]:
                for ahead in range(NUM_AHEAD):
                    number, boot = frame["id"] + ahead, frame["boot"]
                    await self._ask(dealer, "status", {}, id=number, boot=boot)

    async def _hear_replies(self, dealer: Any) -> None:
        while True:
            reply = msgpack.unpackb(await dealer.recv())
            op = self._asked.pop(reply.get("re"), "status")
            self._ledger.count("rogue_answered")
            if self._keyed:
                self._ledger.violate("rogue_answered", f"{op} without a key: {reply}")
            if "ok" not in reply:
                continue
            if "agent_id" not in reply["ok"]:  # anybody may ask for the status
                self._ledger.violate("rogue_served", f"{op} without a right: {reply['ok']}")
