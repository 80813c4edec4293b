"""A decode agent maps no memory of a lender that lies, and logs the reason once.

Then it reads with NIXL; see the last test, and `tests/process/handoffs/test_processes.py`.
"""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from kvbus import protocol
from kvbus.agent.config import convert_config
from kvbus.bus import new_boot_id
from kvbus.data.child import spawner
from kvbus.data.client import DataProcess
from kvbus.data.messages import HOST
from kvbus.errors import LocalError
from kvbus.geometry import lay_out_rank
from kvbus.memory.attach import AttachConnection, AttachServer, PassingAnswer, encode_frame
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol import LentSegment, MemoryLent, MemorySocket, to_body
from kvbus_decode.config import DecodeConfig
from kvbus_decode.mapped import MappedMemory, MemoryBorrower
from kvbus_decode.remote_agent import RemoteAgent
from tests.support.agents import WITHIN_S, until
from tests.support.engines import make_spec, works
from tests.support.examples import num_examples
from tests.support.inside_agents import BINDS
from tests.support.memories import NHD
from tests.unit.decode.neighbours import neighbours
from tests.unit.vectors.golden import example

pytestmark = pytest.mark.anyio
NOBODY = 65534
PAGE = 4096
BOOT = "boot"
SPEC = make_spec()
RANK = lay_out_rank(SPEC, 0, NHD, num_blocks=4)
SIZE_BYTES = RANK.segments[0].size_bytes
SHAKEN = replace(example(protocol.HandshakeDone), memory=protocol.EngineMemory(SPEC, (RANK,)))


@dataclass
class Borrowing:
    """A decode agent as far as it borrows memory, and a folder for lenders of it."""

    borrower: MemoryBorrower
    lender: RemoteAgent
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "memory.sock"

    @property
    def machine(self) -> str:
        return self.borrower.sharing().machine

    async def borrow(self, told: MemorySocket) -> MappedMemory | str:
        done, engine = replace(SHAKEN, memory_socket=told), SimpleNamespace(devices={HOST})
        taker: Any = engine
        return await self.borrower.borrow(self.lender, done, taker, within_s=WITHIN_S)

    async def borrow_here(self) -> MappedMemory | str:
        return await self.borrow(MemorySocket(str(self.path), self.machine))


@pytest.fixture
async def here(folder: Path) -> AsyncIterator[Borrowing]:
    config = convert_config(DecodeConfig, {"agent_id": "decode", **BINDS}, source="the test")
    loop = asyncio.get_running_loop()
    data = DataProcess(
        spawner(loop), new_boot=new_boot_id, name="decode", slice_bytes=PAGE, copy_threads=1
    )
    data.start_one()
    async with anyio.create_task_group() as tasks:
        agent: Any = SimpleNamespace(tasks=tasks, loop=loop, bus_errors=BusErrors(), data=data)
        peer: Any = None
        lender = RemoteAgent(peer)
        lender.boot = BOOT
        yield Borrowing(MemoryBorrower(agent, config), lender, folder)
        tasks.cancel_scope.cancel()
    await data.close()


def file_of(size_bytes: int | None) -> int:
    """A memory file, or no memory without a size."""
    if size_bytes is None:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.memfd_create("hostile")
    os.ftruncate(fd, size_bytes)
    return fd


def held() -> list[str]:
    """Maps of what lenders passed, and open files of it."""
    passed = os.devnull, "memfd:hostile"
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [link_of(file) for file in Path("/proc/self/fd").iterdir()]
    return [line for line in [*maps, *files] if any(one in line for one in passed)]


def link_of(file: Path) -> str:
    try:
        return str(file.readlink())
    except FileNotFoundError:  # that of the listing
        return ""


@asynccontextmanager
async def lender(here: Borrowing, answer: Callable[..., Awaitable[Any]]) -> AsyncIterator[None]:
    server = AttachServer(here.path, answer, lambda _: None)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        yield
        tasks.cancel_scope.cancel()


