"""An engine process and an agent process over one segment, through life and death."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from kvbus.memory import SegmentMapping

pytestmark = pytest.mark.anyio
SIZE_BYTES = 1 << 20


class Engine:
    """The other process and our mapping of its segment."""

    def __init__(self, process: anyio.abc.Process, name: str) -> None:
        self.process = process
        self.name = name
        self.mappings: list[SegmentMapping] = []
        assert process.stdout is not None
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def answer(self) -> str:
        return (await self._lines.receive_until(b"\n", 1000)).decode()

    async def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        await self.process.stdin.send(line.encode() + b"\n")
        return await self.answer()


@pytest.fixture
def attached(serving: Callable[..., Any], child_command: Callable[..., list[str]]) -> Any:
    @asynccontextmanager
    async def attach() -> AsyncIterator[tuple[Any, Engine]]:
        mappings: list[SegmentMapping] = []

        async def keep(
            connection: object, message: dict[str, Any], fds: list[int]
        ) -> dict[str, Any]:
            mappings.append(SegmentMapping(fds.pop(), size_bytes=message["size_bytes"]))
            return {}

        async with AsyncExitStack() as stack:
            recorded = await stack.enter_async_context(serving(on_message=keep))
            name = f"kvbus-test-{uuid.uuid4().hex}"
            command = child_command("engine", recorded.server.path, name, SIZE_BYTES)
            process = await stack.enter_async_context(
                await anyio.open_process(command, stderr=None)
            )
            engine = Engine(process, name)
            assert await engine.answer() == "attached"
            engine.mappings = mappings
            stack.callback(mappings[0].unmap)
            yield recorded, engine
            if process.returncode is None:
                process.kill()

    return attach


async def test_each_process_sees_what_the_other_writes(attached: Any) -> None:
    async with attached() as (_, engine):
        view = engine.mappings[0].view()
        view[100] = 7
        seen_there = await engine.ask("read 100")
        await engine.ask("write 200 9")

        assert seen_there == "7"
        assert view[200] == 9


@pytest.mark.parametrize("end", [SegmentMapping.discard, SegmentMapping.unmap])
async def test_a_killed_engine_is_reported_once_and_leaves_nothing(
    attached: Any,
    holders_of: Callable[[str], list[str]],
    end: Callable[[SegmentMapping], None],
) -> None:
    async with attached() as (recorded, engine):
        view = engine.mappings[0].view()
        await engine.ask("write 5 5")
        engine.process.kill()
        await engine.process.wait()
        await recorded.one_closed.wait()
        held_before = holders_of(engine.name)
        end(engine.mappings[0])

        assert len(held_before) == 1
        assert holders_of(engine.name) == []
        assert view[5] == 0
    assert len(recorded.closed) == 1


async def test_an_engine_cannot_truncate_what_the_agent_has_mapped(attached: Any) -> None:
    async with attached() as (_, engine):
        outcome = await engine.ask("truncate")

        assert engine.mappings[0].sealed
        assert outcome == "PermissionError"
        assert engine.mappings[0].view()[SIZE_BYTES - 1] == 0
