"""A message that is none gets an error reply with its name; the agents log, count and go on."""

import os
import socket
import struct
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
from msgspec import structs

from kvbus.agent.process.config import AgentConfig
from kvbus.bus.limits import max_request_bytes
from kvbus.geometry import lay_out_rank
from kvbus.protocol import Register, to_body
from tests.agents import AgentProcess, wait_until
from tests.engines import NHD, make_spec, pair, works
from tests.plain_sockets import ask, ask_frames

GOOD = {"v": 1, "op": "status", "id": 7, "boot": "raw", "body": {}}


def packed(**changes: Any) -> bytes:
    """A good request but for ``changes``; None leaves a field out."""
    fields = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    return msgpack.packb(fields)


BAD_FRAMES = {
    "nothing": (b"", "malformed"),
    "truncated": (packed()[:-3], "malformed"),
    "not msgpack": (b"\xc1\xc1\xc1", "malformed"),
    "not a map": (msgpack.packb([1, 2]), "malformed"),
    "keys that are no strings": (msgpack.packb({1: 2}), "malformed"),
    "another version": (packed(v=2), "unsupported_version"),
    "no version": (packed(v=None), "malformed"),
    "an id of text": (packed(id="7"), "malformed"),
    "a body of text": (packed(body="x"), "malformed"),
    "no boot": (packed(boot=None), "malformed"),
}


@pytest.fixture
def sockets(prefill: AgentProcess, decode: AgentProcess) -> list[tuple[AgentProcess, str]]:
    """The four request sockets."""
    return [
        (agent, endpoint)
        for agent in (prefill, decode)
        for endpoint in (agent.peer, f"ipc://{agent.attach.with_name('engine.sock')}")
    ]


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_frame_that_is_no_request_is_refused_by_every_socket(sockets, name):
    frame, code = BAD_FRAMES[name]
    for agent, endpoint in sockets:
        before = agent.metric("malformed_messages")

        reply = ask_frames(endpoint, frame)

        assert reply["error"]["code"] == code
        assert agent.metric("malformed_messages") == before + 1
        assert agent.status()["counts"]


def test_a_frame_that_is_a_little_too_large_is_refused_by_every_socket(sockets):
    for agent, endpoint in sockets:
        before = agent.metric("malformed_messages")

        reply = ask_frames(endpoint, bytes(max_request_bytes(endpoint) + 1))

        assert reply["error"]["code"] == "too_large"
        assert agent.metric("malformed_messages") == before + 1


def test_a_message_of_two_frames_is_refused(sockets):
    for _, endpoint in sockets:
        assert ask_frames(endpoint, packed(), packed())["error"]["code"] == "malformed"


def test_a_request_that_the_socket_does_not_know_is_refused(prefill, decode):
    for agent in (prefill, decode):
        before = agent.metric("refusals_total", code="unknown_op")

        reply = ask(agent.peer, "make_coffee", {})

        assert reply["error"]["code"] == "unknown_op"
        assert agent.metric("refusals_total", code="unknown_op") == before + 1
        assert agent.says("request.refused", op="make_coffee")


@pytest.mark.parametrize(
    ("op", "body"),
    [
        ("claim", {}),
        ("claim", {"agent_boot": 1, "offer_id": "x", "reader_id": "x", "lease_s": 1.0}),
        ("claim", {"agent_boot": "x", "offer_id": "x", "reader_id": "x", "lease_s": -1.0}),
        ("claim", {"agent_boot": "x", "offer_id": "x" * 257, "reader_id": "x", "lease_s": 1.0}),
        ("renew", {"agent_boot": "x", "offer_id": "x", "epoch": 0, "lease_s": 1.0}),
        ("confirm", {"agent_boot": "x", "offer_id": "x", "epoch": "one"}),
        ("release", {"agent_boot": "x", "offer_id": "x", "epoch": 1, "code": "no such code"}),
        ("handshake", {"min_protocol": 1}),
        ("withdraw", {"offer_id": "x"}),
    ],
)
def test_a_body_with_a_wrong_field_is_refused_by_the_field(prefill, op, body):
    reply = ask(prefill.peer, op, body)

    assert reply["error"]["code"] == "invalid"
    assert prefill.says("request.refused", op=op, code="invalid")


def test_a_message_for_an_earlier_process_is_stale(prefill):
    body = {"agent_boot": "earlier", "offer_id": "x", "reader_id": "x", "lease_s": 1.0}
    body["secret"] = 32 * "0"

    reply = ask(prefill.peer, "claim", body)

    assert reply["error"]["code"] == "stale"
    assert prefill.says("request.refused", op="claim", code="stale")


