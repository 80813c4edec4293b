"""The four processes of the demo: two agents with their configurations, and two engines.

Refuses to leave one behind, and to go on without one: its end ends the run.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec

from kvbus.demo.child import Child
from kvbus.demo.engine_line import EngineLine
from kvbus.demo.options import DemoOptions
from kvbus.demo.shape import ReadPath
from kvbus.demo.work import EngineSetup

ROLES = ("prefill", "decode")
ATTACH_SOCKET = "attach.sock"
DRAIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Processes:
    """Two agents, and the two engines that the driver talks to."""

    agents: tuple[Child, ...]
    prefill: EngineLine
    decode: EngineLine

    async def finish(self) -> None:
        """End all, engines first; raises `PeerLost` in a group when one does not end well."""
        for children in ((self.prefill.child, self.decode.child), self.agents):
            async with anyio.create_task_group() as tasks:
                for child in children:
                    tasks.start_soon(child.finish)


@asynccontextmanager
async def running_processes(options: DemoOptions, folder: Path) -> AsyncIterator[Processes]:
    """All four, started at once. They live below ``folder``, a private one."""
    logs = options.keep_logs or folder
    children: list[Child] = []
    try:
        for role in ROLES:
            children.append(await start_agent(role, options, folder, logs))
        for role in ROLES:
            children.append(await start_engine(role, options, folder, logs))
        prefill_agent, decode_agent, prefill_engine, decode_engine = children
        async with anyio.create_task_group() as tasks:
            processes = Processes(
                agents=(prefill_agent, decode_agent),
                prefill=EngineLine(prefill_engine),
                decode=EngineLine(decode_engine),
            )
            for child in children:
                tasks.start_soon(child.watch)
            for engine in (processes.prefill, processes.decode):
                tasks.start_soon(engine.listen)
            yield processes
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as ends:
                for child in children:
                    ends.start_soon(child.end)


async def start_agent(role: str, options: DemoOptions, folder: Path, logs: Path) -> Child:
    """An agent with a configuration in ``folder``."""
    log = logs / f"{role}-agent.log"
    config = write_agent_config(role, options, folder)
    return await Child.start(f"{role} agent", f"kvbus_{role}", str(config), log=log)


async def start_engine(role: str, options: DemoOptions, folder: Path, logs: Path) -> Child:
    """An engine; it waits for its agent."""
    log = logs / f"{role}-engine.log"
    setup = msgspec.json.encode(engine_setup(role, options, folder)).decode()
    module = f"kvbus.demo.{role}_engine"
    return await Child.start(f"{role} engine", module, setup, log=log, is_piped=True)


def write_agent_config(role: str, options: DemoOptions, folder: Path) -> Path:
    """A configuration with free ports, and with sockets below ``folder``."""
    path = folder / f"{role}.toml"
    is_forced = role == "decode" and options.path is not ReadPath.AUTO
    path.write_text(
        f'agent_id = "{role}-demo"\n'
        'peer_bind = "tcp://127.0.0.1:0"\n'
        'events_bind = "tcp://127.0.0.1:0"\n'
        f'runtime_dir = "{folder / role}"\n'
        'log_format = "json"\n'
        f"drain_timeout_s = {DRAIN_TIMEOUT_S}\n" + (f'path = "{options.path}"\n' * is_forced),
        encoding="utf-8",
    )
    return path


def engine_setup(role: str, options: DemoOptions, folder: Path) -> EngineSetup:
    """What the engine of ``role`` is told."""
    return EngineSetup(
        engine_id=f"{role}-engine",
        attach_path=str(folder / role / ATTACH_SOCKET),
        model=options.model,
        side=options.prefill if role == "prefill" else options.decode,
        concurrency=options.concurrency,
        max_prompt_tokens=options.max_prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        prefill_chunk=options.prefill_chunk,
        ring_share=options.ring_share,
        flip_one_byte=options.flip_one_byte and role == "decode",
    )
