"""The four processes of the demo: two agents with their configurations, and two engines.

Refuses to leave one behind, to go on without one (its end ends the run), and to wait where nothing
goes on. While anything does, it waits: on a busy machine all takes longer.
"""

import asyncio
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from kvbus.demo.keys import DemoKeys
from kvbus.demo.messages import Answer, DemoMessage, EngineSetup, Failed, Line
from kvbus.demo.options import DemoOptions, ReadPath
from kvbus.errors import ProtocolError, RequestRefused, RequestTimeout
from kvbus.spawn import Child, write_agent_config

ROLES = ("prefill", "decode")
# The deadlines of the agents; on a busy machine the defaults are too short.
AGENT_TIMES: dict[str, dict[str, float]] = {
    "prefill": {"drain_timeout_s": 2.0, "offer_ttl_s": 600.0},
    "decode": {
        "drain_timeout_s": 2.0,
        "fetch_timeout_s": 600.0,
        "request_timeout_s": 60.0,
        "lease_s": 30.0,
    },
}
END_TIMEOUT_S = 60.0
STALL_S = 60.0
STALL_CPU_S = 3.0  # four processes that only wait use a third of it in that time

A = TypeVar("A", bound=Answer)


class EngineLine(Line):
    """The driver's end of the line to one engine; its answers wait, by request, for who wants them.

    A request's answers come in order; any of them may be a `Failed`, which is the last one then.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._answers: defaultdict[str, asyncio.Queue[DemoMessage]] = defaultdict(asyncio.Queue)
        self.num_answers = 0

    async def answer(self, request_id: str, kind: type[A]) -> A:
        """The next answer to a request; raises `RequestRefused` when that is a `Failed`.

        Waits for ever when the engine dies.
        """
        answer = await self._answers[request_id].get()
        if isinstance(answer, Failed):
            raise RequestRefused(answer.message, code=answer.code)
        if not isinstance(answer, kind):
            raise ProtocolError(f"an engine answered {type(answer).__name__} to '{request_id}'")
        return answer

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._answers.pop(request_id, None)

    async def listen(self) -> None:
        """Take answers until the engine closes its end."""
        async for answer in self:
            self.num_answers += 1
            self._answers[answer.request_id].put_nowait(answer)


class Processes:
    """Two agents, and the two engines that the driver talks to."""

    def __init__(self, options: DemoOptions, folder: Path) -> None:
        self._options, self._folder = options, folder
        self.keys = DemoKeys(folder) if options.keys else None
        self.agents: list[Child] = []
        self.engines: list[Child] = []
        self.lines: list[EngineLine] = []

    @property
    def all(self) -> list[Child]:
        """All children, engines first."""
        return [*self.engines, *self.agents]

    async def start(self) -> None:
        """Start all at once; an engine waits for its agent."""
        for role in ROLES:
            settings = agent_settings(role, self._options)
            settings |= self.keys.settings(role) if self.keys else {}
            config = write_agent_config(role, self._folder, **settings)
            self.agents.append(self._child(f"{role} agent", f"kvbus_{role}", str(config)))
        for role in ROLES:
            setup = msgspec.json.encode(engine_setup(role, self._options, self._folder)).decode()
            ours, theirs = socket.socketpair()
            with theirs:
                self.lines.append(await EngineLine.over(ours))
                module = f"kvbus.demo.{role}_engine"
                engine = self._child(f"{role} engine", module, setup, stdin=theirs.fileno())
                self.engines.append(engine)

    def _child(self, name: str, *command: str, stdin: int = asyncio.subprocess.DEVNULL) -> Child:
        log = (self._options.keep_logs or self._folder) / f"{name.replace(' ', '-')}.log"
        log.unlink(missing_ok=True)
        command = sys.executable, "-m", *command
        return Child.start(name, command, log=log, stdin=stdin, own_session=True)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Raise `PeerLost` when one ends meanwhile, `RequestTimeout` when nothing goes on."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_progress)
            for child in self.all:
                tasks.start_soon(_watch, child)
            for line in self.lines:
                tasks.start_soon(line.listen)
            yield
            tasks.cancel_scope.cancel()

    async def _watch_progress(self) -> None:
        """No engine answers for a while, and little is computed."""
        num_answers, cpu_s = self._progress()
        while True:
            before, cpu_before_s = num_answers, cpu_s
            await anyio.sleep(STALL_S)
            num_answers, cpu_s = self._progress()
            if num_answers == before and cpu_s - cpu_before_s < STALL_CPU_S:
                raise RequestTimeout(f"nothing has gone on for {STALL_S:g} s")

    def _progress(self) -> tuple[int, float]:
        num_answers = sum(line.num_answers for line in self.lines)
        return num_answers, sum(child.cpu_s() for child in self.all)

    async def finish(self) -> None:
        """End all, engines first; raises `PeerLost` when one does not end well."""
        for line in self.lines:
            line.close()
        for engine in self.engines:
            await _ended_well(engine)
        for agent in self.agents:
            agent.ask_to_end()
        for agent in self.agents:
            await _ended_well(agent)


async def _watch(child: Child) -> None:
    await child.ended()
    raise child.lost()


async def _ended_well(child: Child) -> None:
    with anyio.move_on_after(END_TIMEOUT_S):
        await child.ended()
    if child.process.poll() != 0:
        raise child.lost(f"did not end within {END_TIMEOUT_S:g} s")


@asynccontextmanager
async def running_processes(options: DemoOptions, folder: Path) -> AsyncIterator[Processes]:
    """All four. They live below ``folder``, a private one."""
    processes = Processes(options, folder)
    try:
        await processes.start()
        yield processes
    finally:
        for line in processes.lines:
            line.close()
        async with anyio.create_task_group() as ends:
            for child in processes.all:
                ends.start_soon(child.end_async)


def agent_settings(role: str, options: DemoOptions) -> dict[str, str | float]:
    """What is not the default in its configuration."""
    settings: dict[str, str | float] = {
        "agent_id": f"{role}-demo",
        **AGENT_TIMES[role],
    }
    if role == "decode" and options.path is not ReadPath.AUTO:
        settings["path"] = options.path
    return settings


def engine_setup(role: str, options: DemoOptions, folder: Path) -> EngineSetup:
    """What the engine of ``role`` is told."""
    num_new = options.max_new_tokens if role == "decode" else 0
    return EngineSetup(
        engine_id=f"{role}-engine",
        attach_path=str(folder / role / "attach.sock"),
        model=options.model,
        shape=options.shape(role),
        concurrency=options.concurrency,
        max_tokens=options.max_prompt_tokens + num_new,
        prefill_chunk=options.prefill_chunk,
        ring_share=options.share_in_ring,
        flip_one_byte=options.flip_one_byte and role == "decode",
    )
