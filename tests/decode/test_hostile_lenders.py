"""What a decode agent does not map: then it reads with NIXL, byte for byte, and says why once."""

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from kvbus.agent.process.machine import machine_id
from kvbus.errors import LocalError
from kvbus.memory.attach import AttachConnection, AttachServer, PassingAnswer, wire
from kvbus.protocol import LendMemory, LentSegment, MemoryLent, MemorySocket, from_body, to_body
from tests.agents import until
from tests.decode.lent import Neighbours, neighbours
from tests.engines import Engine, works

pytestmark = pytest.mark.anyio
NOBODY = 65534


@pytest.fixture
async def both(folder: Path) -> AsyncIterator[Neighbours]:
    async with neighbours(folder) as started:
        yield started


def tell(both: Neighbours, socket: MemorySocket) -> None:
    """Have the prefill agent's handshakes name another socket."""
    both.lender.socket_for = lambda _: socket  # type: ignore[method-assign]  # a hostile agent


def memory_file(size_bytes: int) -> int:
    fd = os.memfd_create("hostile")
    os.ftruncate(fd, size_bytes)
    return fd


Lie = Callable[[LendMemory, int, str], PassingAnswer]
"""Answers a question about a segment of this size, at an agent with this boot id."""


@asynccontextmanager
async def liar(both: Neighbours, folder: Path, source: Engine, lie: Lie) -> AsyncIterator[None]:
    """A memory socket that answers what it likes, and that the handshake names."""
    (folder / "h").mkdir(mode=0o700)
    (segment,) = source.caches[0].rank.segments

    async def answer(_connection: Any, message: dict[str, Any], _fds: list[int]) -> PassingAnswer:
        wanted = from_body(LendMemory, message["body"])
        return lie(wanted, segment.size_bytes, both.prefill.boot)

    server = AttachServer(folder / "h" / "memory.sock", answer, lambda _: None)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        tell(both, MemorySocket(str(server.path), machine_id()))
        yield
        tasks.cancel_scope.cancel()


def lent(boot: str, *segments: LentSegment, fds: list[int], num_segments: int = 1) -> PassingAnswer:
    return PassingAnswer(to_body(MemoryLent(boot, num_segments, segments)), fds)


def another_boot(_: LendMemory, size: int, __: str) -> PassingAnswer:
    return lent("another", LentSegment(0, "kv", size), fds=[memory_file(size)])


def too_small(_: LendMemory, size: int, boot: str) -> PassingAnswer:
    return lent(boot, LentSegment(0, "kv", size - 4096), fds=[memory_file(size - 4096)])


def smaller_than_said(_: LendMemory, size: int, boot: str) -> PassingAnswer:
    return lent(boot, LentSegment(0, "kv", size), fds=[memory_file(size - 4096)])


def no_memory(_: LendMemory, size: int, boot: str) -> PassingAnswer:
    return lent(boot, LentSegment(0, "kv", size), fds=[os.open(__file__, os.O_RDONLY)])


def no_descriptor(_: LendMemory, size: int, boot: str) -> PassingAnswer:
    return lent(boot, LentSegment(0, "kv", size), fds=[])


def a_descriptor_too_many(_: LendMemory, size: int, boot: str) -> PassingAnswer:
    fds = [memory_file(size), memory_file(size)]
    return lent(boot, LentSegment(0, "kv", size), fds=fds)


def nothing(_: LendMemory, __: int, boot: str) -> PassingAnswer:
    return lent(boot, fds=[])


def unnamed(_: LendMemory, size: int, boot: str) -> PassingAnswer:
    return lent(boot, LentSegment(0, "other", size), fds=[memory_file(size)])


def unnamed_rank(_: LendMemory, size: int, boot: str) -> PassingAnswer:
    return lent(boot, LentSegment(1, "kv", size), fds=[memory_file(size)])


def twice(_: LendMemory, size: int, boot: str) -> PassingAnswer:
    one = LentSegment(0, "kv", size)
    return lent(boot, one, one, fds=[memory_file(size), memory_file(size)])


def refused(_: LendMemory, __: int, ___: str) -> PassingAnswer:
    raise LocalError("not for you")


def no_answer(_: LendMemory, __: int, ___: str) -> PassingAnswer:
    return PassingAnswer({"x": 1}, [])


LIES = {
    another_boot: "another agent listens",
    too_small: "the handshake says",
    smaller_than_said: "were claimed",
    no_memory: "not a memory file",
    no_descriptor: "came with 0 descriptors",
    a_descriptor_too_many: "came with 2 descriptors",
    nothing: "came with 0 descriptors",
    unnamed: "names no segment 'other'",
    unnamed_rank: "of rank 1",
    twice: "lent twice",
    refused: "not for you",
    no_answer: "agent_boot",
}


