"""The memory socket: who gets an engine's memory, what of it, and who is refused."""

import fcntl
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus.agent import machine_id
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.memory.attach import (
    FrameChannel,
    close_fds,
    connect_to_agent,
    decode_body,
    encode_frame,
    open_reply,
)
from kvbus.protocol import LendMemory, MemoryLent, from_body, to_body
from kvbus_prefill.agent import PrefillService
from kvbus_prefill.lending import MemoryLender
from tests.agents import until
from tests.engines import Engine, make_spec
from tests.examples import num_examples
from tests.prefill.inside import WITHIN_S, PrefillAgent, prefill_agent

pytestmark = pytest.mark.anyio
NOBODY = 65534
STRANGER = """
import os, socket, sys
os.setgid({0}); os.setuid({0})
with socket.socket(socket.AF_UNIX) as connected:
    connected.connect(sys.argv[1])
    words = b""
    while chunk := connected.recv(65536):
        words += chunk
sys.stdout.buffer.write(words)
"""


def lender(agent: PrefillAgent) -> MemoryLender:
    service = agent.runtime.service
    assert isinstance(service, PrefillService)
    return service.lender


@asynccontextmanager
async def connected(agent: PrefillAgent) -> AsyncIterator[FrameChannel]:
    """A connection to the memory socket."""
    await until(agent.config.memory_path.exists)
    channel = FrameChannel(connect_to_agent(agent.config.memory_path))
    try:
        yield channel
    finally:
        channel.close()


def question(agent: PrefillAgent, source: Engine, **changes: Any) -> dict[str, Any]:
    """What a reader that has shaken hands may ask."""
    local = agent.local(source)
    lend = LendMemory(agent.boot, local.engine_id, local.memory_id, local.access)
    return {"op": "lend", "body": {**to_body(lend), **changes}}


async def ask(channel: FrameChannel, message: dict[str, Any]) -> tuple[MemoryLent, list[int]]:
    """The answer, and the descriptors that came with it; raises `RequestRefused`."""
    await channel.send(encode_frame(message))
    body, fds = await channel.receive()
    return from_body(MemoryLent, open_reply(decode_body(body))), fds


async def refusal(channel: FrameChannel, message: dict[str, Any]) -> ErrorCode:
    with pytest.raises(RequestRefused) as refused:
        await ask(channel, message)
    return refused.value.code


async def test_who_has_the_right_gets_every_segment_for_reading_only(agent: PrefillAgent) -> None:
    async with agent.engine(make_spec(tp=2)) as source, connected(agent) as channel:
        lent, fds = await ask(channel, question(agent, source))

        assert lent.agent_boot == agent.boot
        assert lent.num_segments == len(fds) == 2
        assert [(one.rank, one.segment_id) for one in lent.segments] == [(0, "kv"), (1, "kv")]
        for fd, segment, theirs in zip(fds, lent.segments, source.memories().values(), strict=True):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            assert os.fstat(fd).st_size == segment.size_bytes
            assert os.pread(fd, theirs.numel(), 0) == theirs.numpy().tobytes()
        close_fds(fds)
        assert lender(agent).num_readers == 1
    assert lender(agent).num_readers == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"access": "x" * 32}, ErrorCode.FORBIDDEN),
        ({"agent_boot": "another"}, ErrorCode.STALE),
        ({"memory_id": "another"}, ErrorCode.STALE),
        ({"engine_id": "another"}, ErrorCode.ENGINE_UNKNOWN),
        ({"access": None}, ErrorCode.INVALID),
        ({"first": -1}, ErrorCode.INVALID),
    ],
)
async def test_who_shows_something_else_gets_nothing_and_may_ask_again(
    agent: PrefillAgent, changes: dict[str, Any], code: ErrorCode
) -> None:
    async with agent.engine() as source, connected(agent) as channel:
        assert await refusal(channel, question(agent, source, **changes)) is code
        assert lender(agent).num_readers == 0

        _, fds = await ask(channel, question(agent, source))
        close_fds(fds)


async def test_another_operation_is_refused(agent: PrefillAgent) -> None:
    async with connected(agent) as channel:
        assert await refusal(channel, {"op": "hello", "body": {}}) is ErrorCode.UNKNOWN_OP
        assert await refusal(channel, {"op": "lend", "body": 1}) is ErrorCode.UNKNOWN_OP


