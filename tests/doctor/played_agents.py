"""Agents that are played: they tell ``kvbus doctor`` what a test says, of versions old and new."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import zmq

from kvbus.spawn import free_port

BOOT = "a-boot-id-of-its-own"
END = "inproc://end"
Told = Mapping[str, Any]
Answer = Callable[[str, Told], Told | None]


class Lost(Exception):
    """The question, or its answer, is lost on the way."""


def told_by(role: str, **changes: Any) -> dict[str, Any]:
    """The status of an agent that holds nothing."""
    status = {"agent_id": f"{role}-0", "role": role, "engines": {}, "draining": False, "counts": {}}
    return {**status, "data_endpoints": [], **changes}


@contextmanager
def earlier_agent(role: str) -> Iterator[str]:
    """The endpoint of one that ignores what it is asked beyond its status."""
    with played(lambda op, _: told_by(role) if op == "status" else None) as endpoint:
        yield endpoint


@contextmanager
def agent(
    status: Told,
    *,
    clock_ahead_s: float = 0.0,
    is_lost: Callable[[str, Told], bool] = lambda _op, _body: False,
) -> Iterator[str]:
    """The endpoint of one that tells this, and echoes, as an agent of this version."""

    def answer(op: str, body: Told) -> Told | None:
        if is_lost(op, body):
            raise Lost
        if op == "status":
            return {**status, "echo": body.get("echo", "")}
        if op == "trace":
            of = {"agent_id": status["agent_id"], "role": status["role"], "boot": BOOT}
            return {**of, "now_s": 1.0, "wall_s": time.time() + clock_ahead_s}
        return None

    with played(answer) as endpoint:
        yield endpoint


@contextmanager
def played(answer: Answer) -> Iterator[str]:
    """An endpoint at which questions are answered until the end of the ``with``.

    What is answered with None is refused, as an agent does that does not know the question.
    """
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.PAIR) as end:
        end.bind(END)
        router = context.socket(zmq.ROUTER)
        router.bind(endpoint)
        serving = threading.Thread(target=_serve, args=(context, router, answer))
        serving.start()
        try:
            yield endpoint
        finally:
            end.send(b"")
            serving.join()


def _serve(context: "zmq.Context[Any]", router: "zmq.Socket[bytes]", answer: Answer) -> None:
    poller = zmq.Poller()
    with router, context.socket(zmq.PAIR) as end:
        end.connect(END)
        for socket in (router, end):
            poller.register(socket, zmq.POLLIN)
        while end not in dict(poller.poll()):
            sender, frame = router.recv_multipart()
            asked = msgpack.unpackb(frame)
            with suppress(Lost):
                ok = answer(asked["op"], asked.get("body", {}))
                refusal = {"code": "unknown_op", "message": f"no '{asked['op']}'", "detail": {}}
                told = {"error": refusal} if ok is None else {"ok": ok}
                reply = {"v": 1, "re": asked["id"], "boot": BOOT, **told}
                router.send_multipart([sender, msgpack.packb(reply)])
        router.set(zmq.LINGER, 0)
