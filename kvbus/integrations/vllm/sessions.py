"""The sessions of a vLLM with its agent: control in the scheduler's process, memory in workers."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.engine.control import ControlSession
from kvbus.engine.rank_memory import Storage
from kvbus.engine.session import EngineSession
from kvbus.engine.thread import SessionThread
from kvbus.errors import LocalError
from kvbus.geometry import EngineSpec, RankSpec
from kvbus.protocol.engine import AgentRanks, AgentRole, Fetched

logger = logging.getLogger("vllm.kvbus")

CLOSE_WITHIN_S = 3.0
"""How long the end of a process waits for the end of a session."""

ControlLink = SessionThread[ControlSession]
MemoryLink = SessionThread[MemorySession]


def control_link(
    attach_path: Path,
    engine: EngineSpec,
    others: Sequence[AgentRanks],
    role_wanted: AgentRole | None = None,
    kv_role: str = "kv_both",
) -> ControlLink:
    """The engine's control session, open whenever all of its ranks are registered.

    The agent's role says whether this vLLM offers or fetches; of an engine with two agents it is
    to be the ``role_wanted``. A ``kv_producer`` must not fetch: that vLLM lets blocks go which a
    step that runs may still write.
    """

    @asynccontextmanager
    async def opened() -> AsyncIterator[ControlSession]:
        async with EngineSession(attach_path, engine) as first:
            role = first.agent.role
        if role_wanted not in (None, role):
            raise LocalError(
                f"the agent at {attach_path} is a {role} agent, and 'endpoint' of this vLLM's "
                f"options has it under '{role_wanted}': exchange the two"
            )
        if role is AgentRole.DECODE and kv_role == "kv_producer":
            raise LocalError(
                f"the agent at {attach_path} is a decode agent, which loads, and kv_role of this "
                "vLLM is kv_producer: set it to kv_consumer or kv_both"
            )
        kind = PrefillSession if role is AgentRole.PREFILL else DecodeSession
        async with kind(attach_path, engine) as session:
            yield session

    async def begin(session: ControlSession) -> None:
        await session.register(others=others)
        await session.ready()

    name = f"the {role_wanted} control session" if role_wanted else "the control session"
    return SessionThread(name, opened, begin=begin, reconnect=True, logger=logger)


def memory_link(
    attach_path: Path,
    engine: EngineSpec,
    rank: RankSpec,
    storages: Mapping[str, Storage],
    *,
    access: str,
    on_fetched: Callable[[Fetched], None] | None = None,
    role: AgentRole | None = None,
) -> MemoryLink:
    """The memory of one rank, registered; ``on_fetched`` is told of every fetch that ended.

    Where it is not at the engine's home, who shows ``access`` may ask about it. ``role`` names the
    agent in logs, where there are two.
    """

    make = partial(
        MemorySession, attach_path, engine, rank.rank, on_fetched=on_fetched, access=access
    )

    async def begin(session: MemorySession) -> None:
        await session.register(rank, storages)

    name = f"the {role} memory session" if role else "the memory session"
    name = f"{name} of rank {rank.rank}"
    return SessionThread(name, make, begin=begin, reconnect=True, logger=logger)
