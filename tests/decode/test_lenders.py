"""What a decode agent does not map: then it reads with NIXL, byte for byte, and says why once."""

import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvbus.agent.identity import machine_id
from kvbus.errors import LocalError
from kvbus.memory.attach import AttachConnection, AttachServer, PassingAnswer, encode_frame
from kvbus.protocol import LentSegment, MemoryLent, MemorySocket, to_body
from tests.agents import until
from tests.decode.neighbours import Neighbours, neighbours
from tests.engines import works
from tests.examples import num_examples

pytestmark = pytest.mark.anyio
NOBODY = 65534
PAGE = 4096


@pytest.fixture
async def both(folder: Path) -> AsyncIterator[Neighbours]:
    (folder / "h").mkdir(mode=0o700)
    async with neighbours(folder) as started:
        yield started


def tell(both: Neighbours, socket: MemorySocket | None) -> None:
    """Have the prefill agent's handshakes name another socket, or none as an older agent."""
    both.lender.socket_for = lambda _: socket  # type: ignore[method-assign,assignment,return-value]  # hostile


def file_of(size_bytes: int | None) -> int:
    """Memory; what is none when it has no size."""
    if size_bytes is None:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.memfd_create("hostile")
    os.ftruncate(fd, size_bytes)
    return fd


def held() -> tuple[int, int]:
    """How often what is hostile is mapped here, and how many files are open."""
    files = list(Path("/proc/self/fd").iterdir())
    return Path("/proc/self/maps").read_text().count("memfd:hostile"), len(files)


@asynccontextmanager
async def lender(both: Neighbours, folder: Path, answer: Any) -> AsyncIterator[None]:
    """A memory socket that answers what it likes, and that the handshake names."""
    server = AttachServer(folder / "h" / "memory.sock", answer, lambda _: None)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        tell(both, MemorySocket(str(server.path), machine_id()))
        yield
        tasks.cancel_scope.cancel()


@dataclass(frozen=True)
class Lie:
    """Segments by rank, name and bytes more than the handshake says; and files, as large or not."""

    reason: str
    boot: str = ""
    segments: tuple[tuple[int, str, int], ...] = ((0, "kv", 0),)
    files: tuple[int | None, ...] = (0,)

    def answer(self, boot: str, size_bytes: int) -> PassingAnswer:
        sizes = [None if more is None else size_bytes + more for more in self.files]
        lent = [LentSegment(rank, name, size_bytes + more) for rank, name, more in self.segments]
        return PassingAnswer(
            to_body(MemoryLent(self.boot or boot, tuple(lent))),
            [file_of(size) for size in sizes],
        )


def refuse(*_: Any) -> PassingAnswer:
    raise LocalError("not for you")


