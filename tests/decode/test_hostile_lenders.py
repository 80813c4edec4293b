"""What a decode agent does not map: then it reads with NIXL, byte for byte, and says why once."""

import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from kvbus.agent import machine_id
from kvbus.errors import LocalError
from kvbus.memory.attach import AttachConnection, AttachServer, PassingAnswer, encode_frame
from kvbus.protocol import LentSegment, MemoryLent, MemorySocket, to_body
from tests.agents import until
from tests.decode.neighbours import Neighbours, neighbours
from tests.engines import works

pytestmark = pytest.mark.anyio
NOBODY = 65534


@pytest.fixture
async def both(folder: Path) -> AsyncIterator[Neighbours]:
    (folder / "h").mkdir(mode=0o700)
    async with neighbours(folder) as started:
        yield started


def tell(both: Neighbours, socket: MemorySocket | None) -> None:
    """Have the prefill agent's handshakes name another socket, or none as an older agent."""
    both.lender.socket_for = lambda _: socket  # type: ignore[method-assign,assignment,return-value]  # hostile


def memory_file(size_bytes: int) -> int:
    fd = os.memfd_create("hostile")
    os.ftruncate(fd, size_bytes)
    return fd


@asynccontextmanager
async def lender(both: Neighbours, folder: Path, answer: Any) -> AsyncIterator[None]:
    """A memory socket that answers what it likes, and that the handshake names."""
    server = AttachServer(folder / "h" / "memory.sock", answer, lambda _: None)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        tell(both, MemorySocket(str(server.path), machine_id()))
        yield
        tasks.cancel_scope.cancel()


def lent(boot: str, *segments: LentSegment, fds: list[int]) -> PassingAnswer:
    return PassingAnswer(to_body(MemoryLent(boot, 1, segments)), fds)


def refuse(*_: Any) -> PassingAnswer:
    raise LocalError("not for you")


def one(size: int, *, rank: int = 0, name: str = "kv") -> LentSegment:
    return LentSegment(rank, name, size)


Lie = Callable[[int, str], PassingAnswer]
LIES: dict[str, tuple[Lie, str]] = {
    "another boot": (
        lambda size, _: lent("another", one(size), fds=[memory_file(size)]),
        "another agent listens",
    ),
    "too small": (
        lambda size, boot: lent(boot, one(size - 4096), fds=[memory_file(size - 4096)]),
        "the handshake says",
    ),
    "smaller than said": (
        lambda size, boot: lent(boot, one(size), fds=[memory_file(size - 4096)]),
        "were claimed",
    ),
    "no memory": (
        lambda size, boot: lent(boot, one(size), fds=[os.open(__file__, os.O_RDONLY)]),
        "not a memory file",
    ),
    "no descriptor": (
        lambda size, boot: lent(boot, one(size), fds=[]),
        "came with 0 descriptors",
    ),
    "a descriptor too many": (
        lambda size, boot: lent(boot, one(size), fds=[memory_file(size), memory_file(size)]),
        "came with 2 descriptors",
    ),
    "nothing": (lambda _, boot: lent(boot, fds=[]), "came with 0 descriptors"),
    "another segment": (
        lambda size, boot: lent(boot, one(size, name="other"), fds=[memory_file(size)]),
        "names no segment 'other'",
    ),
    "another rank": (
        lambda size, boot: lent(boot, one(size, rank=1), fds=[memory_file(size)]),
        "of rank 1",
    ),
    "twice": (
        lambda size, boot: lent(
            boot, one(size), one(size), fds=[memory_file(size), memory_file(size)]
        ),
        "lent twice",
    ),
    "refused": (refuse, "not for you"),
    "no answer": (lambda *_: PassingAnswer({"x": 1}, []), "agent_boot"),
}


@pytest.mark.parametrize(("lie", "reason"), LIES.values(), ids=LIES)
async def test_what_is_not_as_the_handshake_said_is_not_mapped(
    both: Neighbours, folder: Path, lie: Lie, reason: str
) -> None:
    before = num_mappings(), num_open_fds("hostile")
    async with both.engines() as (source, target):
        (segment,) = source.caches[0].rank.segments

        async def answer(*_: Any) -> PassingAnswer:
            return lie(segment.size_bytes, both.prefill.boot)

        async with lender(both, folder, answer):
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


def socket_at(path: str, machine: str | None = None) -> Callable[[Path], MemorySocket]:
    """The path is below the folder where it begins with {}."""
    return lambda folder: MemorySocket(
        path.replace("{}", str(folder)), machine_id() if machine is None else machine
    )


