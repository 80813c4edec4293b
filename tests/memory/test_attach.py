"""The attach socket between a client and a server that both behave, and who is turned away."""

import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest

from kvbus.errors import (
    ClosedError,
    ErrorCode,
    GeometryError,
    PeerLost,
    ProtocolError,
    RequestRefused,
    SegmentError,
)
from kvbus.memory.attach import (
    MAX_BODY_BYTES,
    AttachClient,
    FrameChannel,
    PassingAnswer,
    close_fds,
    connect_to_agent,
    decode_body,
    encode_frame,
)
from tests.memory.conftest import Attached, Serving

pytestmark = pytest.mark.anyio
LARGE = {"text": "x" * 60_000}
Answer = Callable[..., Any]


async def test_a_message_and_its_descriptors_arrive_together(
    attached: Attached, null_fd: int
) -> None:
    async with attached() as (recorded, client):
        answers = [await client.call({"n": n}, [null_fd] * n) for n in (0, 1, 64, 0)]

    assert answers == [{"seen": n} for n in (0, 1, 64, 0)]
    assert recorded.messages == [({"n": n}, n) for n in (0, 1, 64, 0)]


async def test_the_server_knows_who_connected(attached: Attached) -> None:
    async def tell(connection: Any, *_: object) -> dict[str, Any]:
        return {"peer": [connection.peer.pid, connection.peer.uid]}

    async with attached(on_message=tell) as (_, client):
        answer = await client.call({})

    assert answer == {"peer": [os.getpid(), os.getuid()]}


async def test_descriptors_that_the_handler_does_not_take_are_closed(
    attached: Attached, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    taken: list[int] = []

    async def take_one(_connection: Any, _message: Any, fds: list[int]) -> dict[str, Any]:
        taken.append(fds.pop(0))
        return {}

    async with attached(on_message=take_one) as (_, client):
        await client.call({}, [null_fd])
        before = num_open_fds()
        await client.call({}, [null_fd] * 10)
        after = num_open_fds()

    assert after == before + 1
    assert not os.get_inheritable(taken[0])
    close_fds(taken)


async def test_calls_made_at_once_get_each_its_own_answer(attached: Attached) -> None:
    async def echo(_connection: Any, message: dict[str, Any], _fds: Any) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return message

    answers: list[int] = []
    async with attached(on_message=echo) as (_, client):

        async def ask(n: int) -> None:
            answers.append((await client.call({"n": n}))["n"])

        async with anyio.create_task_group() as tasks:
            for n in range(50):
                tasks.start_soon(ask, n)

    assert sorted(answers) == list(range(50))


@pytest.mark.parametrize(
    ("answer", "code", "detail"),
    [
        (GeometryError("too wide", width=7), ErrorCode.GEOMETRY, {"width": 7}),
        (RuntimeError("secret"), ErrorCode.INTERNAL, {}),
        ({"not msgpack": object()}, ErrorCode.INTERNAL, {}),
    ],
    ids=["refused", "a bug", "an answer that cannot be sent"],
)
async def test_an_error_of_the_handler_reaches_the_caller_and_the_connection_goes_on(
    attached: Attached, answer: Any, code: ErrorCode, detail: dict[str, Any]
) -> None:
    async def refuse(_connection: Any, message: dict[str, Any], _fds: Any) -> Any:
        if message and isinstance(answer, Exception):
            raise answer
        return answer if message else {"fine": True}

    async with attached(on_message=refuse) as (_, client):
        with pytest.raises(RequestRefused) as caught:
            await client.call({"wide": True})
        after = await client.call({})

    assert (caught.value.code, caught.value.detail) == (code, detail)
    assert "secret" not in caught.value.message
    assert after == {"fine": True}


async def test_a_call_that_its_caller_gave_up_does_not_shift_the_answers(
    attached: Attached,
) -> None:
    held, arrived = anyio.Event(), anyio.Event()

    async def hold(_connection: Any, message: dict[str, Any], _fds: Any) -> dict[str, Any]:
        if message["n"] == 0:
            arrived.set()
            await held.wait()
        return message

    async with attached(on_message=hold) as (_, client):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call, {"n": 0})
            await arrived.wait()
            tasks.cancel_scope.cancel()
        held.set()
        answer = await client.call({"n": 1})

    assert answer == {"n": 1}


