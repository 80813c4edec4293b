"""Engines whose ranks are attached to several agents: one session a rank, each can leave alone.

Refuses to share sessions between tasks, as what they hold is given back by the task that took it.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup, TaskStatus

from kvbus.engine import AgentRanks, DecodeSession, KvCache, MemorySession, PrefillSession
from kvbus.geometry import EngineSpec, KvLayout
from tests.agents import AgentProcess
from tests.engines import NUM_BLOCKS, Engine, NumBlocks, check_at_end, make_spec
from tests.memories import NHD
from tests.strict_sessions import strict

ACCESS = "access-to-ranks-elsewhere"
Kind = type[PrefillSession] | type[DecodeSession]


@dataclass
class RankSession:
    """The memory session of one rank, in a task of its own; set ``leave`` to end it."""

    agent: AgentProcess
    spec: EngineSpec
    rank: int
    layout: KvLayout
    num_blocks: NumBlocks
    direct: bool = True
    cache: KvCache | None = None
    leave: anyio.Event = field(default_factory=anyio.Event)
    left: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, *, task_status: TaskStatus[KvCache] = anyio.TASK_STATUS_IGNORED) -> None:
        """Attach and register, then stay until told to leave; the agent may be gone by then."""
        async with MemorySession(self.agent.attach, self.spec, self.rank, access=ACCESS) as memory:
            cache = await memory.allocate(
                self.layout, num_blocks=self.num_blocks, direct=self.direct
            )
            task_status.started(cache)
            await self.leave.wait()
        self.left.set()


@dataclass
class SpreadEngine(Engine):
    """An engine of which ranks can leave, one by one, and come back."""

    sessions: list[RankSession]
    tasks: TaskGroup

    @property
    def places(self) -> list[str]:
        """Which agent has each rank."""
        return [session.agent.peer for session in self.sessions]

    async def lose(self, rank: int) -> None:
        """End the session of a rank; its cache is no more, and not part of the engine here."""
        self.sessions[rank].leave.set()
        await self.sessions[rank].left.wait()
        del self.caches[rank:]

    async def bring_back(self, rank: int) -> None:
        """Attach a lost last rank again, with new memory."""
        old = self.sessions[rank]
        new = RankSession(old.agent, old.spec, rank, old.layout, old.num_blocks, old.direct)
        self.sessions[rank] = new
        self.caches.append(await self.tasks.start(new.run))


@asynccontextmanager
async def spread_engine(
    kind: Kind,
    agents: Sequence[AgentProcess],
    spec: EngineSpec | None = None,
    *,
    layout: KvLayout = NHD,
    num_blocks: NumBlocks = NUM_BLOCKS,
    staged: Collection[int] = (),
    seed: int = 0,
) -> AsyncIterator[SpreadEngine]:
    """A registered engine; ``agents`` are those of its ranks, the first of all is its home.

    The ranks in ``staged`` are unregistered.
    """
    spec = spec or make_spec(tp=len(agents))
    home = agents[0]
    async with strict(kind)(home.attach, spec) as control, anyio.create_task_group() as tasks:
        sessions = [
            RankSession(agent, spec, rank, layout, num_blocks, rank not in staged)
            for rank, agent in enumerate(agents)
        ]
        caches = [await tasks.start(session.run) for session in sessions]
        control.caches = caches
        await control.register(others=ranks_elsewhere(agents))
        await control.ready()
        made = SpreadEngine(spec, control, caches, num_blocks, sessions, tasks)
        if seed:
            made.fill(seed)
        try:
            yield made
            check_at_end(control)
        finally:
            for session in made.sessions:
                session.leave.set()


def ranks_elsewhere(agents: Sequence[AgentProcess]) -> list[AgentRanks]:
    """The ranks that are not at the first agent, with all that others need to ask theirs."""
    keys = {agent.peer: agent.started["server_key"] for agent in agents}
    return [
        AgentRanks(endpoint, tuple(ranks), ACCESS, keys[endpoint])
        for endpoint, ranks in others_of(agents).items()
    ]


def others_of(agents: Sequence[AgentProcess]) -> Mapping[str, list[int]]:
    """The ranks that are not at the first agent, by the endpoint of theirs."""
    others: dict[str, list[int]] = {}
    for rank, agent in enumerate(agents):
        if agent is not agents[0]:
            others.setdefault(agent.peer, []).append(rank)
    return others
