"""Agents that are played: they tell ``kvbus doctor`` what a test says."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

from kvbus.spawn import free_port

BOOT = "a-boot-id-of-its-own"
END = "inproc://end"
Told = Mapping[str, Any]
Answer = Callable[[str, Told], Told | None]


def told_by(role: str, **changes: Any) -> dict[str, Any]:
    """The status of an agent that holds nothing."""
    status = {"agent_id": f"{role}-0", "role": role, "engines": {}, "draining": False, "counts": {}}
    return {**status, "data_endpoints": [], **changes}


@contextmanager
def agent(
    status: Told,
    *,
    clock_ahead_s: float = 0.0,
    is_lost: Callable[[str, Told], bool] = lambda _op, _body: False,
) -> Iterator[str]:
    """The endpoint of one that tells this. Lost questions have no answer."""

    def answer(op: str, body: Told) -> Told | None:
        if op == "status":
            return {**status, "echo": body.get("echo", "")}
        if op == "trace":
            of = {"agent_id": status["agent_id"], "role": status["role"], "boot": BOOT}
            return {**of, "now_s": 1.0, "wall_s": time.time() + clock_ahead_s}
        return None

    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.PAIR) as end:
        end.bind(END)
        router = context.socket(zmq.ROUTER)
        router.bind(endpoint)
        serving = threading.Thread(target=_serve, args=(context, router, answer, is_lost))
        serving.start()
        try:
            yield endpoint
        finally:
            end.send(b"")
            serving.join()


def _serve(
    context: "zmq.Context[Any]",
    router: "zmq.Socket[bytes]",
    answer: Answer,
    is_lost: Callable[[str, Told], bool],
) -> None:
    """Answer until something comes from the end; what has no answer is refused as unknown."""
    poller = zmq.Poller()
    with router, context.socket(zmq.PAIR) as end:
        end.connect(END)
        for socket in (router, end):
            poller.register(socket, zmq.POLLIN)
        while end not in dict(poller.poll()):
            sender, frame = router.recv_multipart()
            asked = msgpack.unpackb(frame)
            op, body = asked["op"], asked.get("body", {})
            if is_lost(op, body):
                continue
            ok = answer(op, body)
            refusal = {"code": "unknown_op", "message": f"no '{op}'", "detail": {}}
            told = {"error": refusal} if ok is None else {"ok": ok}
            reply = {"v": 1, "re": asked["id"], "boot": BOOT, **told}
            router.send_multipart([sender, msgpack.packb(reply)])
        router.set(zmq.LINGER, 0)
