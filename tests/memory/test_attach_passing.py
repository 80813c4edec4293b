"""An answer may carry descriptors: they arrive with it, and the server keeps none."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbus.memory.attach import FrameChannel, PassingAnswer, close_fds, connect_to_agent, wire

pytestmark = pytest.mark.anyio
Serving = Callable[..., Any]


def name_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


async def ask(path: Path, times: int = 1) -> list[tuple[dict[str, Any], list[str]]]:
    """What is answered, and which files come with it."""
    channel, answers = FrameChannel(connect_to_agent(path)), []
    for _ in range(times):
        await channel.send(wire.encode_frame({}))
        body, fds = await channel.receive()
        answers.append((wire.decode_body(body), [name_of(fd) for fd in fds]))
        close_fds(fds)
    channel.close()
    return answers


def passes(*names: str, ok: dict[str, Any] | None = None) -> Callable[..., Any]:
    async def on_message(_connection: Any, _message: Any, _fds: list[int]) -> PassingAnswer:
        return PassingAnswer(ok or {}, [os.memfd_create(name) for name in names])

    return on_message


async def test_descriptors_arrive_in_order_with_the_answer_that_they_belong_to(
    serving: Serving, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    async with serving(on_message=passes("a", "b")) as recorded:
        answers = await ask(recorded.server.path, times=3)

    assert answers == [({"ok": {}}, ["/memfd:a (deleted)", "/memfd:b (deleted)"])] * 3
    assert num_open_fds() == before


async def test_a_client_that_is_gone_before_its_answer_leaves_no_descriptor(
    serving: Serving, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    async with serving(on_message=passes("a")) as recorded:
        channel = FrameChannel(connect_to_agent(recorded.server.path))
        await channel.send(wire.encode_frame({}))
        channel.close()
        await recorded.one_closed.wait()

    assert num_open_fds() == before


async def test_an_answer_that_cannot_be_sent_is_an_error_without_descriptors(
    serving: Serving, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    too_long = {"text": "x" * wire.MAX_BODY_BYTES}
    async with serving(on_message=passes("a", ok=too_long)) as recorded:
        ((answer, files),) = await ask(recorded.server.path)

    assert answer["error"]["code"] == "internal"
    assert files == []
    assert num_open_fds() == before
