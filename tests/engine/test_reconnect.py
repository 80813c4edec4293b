"""Blocking engines that asked for it outlive their agents: what they registered is again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from kvbus.engine import BlockingDecode, BlockingMemory, BlockingPrefill
from kvbus.errors import FetchFailed, PeerLost
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.engines import FULL, make_spec
from tests.memories import NHD
from tests.strict_sessions import bits

SIZE = FULL.block_size
THEIRS, OURS = {"full": [3, 4]}, {"full": [1, 0]}
PATIENT_S = 20.0


@pytest.fixture(scope="module")
def shared_agents() -> Iterator[Agents]:
    with agents_ended(Agents) as agents:
        agents.prepare("prefill")
        agents.prepare("decode", request_timeout_s=PATIENT_S)
        yield agents


@pytest.fixture
def agents(shared_agents: Agents) -> Agents:
    """A prefill and a decode agent; one that a test killed is started again."""
    shared_agents.start(*(agent for agent in shared_agents.all if not agent.alive))
    return shared_agents


class Sides:
    """Two engines, each with its cache in memory that its agent maps."""

    def __init__(self, agents: Agents, stack: ExitStack) -> None:
        def opened(kind: Any, agent: AgentProcess, *ranks: int) -> Any:
            return stack.enter_context(
                kind(agent.attach, specs[agent.role], *ranks, reconnect=True)
            )

        specs = {agent.role: make_spec(groups=(FULL,)) for agent in agents.all}
        prefill, decode = agents.all
        self.memories = [opened(BlockingMemory, agent, 0) for agent in agents.all]
        self.caches = [memory.allocate(NHD, num_blocks=8) for memory in self.memories]
        self.source, self.target = opened(BlockingPrefill, prefill), opened(BlockingDecode, decode)
        for session in (self.source, self.target):
            session.register()
            session.ready()

    def works(self) -> bool:
        """Whether new bytes of the one cache come into the other."""
        sent, got = (bits(cache.view(0, "k")) for cache in self.caches)
        sent.random_(-(2**15), 2**15)
        offer = self.source.offer("r", num_tokens=2 * SIZE, block_ids=THEIRS)
        fetch = self.target.fetch(offer.ticket, num_tokens=2 * SIZE, block_ids=OURS)
        self.target.wait_completed(fetch)
        self.source.wait_released(offer)
        return torch.equal(got[OURS["full"]], sent[THEIRS["full"]])


@contextmanager
def restarted(agent: AgentProcess, *sessions: Any) -> Iterator[None]:
    """The agent is dead in the block; each of ``sessions`` is attached again after it."""
    agent.kill()
    wait_until(lambda: all(one.session.lost for one in sessions), "the agent is missed")
    yield
    agent.start()
    wait_until(lambda: all(one.num_reconnects == 1 for one in sessions), "it is attached again")


def test_a_prefill_engine_goes_on_with_the_agent_that_came_back(agents: Agents) -> None:
    with ExitStack() as stack:
        sides = Sides(agents, stack)
        assert sides.works()
        offers = [sides.source.offer(name, num_tokens=1, block_ids=THEIRS) for name in "abc"]

        with restarted(agents.all[0], sides.memories[0], sides.source):
            with pytest.raises(PeerLost):
                sides.source.wait_released(offers[0])
            with pytest.raises(PeerLost):
                sides.source.offer("d", num_tokens=1, block_ids=THEIRS)
            released = sides.source.take_released()

        lost = [(offer.offer_id, Outcome.FAILED) for offer in offers[1:]]
        assert [(one.offer_id, one.outcome) for one in released] == lost
        assert sides.source.take_released() == []
        assert sides.works()


def test_a_decode_engine_goes_on_with_the_agent_that_came_back(agents: Agents) -> None:
    with ExitStack() as stack:
        sides = Sides(agents, stack)
        assert sides.works()
        offer = sides.source.offer("a", num_tokens=1, block_ids=THEIRS, sealed=False)
        fetches = [
            sides.target.fetch(offer.ticket, num_tokens=SIZE, block_ids={"full": [number]})
            for number in range(2)
        ]
        wait_until(lambda: agents.all[1].status()["counts"]["fetches"], "a fetch runs")
        sides.target.take_ended()

        with restarted(agents.all[1], sides.memories[1], sides.target):
            with pytest.raises(FetchFailed):
                sides.target.wait_completed(fetches[0])
            (lost,) = sides.target.take_ended()
            sides.target.wait_blocks_freed(fetches[1])

        told: Any = lost
        assert (told.fetch_id, told.stage) == (fetches[1].fetch_id, "lost")
        assert told.blocks_free
        assert sides.target.take_ended() == []
        assert sides.works()