LIES: dict[str, Lie | tuple[Any, str]] = {
    "another boot": Lie("another agent listens", boot="another"),
    "too small": Lie("the handshake says", segments=((0, "kv", -PAGE),), files=(-PAGE,)),
    "smaller than said": Lie("were claimed", files=(-PAGE,)),
    "no memory": Lie("not a memory file", files=(None,)),
    "no descriptor": Lie("came with 0 descriptors", files=()),
    "a descriptor too many": Lie("came with 2 descriptors", files=(0, 0)),
    "nothing": Lie("came with 0 descriptors", segments=(), files=()),
    "another segment": Lie("names no segment 'other'", segments=((0, "other", 0),)),
    "another rank": Lie("of rank 1", segments=((1, "kv", 0),)),
    "twice": Lie("lent twice", segments=((0, "kv", 0), (0, "kv", 0)), files=(0, 0)),
    "refused": (refuse, "not for you"),
    "no answer": (lambda *_: PassingAnswer({"x": 1}, []), "agent_boot"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_what_is_not_as_the_handshake_said_is_not_mapped(
    both: Neighbours, folder: Path, lie: Lie | tuple[Any, str]
) -> None:
    say, reason = (lie.answer, lie.reason) if isinstance(lie, Lie) else lie
    async with both.engines() as (source, target):
        (segment,) = source.caches[0].rank.segments

        async def answer(*_: Any) -> PassingAnswer:
            passing: PassingAnswer = say(both.prefill.boot, segment.size_bytes)
            return passing

        async with lender(both, folder, answer):
            assert await works(source, target)
            is_mapped = held()[0]

        assert (both.mapped, is_mapped) == ([None], 0)
        assert reason in both.state


class RawLender:
    """Answers each who connects with the next of ``scripts``: chunks, each with files."""

    def __init__(self, path: Path, scripts: "list[Script]") -> None:
        self.scripts, self._listener = scripts, socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for script in self.scripts:
            connected, _ = self._listener.accept()
            with connected, suppress(OSError):  # the other side has had enough
                connected.recv(1 << 16)
                for chunk, sizes in script:
                    fds = [file_of(size) for size in sizes]
                    try:
                        socket.send_fds(connected, [chunk], fds)
                    finally:
                        for fd in fds:
                            os.close(fd)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


Script = list[tuple[bytes, list[int | None]]]
SEGMENTS = st.builds(
    LentSegment,
    rank=st.integers(0, 3),
    segment_id=st.sampled_from(["kv", "x"]),
    size_bytes=st.sampled_from([1, PAGE, 1 << 50]),
)
ANSWERS = st.builds(
    MemoryLent,
    agent_boot=st.sampled_from(["boot", "another"]),
    segments=st.lists(SEGMENTS, max_size=3).map(tuple),
).map(lambda lent: encode_frame({"ok": to_body(lent)}))
CHUNKS = (
    st.binary(min_size=1, max_size=60)
    | st.binary(max_size=40).map(lambda body: len(body).to_bytes(4, "little") + body)
    | st.dictionaries(st.sampled_from(["ok", "error", "x"]), st.integers(0, 9)).map(encode_frame)
    | ANSWERS
)
FILES = st.lists(st.sampled_from([0, PAGE, None]), max_size=3)


async def test_no_bytes_whatever_of_a_lender_do_more_than_to_be_refused(
    both: Neighbours, folder: Path
) -> None:
    scripts: list[Script] = []

    @settings(max_examples=num_examples(40), suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(CHUNKS, FILES), max_size=3))
    def draw(script: Script) -> None:
        scripts.append(script)

    draw()
    path = folder / "h" / "memory.sock"
    async with both.engines() as (source, target):
        tell(both, None)
        assert await works(source, target)
        both.forget_routes()
        before = held()
        raw = RawLender(path, scripts)
        tell(both, MemorySocket(str(path), machine_id()))
        for script in scripts:
            assert await works(source, target), script
            assert both.mapped == [None], script
            both.forget_routes()
        raw.close()

        await until(lambda: held() == before)


HERE = "this machine"
FOLLOWED_NOWHERE: dict[str, tuple[MemorySocket | None, str]] = {
    "a folder that is not there": (MemorySocket("{}/none/memory.sock", HERE), "cannot see"),
    "a folder without one": (MemorySocket("{}/p/memory.sock", HERE), "no agent at"),
    "another socket": (MemorySocket("{}/p/run/attach.sock", HERE), "not the path of a memory"),
    "a path with a null": (MemorySocket("{}/\0/memory.sock", HERE), "null"),
    "a folder of others": (MemorySocket("/proc/self/../../memory.sock", HERE), "must not enter"),
    "a long path": (MemorySocket("/" + "x" * 200 + "/memory.sock", HERE), "x"),
    "no path": (MemorySocket("", HERE), "not the path of a memory socket"),
    "another machine": (MemorySocket("{}/p/run/memory.sock", "another"), "on another machine"),
    "a machine that is not told": (MemorySocket("{}/p/run/memory.sock"), "on another machine"),
    "a version that knows none": (None, "version"),
    "what is closed": (MemorySocket(closed="no"), "no"),
}


@pytest.mark.parametrize(("told", "reason"), FOLLOWED_NOWHERE.values(), ids=FOLLOWED_NOWHERE)
async def test_a_path_that_leads_to_no_agent_is_not_followed_and_why_is_said_once(
    both: Neighbours, folder: Path, told: MemorySocket | None, reason: str
) -> None:
    is_here = told is not None and told.machine == HERE
    if told is not None:
        machine = machine_id() if is_here else told.machine
        told = MemorySocket(told.path.replace("{}", str(folder)), machine, told.closed)
    tell(both, told)
    async with both.engines() as (source, target):
        with capture_logs() as logs:
            for _ in range(2):
                assert await works(source, target)
                mapped, state = both.mapped, both.state
                both.forget_routes()

        assert mapped == [None]
        assert reason in state
    said = [line["reason"] for line in logs if line["event"] == "mapped.closed"]
    assert said == [state]
    assert sum(line["event"] == "handshake.done" for line in logs) >= 4


async def test_an_agent_that_cannot_have_its_memory_socket_lends_nothing_and_works(
    folder: Path,
) -> None:
    (folder / "r" / "memory.sock").mkdir(parents=True)
    (folder / "r").chmod(0o700)
    async with (
        neighbours(folder, prefill={"runtime_dir": f"{folder}/r"}) as both,
        both.engines() as (source, target),
    ):
        assert await works(source, target)

        assert both.mapped == [None]
        assert "not a socket" in both.state


async def test_who_hangs_up_or_never_answers_is_not_waited_for_long(
    both: Neighbours, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_decode.mapped.MAP_WITHIN_S", 0.2)

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
        passing = Lie("").answer(both.prefill.boot, len(content))
        os.pwrite(passing.fds[0], content, 0)
        return passing

    async with both.engines() as (source, target), lender(both, folder, answer):
        assert await works(source, target)
        memory = both.the_memory()
        assert not memory.closed

        await readers[0].send(encode_frame({"ok": {}}))
        await until(lambda: memory.closed)


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
    path = both.prefill.memory_socket
    async with both.engines() as (source, target):
        path.parent.chmod(0o755)
        try:
            assert await works(source, target)
        finally:
            path.parent.chmod(0o700)

        assert both.mapped == [None]
        assert "others must not enter" in both.state