@dataclass(frozen=True)
class Lie:
    """Segments by rank, name and bytes more than the handshake says; and files, as large or not."""

    reason: str
    boot: str = BOOT
    segments: tuple[tuple[int, str, int], ...] = ((0, "kv", 0),)
    files: tuple[int | None, ...] = (0,)

    def answer(self) -> PassingAnswer:
        sizes = [None if more is None else SIZE_BYTES + more for more in self.files]
        lent = [LentSegment(rank, name, SIZE_BYTES + more) for rank, name, more in self.segments]
        return PassingAnswer(
            to_body(MemoryLent(self.boot, tuple(lent))), [file_of(size) for size in sizes]
        )


def refuse() -> PassingAnswer:
    raise LocalError("not for you")


LIES: dict[str, Lie | tuple[Any, str]] = {
    "another boot": Lie("another agent listens", boot="another"),
    "too small": Lie("the handshake requires", segments=((0, "kv", -PAGE),), files=(-PAGE,)),
    "smaller than said": Lie("were claimed", files=(-PAGE,)),
    "no memory": Lie("not a memory file", files=(None,)),
    "no descriptor": Lie("came with 0 descriptors", files=()),
    "a descriptor too many": Lie("came with 2 descriptors", files=(0, 0)),
    "nothing": Lie("came with 0 descriptors", segments=(), files=()),
    "another segment": Lie("names no segment 'other'", segments=((0, "other", 0),)),
    "another rank": Lie("of rank 1", segments=((1, "kv", 0),)),
    "twice": Lie("lent twice", segments=((0, "kv", 0), (0, "kv", 0)), files=(0, 0)),
    "refused": (refuse, "not for you"),
    "no answer": (lambda: PassingAnswer({"x": 1}, []), "agent_boot"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_lies_of_a_lender_are_not_mapped(here: Borrowing, lie: Lie | tuple[Any, str]) -> None:
    say, reason = (lie.answer, lie.reason) if isinstance(lie, Lie) else lie
    before = held()

    async def answer(*_: Any) -> PassingAnswer:
        passing: PassingAnswer = say()
        return passing

    async with lender(here, answer):
        closed = await here.borrow_here()
    assert reason in str(closed)
    await until(lambda: held() == before)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(b"", "hung up"), (encode_frame({"x": 1}), "neither 'ok' nor"), (b"\xff" * 4, "exceeds")],
)
async def test_raw_answers_are_refused(here: Borrowing, answer: bytes, reason: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, here.path):
        assert reason in str(await here.borrow_here())


Script = list[tuple[bytes, list[int | None]]]
SEGMENTS = st.builds(
    LentSegment,
    st.integers(0, 3),
    st.sampled_from(["kv", "x"]),
    st.sampled_from([1, PAGE, 1 << 50]),
)
ANSWERS = st.builds(MemoryLent, st.sampled_from([BOOT, "another"]), st.tuples(SEGMENTS))
CHUNKS = (
    st.binary(min_size=1, max_size=60)
    | st.binary(max_size=40).map(lambda body: len(body).to_bytes(4, "little") + body)
    | st.dictionaries(st.sampled_from(["ok", "error", "x"]), st.integers(0, 9)).map(encode_frame)
    | ANSWERS.map(lambda lent: encode_frame({"ok": to_body(lent)}))
)
FILES = st.lists(st.sampled_from([0, PAGE, None]), max_size=3)


def lend_to_each(listener: socket.socket, scripts: list[Script]) -> None:
    for script in scripts:
        connected, _ = listener.accept()
        with connected, suppress(OSError):  # the borrower has hung up
            connected.recv(1 << 16)
            for chunk, sizes in script:
                fds = [file_of(size) for size in sizes]
                try:
                    socket.send_fds(connected, [chunk], fds)
                finally:
                    for fd in fds:
                        os.close(fd)