@pytest.mark.parametrize(
    ("message", "fds", "error", "why"),
    [
        ({"text": "x" * 65_536}, [], ProtocolError, "exceeds 65536"),
        ({}, [0] * 65, ProtocolError, "at most 64"),
        ({}, [999_999], SegmentError, "cannot pass"),
    ],
    ids=["too large", "too many descriptors", "a closed descriptor"],
)
async def test_what_cannot_be_sent_is_an_error_and_the_connection_goes_on(
    attached: Attached,
    message: dict[str, Any],
    fds: list[int],
    error: type[Exception],
    why: str,
) -> None:
    async with attached() as (_, client):
        with pytest.raises(error, match=why):
            await client.call(message, fds)
        answer = await client.call(LARGE)

    assert answer == {"seen": 0}


async def test_an_engine_that_leaves_or_is_sent_away_is_reported_once(attached: Attached) -> None:
    async def send_away(connection: Any, message: dict[str, Any], _fds: Any) -> dict[str, Any]:
        if message:
            connection.hang_up()
        return {}

    for message in ({}, {"away": True}):
        async with attached(on_message=send_away) as (recorded, client):
            if message:
                with pytest.raises(PeerLost):
                    await client.call(message)
                await client.closed.wait()
            else:
                await client.call(message)
        await recorded.one_closed.wait()

        assert len(recorded.closed) == 1


async def test_calls_that_wait_when_the_agent_goes_learn_of_it_and_no_descriptor_stays(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    async def never(*_: object) -> dict[str, Any]:
        recorded.stopped.cancel()
        await anyio.sleep_forever()
        return {}

    before = num_open_fds()
    async with serving(on_message=never) as recorded, AttachClient(recorded.server.path) as client:
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"attach\.sock is gone"):
                await client.call({}, [null_fd])

    assert len(recorded.closed) == 1
    assert num_open_fds() == before


async def test_nothing_stays_open_when_the_server_stops(
    serving: Serving, num_open_fds: Callable[[], int], null_fd: int
) -> None:
    before = num_open_fds()
    async with AsyncExitStack() as stack:
        recorded = await stack.enter_async_context(serving())
        for _ in range(5):
            client = await stack.enter_async_context(AttachClient(recorded.server.path))
            await client.call({}, [null_fd])

    assert num_open_fds() == before
    assert len(recorded.closed) == 5
    assert not recorded.server.path.exists()


async def test_a_client_is_of_no_use_outside_its_block_and_an_error_inside_is_not_wrapped(
    serving: Serving, folder: Path
) -> None:
    async with serving() as recorded:
        client = AttachClient(recorded.server.path)
        with pytest.raises(ClosedError):
            await client.call({})
        with pytest.raises(ZeroDivisionError):
            async with client:
                _ = 1 / 0
        with pytest.raises(ClosedError):
            await client.call({})
    with pytest.raises(PeerLost, match=r"nobody\.sock"):
        async with AttachClient(folder / "nobody.sock"):
            pass


