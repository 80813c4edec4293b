"""Each negative vector gets its code from a real agent, and the next message is answered."""

import json
import socket
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from kvbus.memory.attach import wire
from tests.agents import AgentProcess, Agents, agents_ended
from tests.vectors.generate import FOLDER

REFUSED: list[dict[str, Any]] = json.loads((FOLDER / "refused.json").read_text())
STATUS = {"v": 1, "op": "status", "id": 99, "boot": "raw-engine", "body": {}}
WITHIN_S = 30.0


@pytest.fixture(scope="module")
def agents():
    with agents_ended(Agents) as made:
        made.start(made.prepare("prefill"), made.prepare("decode"))
        yield made.all
        made.check()


def endpoints(where: str, agents: list[AgentProcess]) -> list[str]:
    """The request sockets at which a vector is refused."""
    prefill, decode = agents
    engine = [f"ipc://{agent.attach.with_name('engine.sock')}" for agent in agents]
    return {
        "requests": [prefill.peer, decode.peer, *engine],
        "prefill peer": [prefill.peer],
        "decode peer": [decode.peer],
        "engine": engine,
    }[where]


def test_there_are_negative_vectors_for_every_kind_of_socket():
    sockets = [vector["socket"] for vector in REFUSED]

    assert len(REFUSED) > 20
    assert set(sockets) == {"requests", "prefill peer", "decode peer", "engine", "attach"}


@pytest.mark.parametrize(
    "vector", [v for v in REFUSED if v["socket"] != "attach"], ids=lambda v: v["why"]
)
def test_a_frame_that_must_be_refused_is_by_its_code(agents, vector):
    for endpoint in endpoints(vector["socket"], agents):
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVTIMEO, round(WITHIN_S * 1000))
            dealer.connect(endpoint)
            for before in vector["before"]:
                dealer.send(bytes.fromhex(before))
                assert "ok" in msgpack.unpackb(dealer.recv())

            dealer.send_multipart([bytes.fromhex(frame) for frame in vector["frames"]])
            reply = msgpack.unpackb(dealer.recv())
            dealer.send(msgpack.packb(STATUS))
            after = msgpack.unpackb(dealer.recv())

        assert reply["error"]["code"] == vector["code"], reply
        assert (after["re"], "ok" in after) == (99, True)


@pytest.mark.parametrize(
    "vector", [v for v in REFUSED if v["socket"] == "attach"], ids=lambda v: v["why"]
)
def test_an_attach_message_that_must_be_refused_is_by_its_code(agents, vector):
    for agent in agents:
        with connected(agent.attach) as engine:
            for before in vector["before"]:
                engine.sendall(bytes.fromhex(before))
                assert "ok" in received(engine)

            engine.sendall(bytes.fromhex(vector["frames"][0]))
            reply = received(engine)

        assert reply["error"]["code"] == vector["code"], reply


def connected(path: Path) -> socket.socket:
    """A connection to an attach socket."""
    engine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    engine.settimeout(WITHIN_S)
    engine.connect(str(path))
    return engine


def received(engine: socket.socket) -> dict[str, Any]:
    """The next message of the agent."""
    length = int.from_bytes(engine.recv(wire.LENGTH_BYTES, socket.MSG_WAITALL), "little")
    reply: dict[str, Any] = msgpack.unpackb(engine.recv(length, socket.MSG_WAITALL))
    return reply
