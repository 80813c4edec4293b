"""Each negative vector gets its code from the codec, and from agents that answer the next frame."""

import json
from ctypes.util import find_library
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from kvbus.errors import ProtocolError
from kvbus.protocol import MAX_FRAME_BYTES, MAX_PEER_REQUEST_BYTES, RequestFrame, decode
from tests.support.agents import AgentProcess, Agents
from tests.support.plain_sockets import Attached, ask, ask_frames, engine_socket, plain_socket
from tests.unit.vectors.golden import FOLDER

Vector = dict[str, Any]
REFUSED: list[Vector] = json.loads((FOLDER / "refused.json").read_text())
STATUS = {"v": 1, "op": "status", "id": 99, "boot": "raw-engine", "body": {}}


@dataclass(frozen=True)
class Place:
    """A socket where requests are answered, and the vectors that it must refuse."""

    agent: AgentProcess
    endpoint: str
    most_bytes: int
    vectors: list[Vector]

    def code_of(self, vector: Vector) -> str:
        with plain_socket(self.endpoint) as dealer:
            for before in vector["before"]:
                dealer.send(bytes.fromhex(before))
                assert "ok" in msgpack.unpackb(dealer.recv())
            dealer.send_multipart([bytes.fromhex(frame) for frame in vector["frames"]])
            reply = msgpack.unpackb(dealer.recv())
            dealer.send(msgpack.packb(STATUS))
            after = msgpack.unpackb(dealer.recv())
        assert (after["re"], "ok" in after) == (99, True)
        return str(reply["error"]["code"])


def codes(vectors: list[Vector]) -> dict[str, str]:
    return {vector["why"]: vector["code"] for vector in vectors}


def vectors_of(*sockets: str) -> list[Vector]:
    return [vector for vector in REFUSED if vector["socket"] in sockets]


@pytest.fixture(params=["prefill peer", "decode peer", "prefill engine", "decode engine"])
def place(request: pytest.FixtureRequest, agents: Agents) -> Place:
    role, kind = request.param.split()
    agent = agents.all[role == "decode"]
    vectors = vectors_of("requests", request.param, kind)
    if kind == "peer":
        return Place(agent, agent.peer, MAX_PEER_REQUEST_BYTES, vectors)
    return Place(agent, engine_socket(agent.attach), MAX_FRAME_BYTES, vectors)


def test_the_codec_refuses_what_is_no_request_by_the_same_codes() -> None:
    vectors = [one for one in vectors_of("requests") if len(one["frames"]) == 1]

    def code_of(frame: bytes) -> str:
        try:
            return "" if isinstance(decode(frame), RequestFrame) else "malformed"
        except ProtocolError as error:
            return error.code.value

    told = {one["why"]: code_of(bytes.fromhex(one["frames"][0])) for one in vectors}
    assert len(vectors) > 20
    assert told == codes(vectors)


def test_bad_frame_is_refused_and_counted_and_next_one_answered(place: Place) -> None:
    malformed = place.agent.metric("malformed_messages")
    unknown = place.agent.metric("refusals_total", code="unknown_op")
    told = {vector["why"]: place.code_of(vector) for vector in place.vectors}
    assert told == codes(place.vectors)
    no_requests = vectors_of("requests")
    assert place.agent.metric("malformed_messages") == malformed + len(no_requests)
    num_unknown = list(told.values()).count("unknown_op")
    assert place.agent.metric("refusals_total", code="unknown_op") == unknown + num_unknown


def test_slightly_too_large_frame_is_refused_and_counted(place: Place) -> None:
    before = place.agent.metric("malformed_messages")
    reply = ask_frames(place.endpoint, bytes(place.most_bytes + 1))
    assert reply["error"]["code"] == "too_large"
    assert place.agent.metric("malformed_messages") == before + 1


@pytest.mark.parametrize(
    ("token", "code", "is_logged"),
    [("0" * 32, "offer_unknown", False), ("short", "invalid", True)],
    ids=["late", "wrong"],
)
def test_release_of_ended_lease_is_counted_without_warning(
    prefill: AgentProcess, token: str, code: str, is_logged: bool
) -> None:
    """Leases end by themselves, too: only a message that makes no sense is worth a line."""
    boot = prefill.started["boot_id"]
    lease = {"agent_boot": boot, "offer_id": "x", "epoch": 1, "token": token, "code": "timeout"}
    before = prefill.metric("refusals_total", code=code)
    prefill.skip_log()
    reply = ask(prefill.peer, "release", lease)
    ask(prefill.peer, "make_coffee", {})
    assert reply["error"]["code"] == code
    assert prefill.metric("refusals_total", code=code) == before + 1
    assert prefill.says("request.refused", op="make_coffee", code="unknown_op", level="warning")
    assert bool(prefill.logged("request.refused", op="release", level="warning")) == is_logged


def test_each_attach_message_is_refused_by_its_code(agents: Agents) -> None:
    vectors = vectors_of("attach")

    def code_of(agent: AgentProcess, vector: Vector) -> str:
        with Attached(agent.attach) as engine:
            for before in vector["before"]:
                engine.socket.sendall(bytes.fromhex(before))
                assert "ok" in engine.receive()
            engine.socket.sendall(bytes.fromhex(vector["frames"][0]))
            return str(engine.receive()["error"]["code"])

    for agent in agents.all:
        assert {one["why"]: code_of(agent, one) for one in vectors} == codes(vectors)


def test_attach_outlives_malformed_message_but_not_too_large_one(agents: Agents) -> None:
    for agent in agents.all:
        before = agent.metric("malformed_messages")
        with Attached(agent.attach) as engine:
            engine.send(b"\xc1")
            assert engine.receive()["error"]["code"] == "malformed"
            assert "ok" in engine.hello()
            engine.socket.sendall((1 << 30).to_bytes(4, "little"))
            assert engine.receive()["error"]["code"] == "too_large"
            with pytest.raises(EOFError):
                engine.receive()
        assert agent.metric("malformed_messages") == before + 2


@pytest.mark.skipif(bool(find_library("cuda")), reason="there is a driver: see tests/process/gpu")
def test_gpu_memory_is_refused_without_torch_where_gpu_is_absent(fresh: Agents) -> None:
    """Its import holds an agent's event loop up, and takes 120 MB for good."""
    agent = fresh.prepare("prefill")
    fresh.start(agent)
    place = {"device": "GPU-0", "handle": bytes(64), "offset_bytes": 0, "size_bytes": 4096}
    with Attached(agent.attach) as engine:
        engine.hello()
        error = engine.ask("cuda", {"segment_id": "kv", **place})["error"]
    assert error["code"] == "segment"
    assert agent.memory_maps("copy_runs") > 0
    assert agent.memory_maps("torch") == 0
