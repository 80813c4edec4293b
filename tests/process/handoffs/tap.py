"""A hand on what is said to an agent: its requests and answers pass, are kept back, or changed.

The agent binds its peer socket at `AGENT_HOST`, and says that others reach it at `TAP_HOST`, where
the tap listens. Its events reach nobody, who can do without them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgpack
import zmq

from tests.support.agents import AgentProcess, wait_until

AGENT_HOST, TAP_HOST = "127.0.0.1", "127.0.0.2"
POLL_MS = 5
Change = Callable[[dict[str, Any]], None]
Send = Callable[[], object]


class Tap:
    """Carries frames in a thread; of an operation it can `keep` requests or answers."""

    def __init__(self, bind: str) -> None:
        self._agent, self._stop = bind, threading.Event()
        self._keeps: set[tuple[str, str]] = set()
        self._changes: dict[str, Change] = {}
        self._ops: dict[tuple[bytes, int], str] = {}
        self._kept: list[tuple[str, str, Send]] = []
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def keep(self, op: str, what: str = "request") -> None:
        """Keep every ``request``, or every ``answer`` to one, until `let_through`."""
        self._keeps.add((op, what))

    def change(self, op: str, change: Change) -> None:
        """Change the bodies of answers to requests of this kind."""
        self._changes[op] = change

    def wait_kept(self) -> None:
        """Return once something is kept back."""
        wait_until(lambda: self._kept, "something is kept back")

    def let_through(self) -> None:
        """Carry on what was kept, and all from now on as it is."""
        self._keeps.clear()
        self._changes.clear()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _carry(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as front:
            front.set(zmq.LINGER, 0)
            front.bind(self._agent.replace(AGENT_HOST, TAP_HOST))
            backs: dict[bytes, zmq.Socket[bytes]] = {}
            while not self._stop.is_set():
                front.poll(POLL_MS)
                while front.poll(0):
                    client, frame = front.recv_multipart()
                    if client not in backs:
                        backs[client] = context.socket(zmq.DEALER)
                        backs[client].set(zmq.LINGER, 0)
                        backs[client].connect(self._agent)
                    asked = msgpack.unpackb(frame)
                    self._ops[client, asked["id"]] = asked["op"]
                    back = backs[client]
                    self._pass(asked["op"], "request", partial(back.send, frame))
                for client, back in backs.items():
                    while back.poll(0):
                        self._pass_back(client, back.recv(), front)
                kept, self._kept = self._kept, []
                for one in kept:
                    self._pass(*one)
            for back in backs.values():
                back.close()

    def _pass_back(self, client: bytes, frame: bytes, front: "zmq.Socket[bytes]") -> None:
        said = msgpack.unpackb(frame)
        op = self._ops[client, said["re"]]
        if op in self._changes and "ok" in said:
            self._changes[op](said["ok"])
        answer = partial(front.send_multipart, [client, msgpack.packb(said)])
        self._pass(op, "answer", answer)

    def _pass(self, op: str, what: str, send: Send) -> None:
        if (op, what) in self._keeps:
            self._kept.append((op, what, send))
        else:
            send()


@contextmanager
def tapped(agent: AgentProcess) -> Iterator[Tap]:
    """A tap at an agent that was prepared with `TAPPED`; start the agent in the block.

    The agent itself is asked past the tap: its status, and what it traces.
    """
    tap = Tap(agent.settings["peer_bind"])
    try:
        yield tap
    finally:
        tap.close()


TAPPED: dict[str, Any] = {"advertise_host": TAP_HOST}