async def test_arbitrary_bytes_of_lender_are_only_refused(here: Borrowing) -> None:
    scripts: list[Script] = []

    @settings(max_examples=num_examples(1000), suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(CHUNKS, FILES), max_size=3))
    def draw(script: Script) -> None:
        scripts.append(script)

    draw()
    before = held()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(here.path))
        listener.listen()
        thread = threading.Thread(target=lend_to_each, args=(listener, scripts), daemon=True)
        thread.start()
        for script in scripts:
            assert isinstance(await here.borrow_here(), str), script
        thread.join()
    await until(lambda: held() == before)


HERE = "this machine"
FOLLOWED_NOWHERE: dict[str, tuple[MemorySocket, str]] = {
    "a folder that is not there": (MemorySocket("{}/none/memory.sock", HERE), "cannot see"),
    "a folder without one": (MemorySocket("{}/memory.sock", HERE), "no agent at"),
    "another socket": (MemorySocket("{}/attach.sock", HERE), "not the path of a memory"),
    "a path with a null": (MemorySocket("{}/\0/memory.sock", HERE), "null"),
    "a folder of others": (MemorySocket("/proc/self/../../memory.sock", HERE), "must not enter"),
    "a long path": (MemorySocket("/" + "x" * 200 + "/memory.sock", HERE), "x"),
    "no path": (MemorySocket("", HERE), "not the path of a memory socket"),
    "another machine": (MemorySocket("{}/memory.sock", "another"), "on another machine"),
    "no machine": (MemorySocket("{}/memory.sock"), "on another machine"),
    "what is closed": (MemorySocket(closed="no"), "no"),
}


@pytest.mark.parametrize(("told", "reason"), FOLLOWED_NOWHERE.values(), ids=FOLLOWED_NOWHERE)
async def test_wrong_path_is_logged_once(here: Borrowing, told: MemorySocket, reason: str) -> None:
    machine = here.machine if told.machine == HERE else told.machine
    told = MemorySocket(told.path.replace("{}", str(here.folder)), machine, told.closed)
    with capture_logs() as logs:
        closed = [await here.borrow(told) for _ in range(2)]
    assert reason in str(closed[0])
    said = [line["reason"] for line in logs if line["event"] == "mapped.closed"]
    assert said == closed[:1] == closed[1:] == [*here.borrower.states.values()]


async def test_silent_lender_times_out(here: Borrowing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus_decode.mapped.MAP_WITHIN_S", 0.2)
    async with lender(here, lambda *_: anyio.sleep_forever()):
        assert "in time" in str(await here.borrow_here())


async def test_who_speaks_unasked_is_as_good_as_gone(here: Borrowing) -> None:
    readers: list[AttachConnection] = []

    async def answer(reader: AttachConnection, *_: Any) -> PassingAnswer:
        readers.append(reader)
        return Lie("").answer()

    async with lender(here, answer):
        memory = await here.borrow_here()
        assert isinstance(memory, MappedMemory)
        assert not memory.closed
        await readers[0].send(encode_frame({"ok": {}}))
        await until(lambda: memory.closed)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_who_listens_as_another_user_is_told_nothing(here: Borrowing) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(str(here.path))
        os.seteuid(NOBODY)
        try:
            listener.listen()  # the kernel remembers who does this
        finally:
            os.seteuid(0)
        assert f"has uid {NOBODY}" in str(await here.borrow_here())
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(1) == b""


async def test_agent_without_memory_socket_lends_nothing_and_works(folder: Path) -> None:
    (folder / "r" / "memory.sock").mkdir(parents=True)
    (folder / "r").chmod(0o700)
    async with (
        neighbours(folder, prefill={"runtime_dir": f"{folder}/r"}) as both,
        both.engines() as (source, target),
    ):
        assert await works(source, target)
        assert both.mapped == [None]
        assert "not a socket" in both.state
