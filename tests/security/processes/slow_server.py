"""A bound ROUTER whose owner is slow: it answers a thousand messages a second, until it is told."""

import select
import sys
import time
from contextlib import suppress

import zmq

from kvbus.bus.sockets import SocketOptions, bound_endpoint, new_context, open_router

options = SocketOptions(hwm=1000, keepalive_s=0.2)
with new_context() as context:
    router, _ = open_router(
        context, "tcp://127.0.0.1:*", options, max_frame_bytes=1 << 20, watch=None
    )
    print(bound_endpoint(router), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        with suppress(zmq.ZMQError):  # nothing is there, or nobody takes it
            identity, body = router.recv_multipart(zmq.NOBLOCK)
            router.send_multipart([identity, 3 * body], zmq.NOBLOCK)
        time.sleep(0.001)
    router.close()
print("alive", flush=True)
