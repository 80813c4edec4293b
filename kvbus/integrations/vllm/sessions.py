"""The sessions of a vLLM with its agent: control in the scheduler's process, memory in workers.

Refuses to choose the side: the agent's role says whether this vLLM offers or fetches.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from kvbus.engine import (
    CudaStorage,
    DecodeSession,
    MemorySession,
    PrefillSession,
    SharedStorage,
)
from kvbus.engine.session import EngineSession
from kvbus.geometry import EngineSpec, RankSpec
from kvbus.protocol.engine import AgentRole, Fetched

ControlSession = PrefillSession | DecodeSession


class SharedMemory(Protocol):
    """What a memory session registers, as often as it has to."""

    @property
    def rank(self) -> RankSpec: ...

    @property
    def storages(self) -> Mapping[str, SharedStorage | CudaStorage]: ...


@asynccontextmanager
async def control_session(
    attach_path: Path, engine: EngineSpec, others: Mapping[str, tuple[int, ...]]
) -> AsyncIterator[ControlSession]:
    """The engine's control session, once all of its ranks are registered."""
    async with EngineSession(attach_path, engine) as first:
        role = first.agent.role
    kind = PrefillSession if role is AgentRole.PREFILL else DecodeSession
    async with kind(attach_path, engine) as session:
        await session.register(others=others)
        await session.ready()
        yield session


@asynccontextmanager
async def memory_session(
    attach_path: Path,
    engine: EngineSpec,
    shared: SharedMemory,
    *,
    on_fetched: Callable[[Fetched], None] | None = None,
) -> AsyncIterator[MemorySession]:
    """The memory of one rank, registered; ``on_fetched`` is told of every fetch that ended."""
    rank = shared.rank.rank
    async with MemorySession(attach_path, engine, rank, on_fetched=on_fetched) as session:
        await session.register(shared.rank, shared.storages)
        yield session
