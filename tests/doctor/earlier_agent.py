"""An agent of an earlier version, as far as ``kvbus doctor`` asks it: it tells its status.

Fields that it does not know it ignores, and a request that it does not know it refuses.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

from kvbus.spawn import free_port

STATUS = {"engines": {}, "draining": False, "counts": {}, "data_endpoints": []}
BOOT = "a-boot-of-before"
END = "inproc://end"


@contextmanager
def earlier_agent(role: str) -> Iterator[str]:
    """Its endpoint; it answers until the end of the ``with``."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.PAIR) as end:
        end.bind(END)
        router = context.socket(zmq.ROUTER)
        router.bind(endpoint)
        serving = threading.Thread(target=_serve, args=(context, router, role))
        serving.start()
        try:
            yield endpoint
        finally:
            end.send(b"")
            serving.join()


def _serve(context: "zmq.Context[Any]", router: "zmq.Socket[bytes]", role: str) -> None:
    poller = zmq.Poller()
    with router, context.socket(zmq.PAIR) as end:
        end.connect(END)
        for socket in (router, end):
            poller.register(socket, zmq.POLLIN)
        while end not in dict(poller.poll()):
            sender, frame = router.recv_multipart()
            asked = msgpack.unpackb(frame)
            reply = {"v": 1, "re": asked["id"], "boot": BOOT, **_answer(asked["op"], role)}
            router.send_multipart([sender, msgpack.packb(reply)])
        router.set(zmq.LINGER, 0)


def _answer(op: str, role: str) -> dict[str, Any]:
    if op == "status":
        return {"ok": {"agent_id": "earlier", "role": role, **STATUS}}
    return {"error": {"code": "unknown_op", "message": f"no '{op}' here", "detail": {}}}