@pytest.mark.parametrize(("secret", "is_logged"), [(32 * "0", False), ("short", True)])
def test_who_gives_a_lease_back_that_is_over_is_counted_and_is_no_warning(
    prefill, secret, is_logged
):
    """Leases end by themselves, too: only a message that makes no sense is worth a line."""
    boot, code = prefill.started["boot_id"], "invalid" if is_logged else "offer_unknown"
    lease = {"agent_boot": boot, "offer_id": "x", "epoch": 1, "token": secret, "code": "timeout"}
    before = prefill.metric("refusals_total", code=code)
    prefill.skip_log()

    reply = ask(prefill.peer, "release", lease)
    ask(prefill.peer, "make_coffee", {})

    assert reply["error"]["code"] == code
    assert prefill.metric("refusals_total", code=code) == before + 1
    assert prefill.says("request.refused", op="make_coffee", level="warning")
    assert bool(prefill.logged("request.refused", op="release")) == is_logged


@pytest.mark.parametrize("op", ["register", "ready", "detach", "offer", "fetch", "cancel", "seal"])
def test_a_request_without_a_hello_is_refused(prefill, decode, op):
    spec = {"engine_id": "e", "model": "m", "tp_size": 1, "groups": []}
    for agent in (prefill, decode):
        reply = ask(f"ipc://{agent.attach.with_name('engine.sock')}", op, {"engine": spec})

        assert reply["error"]["code"] == "not_registered"


class RawEngine:
    """A plain Unix socket at the attach socket of an agent."""

    def __init__(self, agent: AgentProcess) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(str(agent.attach))

    def send(self, body: bytes, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [struct.pack("<I", len(body)) + body], fds)

    def receive(self) -> dict[str, Any]:
        (length,) = struct.unpack("<I", self._exactly(4))
        answer: dict[str, Any] = msgpack.unpackb(self._exactly(length))
        return answer

    def ask(self, op: str, body: object, fds: tuple[int, ...] = ()) -> dict[str, Any]:
        self.send(msgpack.packb({"op": op, "body": body}), fds)
        return self.receive()

    def hello(self, **changes: object) -> dict[str, Any]:
        body = {"min_protocol": 1, "max_protocol": 1, "engine_id": "e", "boot": os.urandom(8).hex()}
        return self.ask("hello", {**body, **changes})

    def _exactly(self, num_bytes: int) -> bytes:
        read = b""
        while len(read) < num_bytes:
            chunk = self.socket.recv(num_bytes - len(read))
            if not chunk:
                raise EOFError
            read += chunk
        return read


@pytest.fixture
def raw_engines(prefill: AgentProcess, decode: AgentProcess) -> Iterator[list[RawEngine]]:
    """A connection to each agent's attach socket."""
    engines = [RawEngine(prefill), RawEngine(decode)]
    yield engines
    for engine in engines:
        engine.socket.close()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\xc1", "malformed"),
        (msgpack.packb([1]), "malformed"),
        (msgpack.packb({"op": "hello"}), "malformed"),
        (msgpack.packb({"op": "make_coffee", "body": {}}), "unknown_op"),
        (msgpack.packb({"op": "hello", "body": {"engine_id": 7}}), "invalid"),
        (msgpack.packb({"op": "segment", "body": {"segment_id": "x"}}), "invalid"),
    ],
)
def test_a_wrong_attach_message_is_refused_and_the_next_one_is_not(raw_engines, body, code):
    for engine in raw_engines:
        engine.send(body)

        assert engine.receive()["error"]["code"] == code
        assert "ok" in engine.hello()


def test_an_oversized_attach_message_is_refused_unread(raw_engines, prefill):
    before = prefill.metric("malformed_messages")
    raw_engines[0].socket.sendall(struct.pack("<I", 1 << 30))

    assert raw_engines[0].receive()["error"]["code"] == "too_large"
    with pytest.raises(EOFError):
        raw_engines[0].receive()
    assert prefill.metric("malformed_messages") == before + 1


def test_a_hello_of_another_version_is_refused(raw_engines, prefill):
    reply = raw_engines[0].hello(min_protocol=2, max_protocol=3)

    assert reply["error"]["code"] == "unsupported_version"
    assert prefill.says("request.refused", op="hello", code="unsupported_version")


