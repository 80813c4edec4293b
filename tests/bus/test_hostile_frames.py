"""Whatever bytes arrive, a server answers each frame once and goes on."""

from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus.bus import BusContext
from kvbus.protocol import MAX_ID
from tests.bus.conftest import TCP, RawPeer, run_all
from tests.bus.messages import asked, serve
from tests.examples import num_examples

pytestmark = pytest.mark.anyio

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(scalars, inner), max_leaves=8
)
some_values = {
    "v": st.just(1),
    "op": st.sampled_from(["ask", "ack", "ping", ""]),
    "id": st.integers(0, 5),
    "boot": st.just("raw"),
    "body": st.dictionaries(st.sampled_from(["upto", "boot"]), values),
    "re": values,
    "ok": values,
}
almost_requests = st.fixed_dictionaries(
    {}, optional={key: value | values for key, value in some_values.items()}
)
frames = st.binary(max_size=200) | (values | almost_requests).map(msgpack.packb)


def readable_id(frame: bytes) -> int:
    try:
        fields = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except Exception:
        return 0
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        return 0
    value = fields.get("id")
    return value if type(value) is int and 0 <= value <= MAX_ID else 0


@settings(
    max_examples=num_examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch=st.lists(frames, min_size=1, max_size=20))
async def test_every_frame_gets_one_reply_and_the_server_goes_on(
    context: BusContext, batch: list[bytes]
) -> None:
    server, peer = serve(context, TCP), RawPeer(context, zmq.DEALER)
    peer.socket.connect(server.endpoint)
    try:
        async with run_all(server):
            for frame in batch:
                peer.socket.send(frame)
            replies: list[dict[str, Any]] = [await peer.get() for _ in batch]
            peer.socket.send_multipart([msgpack.packb(asked(1, op="ping")), b""])
            of_two_frames = await peer.get()
            alive = await peer.ask(asked(77, op="ping"))
    finally:
        peer.socket.close(linger=0)

    assert alive == {"v": 1, "re": 77, "boot": "server", "ok": {}}
    assert of_two_frames["error"]["code"] == "malformed"
    for frame, reply in zip(batch, replies, strict=True):
        replied_to = b"re" in frame  # a well-formed reply has no id of its own
        assert reply["re"] == readable_id(frame) or (replied_to and reply["re"] == 0)
        assert ("ok" in reply) != ("error" in reply)
