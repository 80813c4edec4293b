"""Engines outlive their agents by their links: what they registered is registered again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from kvbus.engine import KvCache, Link, RankMemory
from kvbus.errors import FetchFailed, PeerLost
from tests.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.engines import FULL, make_spec
from tests.memories import NHD
from tests.strict_links import bits

SIZE = FULL.block_size
THEIRS, OURS = {"full": [3, 4]}, {"full": [1, 0]}
PATIENT_S = 20.0
WAIT_S = 0.5


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
        self.caches, links = list[KvCache](), list[Link]()
        for agent in agents.all:
            spec = make_spec(groups=(FULL,))
            memory = RankMemory.allocate(spec, 0, NHD, num_blocks=8)
            self.caches.append(KvCache(spec, memory.rank, memory.tensor))
            link = Link(agent.attach, spec, memory=memory, agent_wait_s=WAIT_S)
            links.append(stack.enter_context(link))
        self.source, self.target = links

    def works(self) -> bool:
        """Whether new bytes of the one cache come into the other."""
        sent, got = (bits(cache.view(0, "k")) for cache in self.caches)
        sent.random_(-(2**15), 2**15)
        offer = self.source.offer("r", num_tokens=2 * SIZE, block_ids=THEIRS)
        fetch = self.target.fetch(offer.ticket, num_tokens=2 * SIZE, block_ids=OURS)
        fetch.ended.wait(PATIENT_S)
        offer.ended.wait(PATIENT_S)
        return torch.equal(got[OURS["full"]], sent[THEIRS["full"]])


@contextmanager
def restarted(agent: AgentProcess, link: Link) -> Iterator[None]:
    """The agent is dead in the block; ``link`` is attached again after it."""
    agent.kill()
    wait_until(lambda: not link.is_open, "the agent is missed")
    yield
    agent.start()
    assert link.wait_open(PATIENT_S)
    assert link.num_opened == 2


def test_a_prefill_engine_goes_on_with_the_agent_that_came_back(agents: Agents) -> None:
    with ExitStack() as stack:
        sides = Sides(agents, stack)
        assert sides.works()
        offers = [sides.source.offer(name, num_tokens=1, block_ids=THEIRS) for name in "abc"]

        for offer in offers:
            offer.made.wait(PATIENT_S)

        with restarted(agents.all[0], sides.source):
            with pytest.raises(PeerLost):
                offers[0].ended.wait(PATIENT_S)
            with pytest.raises(PeerLost):
                sides.source.offer("d", num_tokens=1, block_ids=THEIRS).made.wait(PATIENT_S)
            ended = sides.source.ended()

        assert ended[:2] == offers[1:]
        assert all(offer.outcome is None for offer in offers)
        assert sides.source.ended() == []
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
        assert sides.target.ended() == []

        with restarted(agents.all[1], sides.target):
            with pytest.raises(FetchFailed):
                fetches[0].ended.wait(PATIENT_S)
            fetches[1].freed.wait(PATIENT_S)
            told = sides.target.ended()

        assert told == fetches[1:]
        assert fetches[1].notice is not None
        assert fetches[1].notice.stage == "lost"
        assert fetches[1].are_blocks_free
        assert sides.target.ended() == []
        assert sides.works()
