"""An engine at several agents keeps its sessions while one of these starts again, and goes on."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, KeptSession, MemorySession, PrefillSession
from kvbus.errors import KVBusError
from tests.agents import AgentProcess, until
from tests.engines import (
    ACCESS,
    NUM_BLOCKS,
    Engine,
    begin,
    check_at_end,
    engine,
    make_spec,
    ranks_elsewhere,
)
from tests.faults.conftest import Started
from tests.memories import NHD
from tests.strict_sessions import strict

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

HOME, OTHER = 0, 1
GOES_ON_WITHIN_S = 60


@dataclass
class Kept(Engine):
    """A decode engine whose caches stay while its sessions come and go."""

    kept: KeptSession[DecodeSession]
    ranks: list[KeptSession[MemorySession]]

    @property
    def decode(self) -> DecodeSession:
        return self.kept.latest


@asynccontextmanager
async def kept_engine(agents: Sequence[AgentProcess]) -> AsyncIterator[Kept]:
    """A registered engine with a rank at each agent; the first one is its home."""
    spec = make_spec(tp=len(agents))
    async with AsyncExitStack() as stack:
        storages, ranks, caches = stack.enter_context(ExitStack()), [], []
        for rank, agent in enumerate(agents):
            memory = partial(MemorySession, storages=storages, access=ACCESS)
            kept = KeptSession(partial(memory, agent.attach, spec, rank), name=f"rank {rank}")
            ranks.append(await stack.enter_async_context(kept))
            caches.append(await (await kept.opened()).allocate(NHD, num_blocks=NUM_BLOCKS))
        controls: list[Any] = []

        def control() -> Any:
            controls.append(strict(DecodeSession)(agents[HOME].attach, spec, free_blocks=[]))
            controls[-1].caches = caches
            return controls[-1]

        async def begin(session: DecodeSession) -> None:
            await session.register(others=ranks_elsewhere(agents))
            await session.ready()

        kept_control: KeptSession[DecodeSession] = KeptSession(control, begin=begin, name="control")
        await stack.enter_async_context(kept_control)
        made = Kept(spec, await kept_control.opened(), caches, NUM_BLOCKS, kept_control, ranks)
        made.fill(2)
        yield made
        for session in controls:
            check_at_end(session)


async def hand_over(source: Engine, target: Kept) -> None:
    """One handoff by the latest session completes with the right bytes."""
    await target.kept.opened()
    handoff = await begin(source, target, timeout_s=10.0)
    try:
        await handoff.completed()
    except KVBusError:
        await handoff.fetch.freed
        await handoff.offer.withdraw()
        await handoff.offer.ended  # the source changes its blocks then
        raise


async def go_on(source: Engine, target: Kept) -> None:
    """A handoff completes soon: the first may find out what has become of an agent."""
    with anyio.fail_after(GOES_ON_WITHIN_S):
        while True:
            with suppress(KVBusError):
                return await hand_over(source, target)


@pytest.mark.parametrize("which", [HOME, OTHER], ids=["home", "other"])
async def test_an_engine_at_several_agents_goes_on_with_one_that_was_killed_and_is_back(
    fresh: Started, which: int
) -> None:
    prefill, *decode = fresh.prefill(), fresh.decode(), fresh.decode()
    fresh.start(prefill, *decode)
    async with (
        engine(PrefillSession, prefill.attach, make_spec(tp=2), seed=1) as source,
        kept_engine(decode) as target,
    ):
        await hand_over(source, target)

        decode[which].kill()
        decode[which].start()
        await until(lambda: target.ranks[which].num_opened == 2)
        await go_on(source, target)

        assert target.ranks[1 - which].num_opened == 1, "the memory at the other stays registered"
        assert target.kept.num_opened == (2 if which == HOME else 1)
