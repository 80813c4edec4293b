"""The lines between the two sides: what is one, how it may come, and for how long it is waited."""

import fcntl
import json
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import anyio
import pytest

from kvbus.bench.sides import handed
from kvbus.bench.sides.handed import MAX_LINE_BYTES, MAX_MIB, handed_over
from kvbus.errors import ConfigError, PeerLost, RequestTimeout
from tests.agents import until

pytestmark = pytest.mark.anyio


def line_of(case: str = "one-block", mib: int = 1, left: int = 3) -> bytes:
    """A line with a ticket that is none."""
    return json.dumps({"case": case, "mib": mib, "left": left, "ticket": {}}).encode() + b"\n"


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[bytes]]:
    """The other end of stdin."""
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield writer


async def lefts() -> list[int]:
    """How many lines followed each of those that came."""
    return [one.left async for one in handed_over()]


def num_unread() -> int:
    """Bytes that wait in stdin."""
    return int.from_bytes(fcntl.ioctl(sys.stdin, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"hello\n", "'hello' is no line of kvbus bench-prefill: "),
        (b"\xff\n", "is no line of kvbus bench-prefill: "),
        (b'{"case":"one-block","mib":1}\n', "missing required field `left`"),
        (line_of(mib=MAX_MIB + 1), "Expected `int` <= 1024"),
        (line_of(mib=0), "Expected `int` >= 1"),
        (line_of(left=-1), "Expected `int` >= 0"),
    ],
)
async def test_what_is_no_line_is_refused(writer: IO[bytes], text: bytes, error: str) -> None:
    writer.write(text)

    with pytest.raises(ConfigError, match=error):
        await lefts()


async def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    writer: IO[bytes],
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, writer.write, b"0" * (MAX_LINE_BYTES + 1))
        with anyio.fail_after(20), pytest.raises(ConfigError, match="is no line"):
            await lefts()


async def test_lines_may_come_in_pieces_or_several_at_once(writer: IO[bytes]) -> None:
    text, found = line_of(left=2) + line_of(left=1) + line_of(left=0), list[int]()

    async def read() -> None:
        found.extend(await lefts())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        writer.write(text[:20])
        await until(lambda: not num_unread())
        writer.write(text[20:])

    assert found == [2, 1, 0]


async def test_what_follows_the_last_line_is_not_waited_for(writer: IO[bytes]) -> None:
    writer.write(line_of(left=0))

    with anyio.fail_after(20):
        assert await lefts() == [0]


async def test_an_end_before_the_last_line_is_told(writer: IO[bytes]) -> None:
    writer.write(line_of(left=1))
    writer.close()

    with pytest.raises(PeerLost, match="stdin ended before the last handoff: "):
        await lefts()


async def test_lines_may_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_bytes(line_of(left=1) + line_of(left=0))
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)

        assert await lefts() == [1, 0]


async def test_a_line_is_not_waited_for_without_end(
    writer: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handed, "NEXT_WITHIN_S", 0.1)

    with anyio.fail_after(20), pytest.raises(RequestTimeout, match=r"no line came for 0\.1 s: "):
        await lefts()


async def test_waiting_for_a_line_can_be_cancelled(writer: IO[bytes]) -> None:
    with anyio.move_on_after(0.1) as waiting:
        await lefts()

    assert waiting.cancelled_caught


async def test_a_terminal_is_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    with os.fdopen(terminal) as stdin, os.fdopen(controller):
        monkeypatch.setattr(sys, "stdin", stdin)

        with anyio.fail_after(20), pytest.raises(ConfigError, match="stdin is no pipe: "):
            await lefts()
