"""Whatever bytes arrive, a server answers them and goes on."""

import threading
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus.bus import BusContext, new_context
from kvbus.protocol import MAX_ID
from tests.bus.messages import asked, serve
from tests.examples import num_examples

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(scalars, inner), max_leaves=8
)
almost_requests = st.fixed_dictionaries(
    {},
    optional={
        "v": st.just(1) | values,
        "op": st.sampled_from(["ask", "ack", "ping", ""]) | values,
        "id": st.integers(0, 5) | values,
        "boot": st.just("raw") | values,
        "body": st.dictionaries(st.sampled_from(["upto", "boot"]), values) | values,
        "re": values,
        "ok": values,
    },
)


def packed(value: Any) -> bytes:
    frame: bytes = msgpack.packb(value)
    return frame


frames = st.binary(max_size=200) | values.map(packed) | almost_requests.map(packed)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a server that echoes, in a thread of its own."""
    endpoint = f"ipc://{tmp_path_factory.mktemp('hostile') / 'bus'}"
    bound = threading.Event()
    stop: list[Any] = []

    async def run() -> None:
        with new_context() as context:
            server = serve(context, endpoint)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.run)
                stop.extend([anyio.lowlevel.current_token(), tasks.cancel_scope.cancel])
                bound.set()

    thread = threading.Thread(target=anyio.run, args=(run,))
    thread.start()
    bound.wait()
    yield endpoint
    anyio.from_thread.run_sync(stop[1], token=stop[0])
    thread.join()


@pytest.fixture
def dealer(served: str, context: BusContext) -> Iterator[zmq.Socket[bytes]]:
    """A raw peer of the server; receiving fails after ten seconds."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVTIMEO, 10_000)
    socket.connect(served)
    yield socket
    socket.close(linger=0)


def readable_id(frame: bytes) -> int:
    try:
        fields = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except Exception:
        return 0
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        return 0
    value = fields.get("id")
    if type(value) is not int or not 0 <= value <= MAX_ID:
        return 0
    return value


@settings(
    deadline=None,
    max_examples=num_examples(300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batch=st.lists(frames, min_size=1, max_size=5))
def test_every_frame_gets_one_reply_and_the_server_goes_on(
    dealer: zmq.Socket[bytes], batch: list[bytes]
) -> None:
    for frame in batch:
        dealer.send(frame)
    replies = [msgpack.unpackb(dealer.recv()) for _ in batch]
    dealer.send_multipart([packed(asked(1, op="ping")), b""])
    several = msgpack.unpackb(dealer.recv())
    dealer.send(packed(asked(77, op="ping")))
    alive = msgpack.unpackb(dealer.recv())

    assert alive == {"v": 1, "re": 77, "boot": "server", "ok": {}}
    assert several["error"]["code"] == "malformed", "of two frames"
    for frame, reply in zip(batch, replies, strict=True):
        replied_to = b"re" in frame  # a well-formed reply has no id of its own
        assert reply["re"] == readable_id(frame) or (replied_to and reply["re"] == 0)
        assert ("ok" in reply) != ("error" in reply)