NOT_FOLLOWED: dict[str, tuple[Callable[[Path], MemorySocket | None], str]] = {
    "a folder that is not there": (socket_at("{}/none/memory.sock"), "cannot see"),
    "a folder without one": (socket_at("{}/p/memory.sock"), "no agent at"),
    "another socket": (socket_at("{}/p/run/attach.sock"), "not the path of a memory socket"),
    "a path from nowhere": (socket_at("p/run/memory.sock"), "not the path of a memory socket"),
    "a path with a null": (socket_at("{}/\0/memory.sock"), "null"),
    "a folder of others": (socket_at("/proc/self/../../memory.sock"), "must not enter"),
    "a long path": (socket_at("/" + "x" * 200 + "/memory.sock"), "x"),
    "no path": (socket_at(""), "not the path of a memory socket"),
    "another machine": (socket_at("{}/p/run/memory.sock", "another"), "is on another machine"),
    "a machine that is not told": (socket_at("{}/p/run/memory.sock", ""), "on another machine"),
    "a version that knows none": (lambda _: None, "version"),
    "what is closed": (lambda _: MemorySocket(closed="no"), "no"),
}


@pytest.mark.parametrize(("told", "reason"), NOT_FOLLOWED.values(), ids=NOT_FOLLOWED)
async def test_a_path_that_leads_to_no_agent_is_not_followed_and_why_is_said_once(
    both: Neighbours,
    folder: Path,
    told: Callable[[Path], MemorySocket | None],
    reason: str,
) -> None:
    tell(both, told(folder))
    async with both.engines() as (source, target):
        with capture_logs() as logs:
            for _ in range(2):
                assert await works(source, target)
                near = [source.near for route in both.routes for source in route.sources]
                mapped, state = both.mapped, both.state
                both.forget_routes()

        assert mapped == [None]
        assert reason in state
        is_here = "machine" not in reason and reason not in {"version", "no"}
        assert near == [is_here]
    said = [line["reason"] for line in logs if line["event"] == "mapped.closed"]
    assert said == [state]
    assert sum(line["event"] == "handshake.done" for line in logs) >= 4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prefill": {"mapped": False}}, "closed by the prefill agent's config (mapped = false)"),
        ({"decode": {"mapped": False}}, "closed by the decode agent's config (mapped = false)"),
        ({"decode": {"path": "direct"}}, "closed by the decode agent's config (path = 'direct')"),
    ],
)
async def test_what_config_closes_is_read_with_nixl_and_says_so(
    folder: Path, settings: dict[str, Any], reason: str
) -> None:
    async with neighbours(folder, **settings) as both, both.engines() as (source, target):
        assert await works(source, target)

        assert both.mapped == [None]
        assert reason in both.state
        assert [source.near for route in both.routes for source in route.sources] == [True]


async def test_who_hangs_up_or_never_answers_is_not_waited_for_long(
    both: Neighbours, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_decode.peer.borrowing.MAP_WITHIN_S", 0.2)

    async def never(*_: Any) -> PassingAnswer:
        await anyio.sleep_forever()
        raise AssertionError

    async with both.engines() as (source, target), lender(both, folder, never):
        assert await works(source, target)
        assert "in time" in both.state


async def test_who_speaks_unasked_is_as_good_as_gone(both: Neighbours, folder: Path) -> None:
    readers: list[AttachConnection] = []

    async def answer(reader: AttachConnection, *_: Any) -> PassingAnswer:
        readers.append(reader)
        content = source.memories()[0].numpy().tobytes()
        fd = memory_file(len(content))
        os.pwrite(fd, content, 0)
        return lent(both.prefill.boot, one(len(content)), fds=[fd])

    async with both.engines() as (source, target), lender(both, folder, answer):
        assert await works(source, target)
        memory = both.the_memory()
        assert memory.is_open

        await readers[0].send(encode_frame({"ok": {}}))
        await until(lambda: not memory.is_open)


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_who_listens_as_another_user_is_told_nothing(both: Neighbours, folder: Path) -> None:
    path = folder / "h" / "memory.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        with as_user(NOBODY):
            listener.listen()  # the kernel remembers who does this
        tell(both, MemorySocket(str(path), machine_id()))
        async with both.engines() as (source, target):
            assert await works(source, target)
            assert f"of uid {NOBODY}" in both.state

            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(1) == b""


async def test_a_folder_that_others_may_enter_is_no_agents(both: Neighbours) -> None:
    path = both.prefill.config.memory_path
    async with both.engines() as (source, target):
        path.parent.chmod(0o755)
        try:
            assert await works(source, target)
        finally:
            path.parent.chmod(0o700)

        assert both.mapped == [None]
        assert "others must not enter" in both.state
