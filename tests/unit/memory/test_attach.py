"""The attach socket between a client and a server that both behave."""

import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.errors import GeometryError, PeerLost, ProtocolError, RequestRefused, SegmentError
from kvbus.memory import attach
from kvbus.memory.attach import AttachClient, FrameChannel, close_fds, decode_body, encode_frame
from tests.unit.memory.conftest import Serving

pytestmark = pytest.mark.anyio
LARGE = {"text": "x" * 60_000}
Pair = tuple[FrameChannel, FrameChannel]


async def test_messages_carry_descriptors_and_sender(serving: Serving, null_fd: int) -> None:
    peers, inherited = set(), set[bool]()
    answers: list[dict[str, Any]] = []

    async def answer(connection: Any, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        peers.add((connection.peer.pid, connection.peer.uid))
        inherited.update(map(os.get_inheritable, fds))
        await anyio.lowlevel.checkpoint()
        return {"n": message["n"], "seen": len(fds)}

    async with serving(on_message=answer) as served, AttachClient(served.path) as client:

        async def ask(n: int) -> None:
            answers.append(await client.call({"n": n}, [null_fd] * (n % 65)))

        async with anyio.create_task_group() as tasks:
            for n in range(70):
                tasks.start_soon(ask, n)

    by_n = sorted(answers, key=lambda one: one["n"])
    assert by_n == [{"n": n, "seen": n % 65} for n in range(70)]
    assert (peers, inherited) == ({(os.getpid(), os.getuid())}, {False})


@pytest.mark.parametrize(
    ("answer", "code", "detail"),
    [
        (GeometryError("too wide", width=7), "geometry", {"width": 7}),
        (RuntimeError("secret"), "internal", {}),
        ({"not msgpack": object()}, "internal", {}),
    ],
    ids=["refused", "a bug", "an answer that cannot be sent"],
)
async def test_handler_error_reaches_caller_and_connection_goes_on(
    serving: Serving, answer: Any, code: str, detail: dict[str, Any]
) -> None:
    async def refuse(_connection: Any, message: dict[str, Any], _fds: Any) -> Any:
        if message and isinstance(answer, Exception):
            raise answer
        return answer if message else {"fine": True}

    async with serving(on_message=refuse) as served, AttachClient(served.path) as client:
        with pytest.raises(RequestRefused) as caught:
            await client.call({"wide": True})
        assert await client.call({}) == {"fine": True}

    assert (caught.value.code, caught.value.detail) == (code, detail)
    assert "secret" not in caught.value.message


async def test_abandoned_call_does_not_shift_answers(serving: Serving) -> None:
    held, arrived = anyio.Event(), anyio.Event()

    async def hold(_connection: Any, message: dict[str, Any], _fds: Any) -> dict[str, Any]:
        if message["n"] == 0:
            arrived.set()
            await held.wait()
        return message

    async with serving(on_message=hold) as served, AttachClient(served.path) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call, {"n": 0})
            await arrived.wait()
            tasks.cancel_scope.cancel()
        held.set()

        assert await client.call({"n": 1}) == {"n": 1}


async def test_unsendable_message_is_error_and_connection_goes_on(serving: Serving) -> None:
    async with serving() as served, AttachClient(served.path) as client:
        with pytest.raises(ProtocolError, match="exceeds 65536"):
            await client.call({"text": "x" * 65_536})
        with pytest.raises(ProtocolError, match="at most 64"):
            await client.call({}, [0] * 65)
        with pytest.raises(SegmentError, match="cannot pass"):
            await client.call({}, [999_999])
        assert await client.call(LARGE) == {"seen": 0}


@pytest.mark.usefixtures("nothing_leaks")
async def test_server_stop_ends_calls_and_leaks_nothing(serving: Serving, null_fd: int) -> None:
    async def stop_at_last(_: Any, message: dict[str, Any], _fds: Any) -> dict[str, Any]:
        if message:
            served.stopped.cancel()
            await anyio.sleep_forever()
        return {}

    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(on_message=stop_at_last))
        for _ in range(5):
            client = await stack.enter_async_context(AttachClient(served.path))
            await client.call({}, [null_fd])
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"attach\.sock is gone"):
                await client.call({"last": True}, [null_fd])

    assert len(served.closed) == 5
    assert not served.path.exists()


def name_of(fd: int) -> str:
    return Path(f"/proc/self/fd/{fd}").readlink().name


async def pass_a_and_b(_: Any, message: dict[str, Any], _fds: Any) -> attach.PassingAnswer:
    too_long = {"text": "x" * attach.MAX_BODY_BYTES} if message.get("too_long") else message
    return attach.PassingAnswer(too_long, [os.memfd_create(name) for name in ("a", "b")])


@pytest.mark.usefixtures("nothing_leaks")
async def test_descriptors_come_in_order_with_answer_or_are_closed(serving: Serving) -> None:
    async with serving(on_message=pass_a_and_b) as served:
        channel = FrameChannel(attach.connect_to_agent(served.path))
        for number in range(3):
            await channel.send(encode_frame({"number": number}))
            body, fds = await channel.receive()
            names = [name_of(fd) for fd in fds]
            close_fds(fds)

            assert decode_body(body) == {"ok": {"number": number}}
            assert names == ["memfd:a (deleted)", "memfd:b (deleted)"]
        await channel.send(encode_frame({"too_long": True}))
        body, fds = await channel.receive()
        await channel.send(encode_frame({}))
        channel.close()
        await served.one_closed.wait()

    assert (decode_body(body)["error"]["code"], fds) == ("internal", [])


@pytest.fixture
def narrow_pair() -> Iterator[Pair]:
    """Two ends whose buffers are smaller than a message."""
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with left, right:
        yield FrameChannel(left), FrameChannel(right)


async def test_split_message_is_whole(narrow_pair: Pair, null_fd: int) -> None:
    sender, receiver = narrow_pair
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender.send, encode_frame(LARGE), [null_fd, null_fd])
        body, fds = await receiver.receive()
        assert (decode_body(body), len(fds)) == (LARGE, 2)
        close_fds(fds)
        tasks.start_soon(sender.send, encode_frame({}))
        body, fds = await receiver.receive()
        assert (decode_body(body), fds) == ({}, [])


async def test_half_sent_message_ends_channel(narrow_pair: Pair) -> None:
    sender, receiver = narrow_pair
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender.send, encode_frame(LARGE))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    with pytest.raises(anyio.EndOfStream):
        await receiver.receive()
    with pytest.raises(BrokenPipeError):
        await sender.send(encode_frame({}))
