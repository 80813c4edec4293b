"""FrameChannel over a socket pair whose buffers are smaller than a message."""

import os
import socket
from collections.abc import Callable, Iterator

import anyio
import pytest

from kvbus.memory.attach import FrameChannel, close_fds
from kvbus.memory.attach.wire import decode_body, encode_frame

pytestmark = pytest.mark.anyio
LARGE = {"text": "x" * 60_000}


@pytest.fixture
def narrow_pair() -> Iterator[tuple[FrameChannel, FrameChannel]]:
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with left, right:
        yield FrameChannel(left), FrameChannel(right)


async def test_a_message_sent_in_parts_arrives_whole_with_its_descriptors_once(
    narrow_pair: tuple[FrameChannel, FrameChannel], num_open_fds: Callable[[], int]
) -> None:
    sender, receiver = narrow_pair
    frames: list[tuple[bytes, list[int]]] = []
    fd = os.eventfd(0)

    async def receive_two() -> None:
        frames.append(await receiver.receive())
        frames.append(await receiver.receive())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive_two)
        await sender.send(encode_frame(LARGE), [fd, fd])
        await sender.send(encode_frame({}))
    counts = [len(fds) for _, fds in frames]
    before = num_open_fds()
    close_fds(frames[0][1])
    os.close(fd)

    assert [decode_body(body) for body, _ in frames] == [LARGE, {}]
    assert counts == [2, 0]
    assert num_open_fds() == before - 3


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
