"""One way that bytes take between real agents, slow enough for something to happen in the middle.

A lane has agents of its own, so that lanes can be played side by side. Where a side has several
agents, the first is its engine's home, and what happens to an agent happens to the last.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anyio import Lock

from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    SpreadEngine,
    engine,
    make_spec,
    spread_engine,
)
from tests.support.host_engines import HostEngine, host_engine
from tests.support.memories import Memory

LEASE_S, WITHHELD_S = 5.0, 60.0
"""How long a stopped or killed agent is waited for."""
SLICES = {"slice_bytes": 4096}
OVER_TCP = {"env": {"UCX_TLS": "tcp"}, **SLICES}
RING = {"staging_bytes": 4 << 18, "slot_bytes": 1 << 18}
SPARE_BLOCKS = 16


class Left(Exception):
    """An engine leaves at once, and waits for nothing."""


@dataclass
class Lane:
    """The agents of one path; ``settings`` are by role, for all of them.

    Who has its ``turn`` needs the cores: no other lane's engines compute anything meanwhile.
    """

    agents: Agents
    turn: Lock
    settings: Mapping[str, Mapping[str, Any]]
    num_agents: ClassVar[int] = 1
    prefill: list[AgentProcess] = field(default_factory=list)
    decode: list[AgentProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings: dict[str, dict[str, Any]] = {
            "prefill": {"late_read_s": 1.0},
            "decode": {
                "lease_s": LEASE_S,
                "request_timeout_s": LEASE_S,
                "quarantine_timeout_s": WITHHELD_S,
            },
        }
        for role, of_side in (("prefill", self.prefill), ("decode", self.decode)):
            more = {**settings[role], **self.settings.get(role, {})}
            of_side += [self.agents.prepare(role, **more) for _ in range(self.num_agents)]

    def side(self, role: str) -> list[AgentProcess]:
        """The agents of one role, the engine's home first."""
        return self.prefill if role == "prefill" else self.decode

    @asynccontextmanager
    async def engine(self, role: str) -> AsyncIterator[Engine]:
        """An engine of 64 MiB a rank; a decode engine writes over what it is told is free."""
        async with AsyncExitStack() as stack:
            async with self.turn:
                made = await stack.enter_async_context(self._open(role))
            made.control.overwrites = True
            yield made

    def _open(self, role: str) -> AbstractAsyncContextManager[Engine]:
        spec = make_spec(groups=(LARGE,))
        attach = self.side(role)[0].attach
        return engine(attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=len(role))

    async def wait_under_way(self) -> None:
        """Return once the agent that things happen to is part of the handoff that has begun."""

    async def leave(self, one: Engine) -> None:
        """Have the engine go, or what of it is at the agent that things happen to.

        It has gone before another lane has its turn, whose engines keep the event loop for longer
        than a read of mapped memory takes.
        """
        await one.control.aclose()
        raise Left

    def is_withheld(self, target: Engine, fetch: Any) -> bool:
        """Whether the agent may still write for the fetch."""
        return not fetch.are_blocks_free

    def num_leases(self) -> int:
        return sum(int(agent.status()["counts"]["leases"]) for agent in self.prefill)

    def num_mappings(self, engine_id: str) -> int:
        """How often agents map the memory of an engine."""
        return sum(agent.memory_maps(engine_id) for agent in (*self.prefill, *self.decode))


@dataclass
class SpreadLane(Lane):
    """Engines of two ranks, each at an agent of its own."""

    num_agents: ClassVar[int] = 2

    def _open(self, role: str) -> AbstractAsyncContextManager[Engine]:
        spec = make_spec(tp=2, groups=(LARGE,))
        return spread_engine(self.side(role), spec, num_blocks=NUM_LARGE_BLOCKS, seed=len(role))

    async def wait_under_way(self) -> None:
        await until(lambda: self.decode[-1].metric("data_jobs"))

    async def leave(self, one: Engine) -> None:
        assert isinstance(one, SpreadEngine)
        await one.lose(1)


@dataclass
class HostLane(Lane):
    """Engines whose memory nobody maps, and which copy through host blocks."""

    def _open(self, role: str) -> AbstractAsyncContextManager[Engine]:
        return host_engine(
            self.side(role)[0].attach,
            make_spec(groups=(LARGE,)),
            memory=Memory(),
            num_blocks=NUM_LARGE_BLOCKS,
            ring_blocks={LARGE.name: NUM_LARGE_BLOCKS + SPARE_BLOCKS},
            seed=len(role),
        )

    async def leave(self, one: Engine) -> None:
        raise Left

    def is_withheld(self, target: Engine, fetch: Any) -> bool:
        assert isinstance(target, HostEngine)
        return target.ring.num_held > 0


Settings = dict[str, dict[str, Any]]
LANES: dict[str, tuple[type[Lane], Settings]] = {
    "direct": (Lane, {"prefill": OVER_TCP, "decode": {**OVER_TCP, "path": "direct"}}),
    "staged": (
        Lane,
        {"prefill": OVER_TCP, "decode": {**OVER_TCP, **RING, "path": "staged"}},
    ),
    "packed": (
        Lane,
        {"prefill": {**OVER_TCP, **RING}, "decode": {**OVER_TCP, **RING, "path": "packed"}},
    ),
    "shared memory": (
        Lane,
        {"prefill": SLICES, "decode": {**SLICES, "path": "direct"}},
    ),
    "mapped": (Lane, {"decode": {**SLICES, "mapped": True, "path": "mapped"}}),
    "several agents": (
        SpreadLane,
        {"prefill": OVER_TCP, "decode": {**OVER_TCP, "path": "direct"}},
    ),
    "host memory": (HostLane, {"prefill": OVER_TCP, "decode": OVER_TCP}),
}
