"""Blocking engines that asked for it outlive their agents: what they registered is again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvbus.demo.device import device_copy
from kvbus.engine import BlockingDecode, BlockingMemory, BlockingPrefill
from kvbus.engine.bounce import HostPool, LocalCopier
from kvbus.engine.bounce.blocking import BlockingHostDecode, BlockingHostPrefill
from kvbus.errors import FetchFailed, PeerLost
from kvbus.protocol import Fetched, Outcome
from tests.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.engines import FULL, make_spec
from tests.host_engines import private_cache
from tests.memories import NHD, Memory
from tests.strict_sessions import bits

SIZE = FULL.block_size
BLOCKS = {"full": [3, 4]}
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

    def __init__(self, agents: Agents, stack: ExitStack, *, reconnect: bool = True) -> None:
        prefill, decode = agents.all
        specs = [make_spec(groups=(FULL,)) for _ in range(2)]
        self.memories = [
            stack.enter_context(BlockingMemory(agent.attach, spec, 0, reconnect=reconnect))
            for agent, spec in zip(agents.all, specs, strict=True)
        ]
        self.sent, self.got = (one.allocate(NHD, num_blocks=8) for one in self.memories)
        self.source = stack.enter_context(
            BlockingPrefill(prefill.attach, specs[0], reconnect=reconnect)
        )
        self.target = stack.enter_context(
            BlockingDecode(decode.attach, specs[1], reconnect=reconnect)
        )
        for session in (self.source, self.target):
            session.register()
            session.ready()

    def works(self) -> bool:
        """Whether new bytes of the one cache come into the other."""
        for part in ("k", "v"):
            bits(self.sent.view(0, part)).random_(-(2**15), 2**15)
        offer = self.source.offer("r", num_tokens=2 * SIZE, block_ids=BLOCKS)
        fetch = self.target.fetch(offer.ticket, num_tokens=2 * SIZE, block_ids={"full": [1, 0]})
        self.target.wait_completed(fetch)
        self.source.wait_released(offer)
        got, sent = (bits(cache.view(0, "v")) for cache in (self.got, self.sent))
        return torch.equal(got[[1, 0]], sent[[3, 4]])


def restart(agent: AgentProcess, *sessions: Any, meanwhile: Callable[[], None]) -> None:
    """End the agent; start it again, and wait until it has each of ``sessions`` again."""
    agent.kill()
    wait_until(lambda: all(one.session.lost for one in sessions), "the agent is missed")
    meanwhile()
    agent.start()
    wait_until(lambda: all(one.num_reconnects == 1 for one in sessions), "it is attached again")


def test_a_prefill_engine_goes_on_with_the_agent_that_came_back(agents: Agents) -> None:
    with ExitStack() as stack:
        sides = Sides(agents, stack)
        assert sides.works()
        offers = [sides.source.offer(name, num_tokens=1, block_ids=BLOCKS) for name in "abc"]

        def meanwhile() -> None:
            with pytest.raises(PeerLost):
                sides.source.wait_released(offers[0])
            with pytest.raises(PeerLost):
                sides.source.offer("d", num_tokens=1, block_ids=BLOCKS)
            released = sides.source.take_released()
            assert [(one.offer_id, one.outcome) for one in released] == [
                (offer.offer_id, Outcome.FAILED) for offer in offers[1:]
            ]

        restart(agents.all[0], sides.memories[0], sides.source, meanwhile=meanwhile)

        assert sides.source.take_released() == []
        assert sides.works()


def test_a_decode_engine_goes_on_with_the_agent_that_came_back(agents: Agents) -> None:
    with ExitStack() as stack:
        sides = Sides(agents, stack)
        assert sides.works()
        offer = sides.source.offer("a", num_tokens=1, block_ids=BLOCKS, sealed=False)
        fetches = [
            sides.target.fetch(offer.ticket, num_tokens=SIZE, block_ids={"full": [number]})
            for number in range(2)
        ]
        wait_until(lambda: agents.all[1].status()["counts"]["fetches"], "a fetch runs")
        sides.target.take_ended()

        def meanwhile() -> None:
            with pytest.raises(FetchFailed):
                sides.target.wait_completed(fetches[0])
            (lost,) = sides.target.take_ended()
            assert isinstance(lost, Fetched)
            assert (lost.fetch_id, lost.stage) == (fetches[1].fetch_id, "lost")
            assert lost.blocks_free
            sides.target.wait_blocks_freed(fetches[1])

        restart(agents.all[1], sides.memories[1], sides.target, meanwhile=meanwhile)

        assert sides.target.take_ended() == []
        assert sides.works()


def test_who_did_not_ask_for_it_ends_with_the_agent(agents: Agents) -> None:
    with ExitStack() as stack:
        sides = Sides(agents, stack, reconnect=False)
        agents.all[0].kill()
        wait_until(lambda: sides.source.session.lost, "the agent is missed")

        with pytest.raises(PeerLost):
            sides.source.take_released()
        assert sides.source.num_reconnects == 0


def test_host_blocks_are_registered_again_too(agents: Agents) -> None:
    with ExitStack() as stack:
        sides = HostSides(agents, stack)
        assert sides.works()

        for agent, sessions in zip(agents.all, sides.sessions, strict=True):
            restart(agent, *sessions, meanwhile=lambda: None)

        assert sides.works()


class HostSides:
    """Two engines whose caches go through host blocks."""

    def __init__(self, agents: Agents, stack: ExitStack) -> None:
        prefill, decode = agents.all
        specs = [make_spec(groups=(FULL,)) for _ in range(2)]
        self.caches = [private_cache(spec, 0, Memory(), 8) for spec in specs]
        pools, copiers, memories = [], [], []
        for agent, spec, cache in zip(agents.all, specs, self.caches, strict=True):
            pools.append(HostPool({"full": 4}))
            memories.append(
                stack.enter_context(BlockingMemory(agent.attach, spec, 0, reconnect=True))
            )
            buffer = memories[-1].allocate_ring(pools[-1].num_blocks)
            copiers.append(LocalCopier([buffer], device_copy([cache])))
        source = stack.enter_context(BlockingPrefill(prefill.attach, specs[0], reconnect=True))
        target = stack.enter_context(BlockingDecode(decode.attach, specs[1], reconnect=True))
        for session in (source, target):
            session.register()
            session.ready()
        self.sessions = [(memories[0], source), (memories[1], target)]
        self.source = BlockingHostPrefill(source, pools[0], copiers[0])
        self.target = stack.enter_context(BlockingHostDecode(target, pools[1], copiers[1]))

    def works(self) -> bool:
        """Whether new bytes of the one cache come into the other."""
        sent, got = (bits(cache.view(0, "k")) for cache in self.caches)
        sent.random_(-(2**15), 2**15)
        offer = self.source.begin("r", num_tokens=2 * SIZE)
        ticket = self.source.offer(offer)
        self.source.save(offer, 2 * SIZE, BLOCKS).result()
        self.source.seal(offer)
        fetch = self.target.fetch(ticket, num_tokens=2 * SIZE, block_ids={"full": [1, 0]})
        self.target.wait_completed(fetch)
        self.source.wait_released(offer)
        return torch.equal(got[[1, 0]], sent[[3, 4]])
