"""A stranger on the network, with plain sockets: hears the events, asks what they tell how to ask.

Refuses to hold any right: what it knows is published.
"""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from tests.agents import AgentProcess

FORGED = "0123456789abcdef0123456789abcdef"
"""As long as a right, and none."""
Heard = dict[str, Any]


@dataclass
class Stranger:
    """What was heard, and what came of what was asked; ``accepted`` are requests answered ok."""

    agent: AgentProcess
    heard: list[bytes] = field(default_factory=list)
    num_asked: int = 0
    accepted: list[str] = field(default_factory=list)
    refusals: list[dict[str, Any]] = field(default_factory=list)

    def has_heard(self, op: str, offer_id: str) -> bool:
        """Whether an event was heard, and all that it told how to ask was asked."""
        return any(op.encode() in one and offer_id.encode() in one for one in list(self.heard))

    def asks(self, event: Heard) -> Iterator[tuple[str, dict[str, Any]]]:
        """All that an offer or a lease can be asked for, with the ids that were heard."""
        body = event["body"]
        offer = {"agent_boot": event["boot"], "offer_id": body["offer_id"]}
        for epoch in {body.get("epoch", 1), 1}:
            lease = {**offer, "epoch": epoch, "token": FORGED}
            yield "confirm", lease
            yield "release", {**lease, "code": "cancelled"}
            yield "renew", {**lease, "lease_s": 1e-3}
        yield "withdraw", {**offer, "secret": FORGED}
        taken = {"reader_id": "stranger", "token": FORGED, "tables": {}}
        yield "take", {**offer, "secret": FORGED, **taken}
        yield "claim", {**offer, "secret": FORGED, "reader_id": "stranger", "lease_s": 30.0}

    def run(self, context: "zmq.Context[Any]", ended: threading.Event) -> None:
        events, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        with events, dealer:
            events.subscribe(b"")
            events.connect(self.agent.started["events"])
            dealer.connect(self.agent.peer)
            boot, ops = uuid.uuid4().hex, dict[int, str]()
            poller = zmq.Poller()
            poller.register(events, zmq.POLLIN)
            poller.register(dealer, zmq.POLLIN)
            while not ended.is_set() or len(ops) > len(self.accepted) + len(self.refusals):
                ready = dict(poller.poll(50))
                if dealer in ready:
                    self._note(msgpack.unpackb(dealer.recv()), ops)
                if events in ready:
                    topic, frame = events.recv_multipart()
                    event = msgpack.unpackb(frame)
                    if "offer_id" in event["body"] and not ended.is_set():
                        for op, body in self.asks(event):
                            self.num_asked += 1
                            ops[self.num_asked] = op
                            fields = {"v": 1, "op": op, "id": self.num_asked, "boot": boot}
                            dealer.send(msgpack.packb({**fields, "body": body}))
                    self.heard.append(topic + frame)

    def _note(self, reply: dict[str, Any], ops: dict[int, str]) -> None:
        if "ok" in reply:
            self.accepted.append(ops[reply["re"]])
        else:
            self.refusals.append(reply["error"])


@contextmanager
def stranger(agent: AgentProcess) -> Iterator[Stranger]:
    """Listens and asks, in a thread, until the end; then every request of it was answered."""
    made, ended = Stranger(agent), threading.Event()
    with zmq.Context() as context:
        context.linger = 0
        thread = threading.Thread(target=made.run, args=(context, ended))
        thread.start()
        try:
            yield made
        finally:
            ended.set()
            thread.join(30.0)
            assert not thread.is_alive()