@pytest.mark.parametrize(
    ("lie", "reason"), LIES.items(), ids=lambda one: getattr(one, "__name__", "")
)
async def test_what_is_not_as_the_handshake_said_is_not_mapped(
    both: Neighbours, folder: Path, lie: Lie, reason: str
) -> None:
    before = num_mappings(), num_open_fds("hostile")
    async with both.engines() as (source, target), liar(both, folder, source, lie):
        assert await works(source, target)

        assert both.mapped == [None]
        assert reason in both.state
        assert (num_mappings(), num_open_fds("hostile")) == before


def num_mappings() -> int:
    """Of files that the liar made."""
    return Path("/proc/self/maps").read_text().count("memfd:hostile")


def num_open_fds(name: str) -> int:
    """Of files with that name."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            names.append(str(fd.readlink()))
    return sum(name in one for one in names)


async def test_who_hangs_up_or_never_answers_is_not_waited_for_long(
    both: Neighbours, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_decode.peer.borrowing.MAP_WITHIN_S", 0.2)
    (folder / "h").mkdir(mode=0o700)

    async def never(*_: Any) -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    server = AttachServer(folder / "h" / "memory.sock", never, lambda _: None)
    async with both.engines() as (source, target), anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        tell(both, MemorySocket(str(server.path), machine_id()))
        assert await works(source, target)
        assert "in time" in both.state
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("{}/none/memory.sock", "cannot see"),
        ("{}/p/memory.sock", "no agent at"),
        ("{}/p/run/attach.sock", "not the path of a memory socket"),
        ("p/run/memory.sock", "not the path of a memory socket"),
        ("{}/\0/memory.sock", "null"),
        ("/proc/self/../../memory.sock", "must not enter"),
        ("/" + "x" * 200 + "/memory.sock", "x"),
        ("", "not the path of a memory socket"),
    ],
)
async def test_a_path_that_leads_to_no_agent_is_not_followed(
    both: Neighbours, folder: Path, path: str, reason: str
) -> None:
    tell(both, MemorySocket(path.replace("{}", str(folder)), machine_id()))
    async with both.engines() as (source, target):
        assert await works(source, target)

        assert both.mapped == [None]
        assert reason in both.state


async def test_the_same_path_on_another_machine_is_not_followed(both: Neighbours) -> None:
    tell(both, MemorySocket(str(both.prefill.config.memory_path), "another boot id"))
    async with both.engines() as (source, target):
        assert await works(source, target)

        assert both.mapped == [None]
        assert both.state == "the prefill agent is on another machine"


async def test_an_agent_that_knows_no_memory_socket_is_read_with_nixl(both: Neighbours) -> None:
    both.lender.socket_for = lambda _: None  # type: ignore[method-assign,assignment,return-value]  # an older one
    async with both.engines() as (source, target):
        assert await works(source, target)

        assert both.mapped == [None]
        assert "version" in both.state


async def test_why_it_is_closed_is_said_once_however_many_handshakes_there_are(
    both: Neighbours,
) -> None:
    tell(both, MemorySocket(closed="no"))
    async with both.engines() as (source, target):
        with capture_logs() as logs:
            for _ in range(3):
                assert await works(source, target)
                both.forget_routes()

    said = [line for line in logs if line["event"] == "mapped.closed"]
    assert [line["reason"] for line in said] == ["no"]
    assert sum(line["event"] == "handshake.done" for line in logs) == 6


async def test_who_speaks_unasked_is_as_good_as_gone(both: Neighbours, folder: Path) -> None:
    readers: list[AttachConnection] = []

    async def answer(
        reader: AttachConnection, message: dict[str, Any], _fds: list[int]
    ) -> PassingAnswer:
        readers.append(reader)
        del message
        content = source.memories()[0].numpy().tobytes()
        fd = memory_file(len(content))
        os.pwrite(fd, content, 0)
        return lent(both.prefill.boot, LentSegment(0, "kv", len(content)), fds=[fd])

    (folder / "h").mkdir(mode=0o700)
    server = AttachServer(folder / "h" / "memory.sock", answer, lambda _: None)
    async with both.engines() as (source, target), anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        tell(both, MemorySocket(str(server.path), machine_id()))
        assert await works(source, target)
        memory = both.the_memory()
        assert memory.is_open

        await readers[0].send(wire.encode_frame({"ok": {}}))
        await until(lambda: not memory.is_open)
        tasks.cancel_scope.cancel()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_who_listens_as_another_user_is_told_nothing(both: Neighbours, folder: Path) -> None:
    (folder / "h").mkdir(mode=0o700)
    path = folder / "h" / "memory.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        os.seteuid(NOBODY)
        listener.listen()  # the kernel remembers who does this
        os.seteuid(0)
        tell(both, MemorySocket(str(path), machine_id()))
        async with both.engines() as (source, target):
            assert await works(source, target)
            assert f"of uid {NOBODY}" in both.state

            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(1) == b""


async def test_a_folder_that_others_may_enter_is_no_agents(both: Neighbours, folder: Path) -> None:
    path = both.prefill.config.memory_path
    async with both.engines() as (source, target):
        path.parent.chmod(0o755)
        try:
            assert await works(source, target)
        finally:
            path.parent.chmod(0o700)

        assert both.mapped == [None]
        assert "others must not enter" in both.state
