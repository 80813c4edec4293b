"""The sessions of a vLLM with its agent: control in the scheduler's process, memory in workers."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.engine.memory import Storage
from kvbus.engine.session import ControlSession, EngineSession
from kvbus.engine.thread import SessionThread
from kvbus.geometry import EngineSpec, RankSpec
from kvbus.protocol.engine import AgentRanks, AgentRole, Fetched

logger = logging.getLogger("vllm.kvbus")

CLOSE_WITHIN_S = 3.0
"""How long the end of a process waits for the end of a session."""

ControlLink = SessionThread[ControlSession]
MemoryLink = SessionThread[MemorySession]


def control_link(
    attach_path: Path, engine: EngineSpec, others: Sequence[AgentRanks]
) -> ControlLink:
    """The engine's control session, open whenever all of its ranks are registered.

    The agent's role says whether this vLLM offers or fetches.
    """

    @asynccontextmanager
    async def opened() -> AsyncIterator[ControlSession]:
        async with EngineSession(attach_path, engine) as first:
            role = first.agent.role
        kind = PrefillSession if role is AgentRole.PREFILL else DecodeSession
        async with kind(attach_path, engine) as session:
            await session.register(others=others)
            await session.ready()
            yield session

    return SessionThread("the control session", opened, reconnect=True, logger=logger)


def memory_link(
    attach_path: Path,
    engine: EngineSpec,
    rank: RankSpec,
    storages: Mapping[str, Storage],
    *,
    access: str,
    on_fetched: Callable[[Fetched], None] | None = None,
) -> MemoryLink:
    """The memory of one rank, registered; ``on_fetched`` is told of every fetch that ended.

    Where it is not at the engine's home, who shows ``access`` may ask about it.
    """

    @asynccontextmanager
    async def opened() -> AsyncIterator[MemorySession]:
        session = MemorySession(
            attach_path, engine, rank.rank, on_fetched=on_fetched, access=access
        )
        async with session:
            await session.register(rank, storages)
            yield session

    name = f"the memory session of rank {rank.rank}"
    return SessionThread(name, opened, reconnect=True, logger=logger)