async def test_one_connection_is_for_one_engine(agent: PrefillAgent) -> None:
    async with agent.engine() as one, agent.engine() as other, connected(agent) as channel:
        _, fds = await ask(channel, question(agent, one))
        close_fds(fds)

        assert await refusal(channel, question(agent, other)) is ErrorCode.STALE


async def test_the_end_of_the_engine_ends_the_connections_of_its_readers_and_of_no_others(
    agent: PrefillAgent,
) -> None:
    async with (
        agent.engine() as stays,
        connected(agent) as other,
        connected(agent) as channel,
    ):
        async with agent.engine() as source:
            for reader, engine in ((channel, source), (other, stays)):
                _, fds = await ask(reader, question(agent, engine))
                close_fds(fds)

        with pytest.raises(anyio.EndOfStream), anyio.fail_after(WITHIN_S):
            await channel.receive()
        await until(lambda: lender(agent).num_readers == 1)
        _, fds = await ask(other, question(agent, stays))
        close_fds(fds)


async def test_behind_the_last_segment_there_are_none(
    agent: PrefillAgent,
) -> None:
    async with agent.engine(make_spec(tp=1)) as source, connected(agent) as channel:
        lent, fds = await ask(channel, question(agent, source, first=1))

        assert (lent.num_segments, lent.segments, fds) == (1, (), [])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_although_the_file_modes_would_let_it_in(
    agent: PrefillAgent,
) -> None:
    path = agent.config.memory_path
    await until(path.exists)
    for folder in (path.parent, path.parent.parent):
        folder.chmod(0o755)
    path.chmod(0o666)

    script = STRANGER.format(NOBODY)
    result = await anyio.run_process([sys.executable, "-c", script, str(path)])

    words = msgpack.unpackb(result.stdout[4:])
    assert words["error"]["detail"] == {"uid": NOBODY}
    path.parent.chmod(0o700)


async def test_nothing_is_told_of_a_socket_that_the_config_closes(folder: Path) -> None:
    async with prefill_agent(folder, mapped=False) as agent, agent.engine() as source:
        told = lender(agent).socket_for(agent.local(source))

        assert told.path == ""
        assert "mapped = false" in told.closed
        assert not agent.config.memory_path.exists()
        (process,) = {each for each in agent.local(source).processes if each.segments.mappings}
        mappings = process.segments.mappings.values()
        assert all(getattr(one, "lent_fd", None) is None for one in mappings)


async def test_a_socket_that_cannot_be_had_closes_lending_and_nothing_else(folder: Path) -> None:
    run = folder / "run"
    run.mkdir(mode=0o700)
    (run / "memory.sock").mkdir()
    async with prefill_agent(folder) as agent, agent.engine() as source:
        await until(lambda: "not a socket" in lender(agent).socket_for(agent.local(source)).closed)


async def test_what_is_told_is_the_path_and_the_kernel_that_it_is_a_path_of(
    agent: PrefillAgent,
) -> None:
    async with agent.engine() as source:
        await until(lambda: not lender(agent).socket_for(agent.local(source)).closed)
        told = lender(agent).socket_for(agent.local(source))

    assert told.path == str(agent.config.memory_path)
    assert told.machine == machine_id() != ""


CHUNKS = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.dictionaries(
            st.sampled_from(["op", "body", "x"]),
            st.one_of(
                st.just("lend"), st.integers(0, 9), st.dictionaries(st.text(max_size=3), st.none())
            ),
        ).map(encode_frame),
    ),
    max_size=6,
)


@pytest.fixture
def num_open_fds() -> Callable[[], int]:
    return lambda: len(list(Path("/proc/self/fd").iterdir()))


async def test_no_bytes_whatever_stop_the_socket_or_leak_a_descriptor(
    agent: PrefillAgent, num_open_fds: Callable[[], int]
) -> None:
    drawn: list[list[bytes]] = []

    @settings(max_examples=num_examples(150), suppress_health_check=list(HealthCheck))
    @given(CHUNKS)
    def draw(chunks: list[bytes]) -> None:
        drawn.append(chunks)

    draw()
    async with agent.engine() as source:
        before = num_open_fds()
        for chunks in drawn:
            async with connected(agent) as channel:
                for chunk in chunks:
                    if chunk:
                        await channel.send(chunk)
        async with connected(agent) as channel:
            _, fds = await ask(channel, question(agent, source))
            close_fds(fds)

        await until(lambda: num_open_fds() == before)