def test_a_segment_without_a_hello_or_without_its_descriptor_is_refused(raw_engines):
    segment = {"segment_id": "kv", "size_bytes": 4096}
    for engine in raw_engines:
        before_hello = engine.ask("segment", segment)
        engine.hello()
        without_descriptor = engine.ask("segment", segment)

        assert before_hello["error"]["code"] == "not_registered"
        assert without_descriptor["error"]["code"] == "malformed"


def test_a_file_that_is_no_memory_is_refused(raw_engines, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    for engine in raw_engines:
        engine.hello()
        with path.open("r+b") as file:
            reply = engine.ask(
                "segment", {"segment_id": "kv", "size_bytes": 4096}, (file.fileno(),)
            )

        assert reply["error"]["code"] == "segment"


def pass_segments(engine: RawEngine, names: list[str]) -> list[dict[str, Any]]:
    """The replies to a small segment for each name."""
    replies = []
    for name in names:
        fd = os.memfd_create("kvbus-raw")
        os.ftruncate(fd, 1 << 20)
        replies.append(engine.ask("segment", {"segment_id": name, "size_bytes": 1 << 20}, (fd,)))
        os.close(fd)
    return replies


def registration(engine_id: str) -> dict[str, Any]:
    """The body that registers rank 0 with the segment ``kv``."""
    spec = make_spec(engine_id=engine_id)
    return to_body(Register(engine=spec, rank=lay_out_rank(spec, 0, NHD, num_blocks=4)))


def test_an_engine_of_the_other_role_is_refused_when_it_registers(raw_engines, prefill, decode):
    agents = {"prefill": prefill, "decode": decode}
    for role, other, engine in zip(agents, reversed(agents), raw_engines, strict=True):
        session = {"boot": uuid.uuid4().hex, "secret": uuid.uuid4().hex}
        engine.hello(engine_id="raw", boot=session["boot"])
        endpoint = f"ipc://{agents[role].attach.with_name('engine.sock')}"
        body = to_body(Register(engine=make_spec(engine_id="raw")))

        wrong = ask(endpoint, "register", body | {"role": other}, **session, id=1_001)
        right = ask(endpoint, "register", body | {"role": role}, **session, id=1_002)

        assert wrong["error"]["code"] == "config"
        assert wrong["error"]["detail"] == {"agent": role, "engine": other}
        assert "ok" in right


def test_segments_passed_while_a_rank_registers_do_not_harm_the_agent(raw_engines, prefill, decode):
    names = ["kv", *map(str, range(100))]
    for agent, engine in zip((prefill, decode), raw_engines, strict=True):
        boot = uuid.uuid4().hex
        engine.hello(engine_id="raw", boot=boot)
        pass_segments(engine, names[:50])

        with ThreadPoolExecutor() as threads:
            endpoint = f"ipc://{agent.attach.with_name('engine.sock')}"
            reply = threads.submit(ask, endpoint, "register", registration("raw"), boot=boot)
            replies = [*pass_segments(engine, names[50:]), reply.result()]

        assert all("ok" in reply for reply in replies)


def test_an_engine_that_ends_while_it_registers_leaves_nothing_behind(raw_engines, prefill):
    engine, boot = raw_engines[0], uuid.uuid4().hex
    fields = {field.name: field for field in structs.fields(AgentConfig)}
    staging_bytes = fields["staging_bytes"].default
    wait_until(  # what an engine of a test before left is kept a while, for late reads
        lambda: prefill.metric("registered_bytes") == staging_bytes, "only its own is registered"
    )
    engine.hello(engine_id="raw", boot=boot)
    pass_segments(engine, ["kv", *map(str, range(50))])

    with ThreadPoolExecutor() as threads:
        endpoint = f"ipc://{prefill.attach.with_name('engine.sock')}"
        reply = threads.submit(ask, endpoint, "register", registration("raw"), boot=boot)
        wait_until(
            lambda: prefill.metric("registered_bytes") > staging_bytes or reply.done(),
            "it registers",
        )
        engine.socket.close()
        answered = reply.result()
    wait_until(
        lambda: prefill.metric("registered_bytes") == staging_bytes, "its memory is given back"
    )
    wait_until(lambda: not prefill.memory_maps("kvbus-raw"), "its memory is unmapped")

    assert answered.keys() & {"ok", "error"}
    assert prefill.status()["engines"] == {}


@pytest.mark.anyio
async def test_after_all_of_that_a_handoff_works(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
