"""The attach socket between a client and a server that both behave."""

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
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
from kvbus.memory.attach import AttachClient

pytestmark = pytest.mark.anyio
Serving = Callable[..., Any]


@pytest.fixture
def null_fd() -> Any:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield fd
    os.close(fd)


async def test_a_message_and_its_descriptors_arrive_together(
    serving: Serving, null_fd: int
) -> None:
    async with serving() as recorded, AttachClient(recorded.server.path) as client:
        answers = [await client.call({"n": n}, [null_fd] * n) for n in (0, 1, 64, 0)]

    assert answers == [{"seen": n} for n in (0, 1, 64, 0)]
    assert recorded.messages == [({"n": n}, n) for n in (0, 1, 64, 0)]


async def test_the_server_knows_who_connected(serving: Serving) -> None:
    peers = []

    async def note(connection: Any, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        peers.append(connection.peer)
        return {}

    async with serving(on_message=note) as recorded, AttachClient(recorded.server.path) as client:
        await client.call({})

    assert [(peer.pid, peer.uid) for peer in peers] == [(os.getpid(), os.getuid())]


async def test_descriptors_that_the_handler_does_not_take_are_closed(
    serving: Serving, null_fd: int, num_open_fds: Callable[[], int]
) -> None:
    taken: list[int] = []

    async def take_one(connection: Any, message: Any, fds: list[int]) -> dict[str, Any]:
        taken.append(fds.pop(0))
        return {}

    async with (
        serving(on_message=take_one) as recorded,
        AttachClient(recorded.server.path) as client,
    ):
        await client.call({}, [null_fd])
        before = num_open_fds()
        await client.call({}, [null_fd] * 10)
        after = num_open_fds()

    assert after == before + 1
    assert not os.get_inheritable(taken[0])
    for fd in taken:
        os.close(fd)


async def test_calls_made_at_once_get_each_its_own_answer(serving: Serving) -> None:
    async def echo(connection: Any, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return message

    answers: list[int] = []
    async with serving(on_message=echo) as recorded, AttachClient(recorded.server.path) as client:

        async def ask(n: int) -> None:
            answers.append((await client.call({"n": n}))["n"])

        async with anyio.create_task_group() as tasks:
            for n in range(50):
                tasks.start_soon(ask, n)

    assert sorted(answers) == list(range(50))


async def test_an_error_of_the_handler_reaches_the_caller_and_the_connection_goes_on(
    serving: Serving,
) -> None:
    async def refuse(connection: Any, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if message:
            raise GeometryError("too wide", width=7)
        return {"fine": True}

    async with serving(on_message=refuse) as recorded, AttachClient(recorded.server.path) as client:
        with pytest.raises(RequestRefused, match="too wide") as caught:
            await client.call({"wide": True})
        answer = await client.call({})

    assert (caught.value.code, caught.value.detail) == (ErrorCode.GEOMETRY, {"width": 7})
    assert answer == {"fine": True}


@pytest.mark.parametrize("answer", [RuntimeError("secret"), {"not msgpack": object()}])
async def test_a_bug_in_the_handler_is_an_internal_error_of_that_message_alone(
    serving: Serving, answer: Any
) -> None:
    async def fail(connection: Any, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with serving(on_message=fail) as recorded, AttachClient(recorded.server.path) as client:
        for _ in range(2):
            with pytest.raises(RequestRefused) as caught:
                await client.call({})
            assert caught.value.code == ErrorCode.INTERNAL
            assert "secret" not in caught.value.message


async def test_a_call_that_its_caller_gave_up_does_not_shift_the_answers(serving: Serving) -> None:
    held = anyio.Event()
    arrived = anyio.Event()

    async def hold(connection: Any, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if message["n"] == 0:
            arrived.set()
            await held.wait()
        return message

    async with serving(on_message=hold) as recorded, AttachClient(recorded.server.path) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call, {"n": 0})
            await arrived.wait()
            tasks.cancel_scope.cancel()
        held.set()
        answer = await client.call({"n": 1})

    assert answer == {"n": 1}


async def test_a_message_that_is_too_large_is_refused_before_it_is_sent(serving: Serving) -> None:
    async with serving() as recorded, AttachClient(recorded.server.path) as client:
        with pytest.raises(ProtocolError, match="exceeds 65536") as caught:
            await client.call({"text": "x" * 65_536})
        with pytest.raises(ProtocolError, match="at most 64"):
            await client.call({}, [0] * 65)
        answer = await client.call({})

    assert caught.value.code == ErrorCode.TOO_LARGE
    assert answer == {"seen": 0}


async def test_a_closed_descriptor_is_an_error_and_the_connection_goes_on(serving: Serving) -> None:
    async with serving() as recorded, AttachClient(recorded.server.path) as client:
        with pytest.raises(SegmentError, match="cannot pass"):
            await client.call({}, [999_999])
        answer = await client.call({"text": "x" * 60_000})

    assert answer == {"seen": 0}


async def test_each_engine_that_leaves_is_reported_once(serving: Serving) -> None:
    async with serving() as recorded:
        async with AttachClient(recorded.server.path) as client:
            await client.call({})
        await recorded.one_closed.wait()

    assert len(recorded.closed) == 1


async def test_an_engine_that_the_agent_sends_away_is_reported_too(serving: Serving) -> None:
    async def send_away(connection: Any, message: Any, fds: list[int]) -> dict[str, Any]:
        connection.hang_up()
        return {}

    async with serving(on_message=send_away) as recorded:
        async with AttachClient(recorded.server.path) as client:
            with pytest.raises(PeerLost):
                await client.call({})
            await client.closed.wait()
        await recorded.one_closed.wait()

    assert len(recorded.closed) == 1


async def test_calls_that_wait_when_the_agent_goes_learn_of_it(serving: Serving) -> None:
    async def never(connection: Any, message: Any, fds: list[int]) -> dict[str, Any]:
        recorded.stopped.cancel()
        await anyio.sleep_forever()
        return {}

    async with serving(on_message=never) as recorded, AttachClient(recorded.server.path) as client:
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"attach\.sock is gone"):
                await client.call({})

    assert len(recorded.closed) == 1


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


async def test_a_client_is_of_no_use_outside_its_block(serving: Serving) -> None:
    async with serving() as recorded:
        client = AttachClient(recorded.server.path)
        with pytest.raises(ClosedError):
            await client.call({})
        async with client:
            pass
        with pytest.raises(ClosedError):
            await client.call({})


async def test_an_error_in_the_clients_block_is_not_wrapped(serving: Serving) -> None:
    async with serving() as recorded:
        with pytest.raises(ZeroDivisionError):
            async with AttachClient(recorded.server.path):
                _ = 1 / 0


async def test_no_agent_at_the_path_is_an_error_that_names_it(runtime_dir: Path) -> None:
    with pytest.raises(PeerLost, match=r"nobody\.sock"):
        async with AttachClient(runtime_dir / "nobody.sock"):
            pass