async def test_one_connection_too_many_is_told_that_the_agent_is_busy(
    serving: Serving, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    async with serving(max_connections=1) as recorded:
        async with AttachClient(recorded.server.path) as first:
            await first.call({})
            for _ in range(3):
                async with AttachClient(recorded.server.path) as second:
                    with pytest.raises(RequestRefused) as caught:
                        await second.call(LARGE)
            assert await first.call({}) == {"seen": 0}
        await recorded.one_closed.wait()
        async with AttachClient(recorded.server.path) as third:
            assert await third.call({}) == {"seen": 0}

    assert caught.value.code == ErrorCode.BUSY
    assert recorded.server.counts.num_refused_busy == 3
    assert len(recorded.closed) == 2
    assert num_open_fds() == before


@pytest.mark.parametrize("asks_first", [True, False])
async def test_our_own_user_is_told_why_it_is_refused_when_it_is_not_allowed(
    attached: Attached, asks_first: bool
) -> None:
    async with attached(allowed_uids={os.getuid() + 1}) as (recorded, client):
        if not asks_first:
            await client.closed.wait()
        for _ in range(1 if asks_first else 2):
            with pytest.raises(RequestRefused, match="may not attach"):
                await client.call({})
        await client.closed.wait()

    assert recorded.server.counts.num_refused_users == 1
    assert recorded.closed == []


def let_everybody_in(path: Path) -> None:
    path.parent.chmod(0o755)
    path.chmod(0o666)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_although_the_file_modes_would_let_it_in(
    serving: Serving, child_command: Callable[..., list[str]]
) -> None:
    async with serving() as recorded:
        let_everybody_in(recorded.server.path)
        result = await anyio.run_process(child_command("stranger", recorded.server.path))

    words = msgpack.unpackb(result.stdout[4:])
    assert words["error"]["detail"] == {"uid": 65534}
    assert recorded.server.counts.num_refused_users == 1
    assert recorded.messages == []
    assert recorded.closed == []


def passes(*names: str, ok: dict[str, Any] | None = None) -> Answer:
    async def on_message(*_: object) -> PassingAnswer:
        return PassingAnswer(ok or {}, [os.memfd_create(name) for name in names])

    return on_message


def name_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


async def ask(path: Path, times: int = 1) -> list[tuple[dict[str, Any], list[str]]]:
    """What is answered, and which files come with it."""
    channel, answers = FrameChannel(connect_to_agent(path)), []
    for _ in range(times):
        await channel.send(encode_frame({}))
        body, fds = await channel.receive()
        answers.append((decode_body(body), [name_of(fd) for fd in fds]))
        close_fds(fds)
    channel.close()
    return answers


async def test_descriptors_arrive_in_order_with_the_answer_that_they_belong_to(
    serving: Serving, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    async with serving(on_message=passes("a", "b")) as recorded:
        answers = await ask(recorded.server.path, times=3)

    assert answers == [({"ok": {}}, ["/memfd:a (deleted)", "/memfd:b (deleted)"])] * 3
    assert num_open_fds() == before


async def test_an_answer_that_does_not_arrive_leaves_no_descriptor(
    serving: Serving, num_open_fds: Callable[[], int]
) -> None:
    before, too_long = num_open_fds(), {"text": "x" * MAX_BODY_BYTES}
    async with serving(on_message=passes("a")) as recorded:
        channel = FrameChannel(connect_to_agent(recorded.server.path))
        await channel.send(encode_frame({}))
        channel.close()
        await recorded.one_closed.wait()
    async with serving(on_message=passes("a", ok=too_long)) as recorded:
        ((answer, files),) = await ask(recorded.server.path)

    assert answer["error"]["code"] == "internal"
    assert files == []
    assert num_open_fds() == before


@pytest.fixture
def narrow_pair() -> Any:
    """Two ends whose buffers are smaller than a message."""
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with left, right:
        yield FrameChannel(left), FrameChannel(right)


async def test_a_message_sent_in_parts_arrives_whole_with_its_descriptors_once(
    narrow_pair: tuple[FrameChannel, FrameChannel], num_open_fds: Callable[[], int], null_fd: int
) -> None:
    (sender, receiver), before = narrow_pair, num_open_fds()
    frames: list[tuple[bytes, list[int]]] = []

    async def receive_two() -> None:
        frames.append(await receiver.receive())
        frames.append(await receiver.receive())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive_two)
        await sender.send(encode_frame(LARGE), [null_fd, null_fd])
        await sender.send(encode_frame({}))
    counts = [len(fds) for _, fds in frames]
    close_fds(frames[0][1])

    assert [decode_body(body) for body, _ in frames] == [LARGE, {}]
    assert counts == [2, 0]
    assert num_open_fds() == before


async def test_a_message_whose_sending_is_cancelled_half_way_ends_the_channel(
    narrow_pair: tuple[FrameChannel, FrameChannel],
) -> None:
    sender, receiver = narrow_pair
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender.send, encode_frame(LARGE))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    with pytest.raises(anyio.EndOfStream):
        await receiver.receive()
    with pytest.raises(BrokenPipeError):
        await sender.send(encode_frame({}))
