"""Agents that are replaced while handoffs run: not one fails, and none has other bytes.

Once each, at a rate that a busy machine has; more of it with
``KVBUS_REPLACEMENTS=20 KVBUS_HANDOFFS_S=100 pytest tests/faults/test_replaced_agents.py``.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
import torch

from kvbus.engine import (
    BlockingDecode,
    BlockingMemory,
    BlockingPrefill,
    DecodeSession,
    KvCache,
    PrefillSession,
)
from kvbus.errors import KVBusError
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, port_range, wait_until
from tests.engines import FULL, make_spec
from tests.faults.conftest import Started
from tests.faults.kept_engines import BLOCKS_EACH, NUM_TOKENS, Handoffs, kept_engine, views_of
from tests.memories import NHD

NUM_TIMES = int(os.environ.get("KVBUS_REPLACEMENTS", "1"))
RATE_S = float(os.environ.get("KVBUS_HANDOFFS_S", "40"))
NUM_WORKERS = 4
PAUSE_S = (NUM_WORKERS + 1) / RATE_S
BLOCKS = list(range(BLOCKS_EACH))


@dataclass
class BlockingPair:
    """A prefill and a decode engine without an event loop, that follow their agents."""

    source: BlockingPrefill
    target: BlockingDecode
    given: KvCache
    taken: KvCache
    num_completed: int = 0
    trouble: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Handoffs in this thread, one after the other."""
        turn = 0
        while not self.is_over.wait(PAUSE_S):
            turn += 1
            try:
                self._hand_over(turn)
            except KVBusError as error:
                self.trouble.append(f"{turn}: {error.code}: {error}")

    def _hand_over(self, turn: int) -> None:
        values = torch.tensor(turn % (1 << 15), dtype=torch.int16)
        for view in views_of(self.given):
            view[BLOCKS] = values
        offer = self.source.offer(
            f"blocking-{turn}", num_tokens=NUM_TOKENS, block_ids={FULL.name: BLOCKS}
        )
        fetch = self.target.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, block_ids={FULL.name: BLOCKS[::-1]}
        )
        self.target.wait_completed(fetch)
        if not all(bool((view[BLOCKS] == values).all()) for view in views_of(self.taken)):
            self.trouble.append(f"{turn}: other bytes")
        if self.source.wait_released(offer) is not Outcome.COMPLETED:
            self.trouble.append(f"{turn}: its offer did not complete")
        self.num_completed += 1


@contextmanager
def blocking_pair(*attach: Path) -> Iterator[BlockingPair]:
    """Its handoffs run in a thread of theirs until the end of the ``with``."""
    specs = make_spec(), make_spec()
    with ExitStack() as stack:
        enter = stack.enter_context
        memories = [
            enter(BlockingMemory(path, spec, 0, reconnect=True))
            for path, spec in zip(attach, specs, strict=True)
        ]
        given, taken = (memory.allocate(NHD, num_blocks=BLOCKS_EACH) for memory in memories)
        source = enter(BlockingPrefill(attach[0], specs[0], reconnect=True))
        target = enter(BlockingDecode(attach[1], specs[1], reconnect=True))
        for session in (source, target):
            session.register()
            session.ready()
        pair = BlockingPair(source, target, given, taken)
        thread = threading.Thread(target=pair.run)
        thread.start()
        try:
            yield pair
        finally:
            pair.is_over.set()
            thread.join()


@pytest.mark.anyio
@pytest.mark.timeout(1800)
async def test_no_handoff_fails_while_either_agent_is_replaced(fresh: Started) -> None:
    room = [{"peer_bind": port_range(), "events_bind": port_range()} for _ in range(2)]
    agents = {"prefill": fresh.prefill(**room[0]), "decode": fresh.decode(**room[1], mapped=True)}
    fresh.start(*agents.values())
    attach = [agent.attach for agent in agents.values()]
    num_blocks = NUM_WORKERS * BLOCKS_EACH
    async with (
        kept_engine(PrefillSession, attach[0], num_blocks=num_blocks) as source,
        kept_engine(DecodeSession, attach[1], num_blocks=num_blocks) as target,
        anyio.create_task_group() as tasks,
    ):
        workers = [Handoffs(source, target, n, pause_s=PAUSE_S) for n in range(NUM_WORKERS)]
        with blocking_pair(*attach) as blocking:
            for worker in workers:
                tasks.start_soon(worker.run)
            for _ in range(NUM_TIMES):
                for role, before in agents.items():
                    agents[role] = successor = fresh.successor(before)
                    successor.launch()
                    await anyio.to_thread.run_sync(wait_replaced, before, successor)
            for worker in workers:
                worker.is_over = True

    assert [worker.failures for worker in workers] == [{}] * NUM_WORKERS
    assert [*blocking.trouble, *(one for worker in workers for one in worker.trouble)] == []
    assert all(worker.num_completed for worker in workers)
    assert blocking.num_completed
    seen = [line["level"] for one in fresh.all for line in one.logged("peer.lost")]
    assert set(seen) == {"info"}, "an agent that was replaced is missed by nobody"


def wait_replaced(before: AgentProcess, successor: AgentProcess) -> None:
    """Return once the successor serves, and the one before it has ended."""
    successor.wait_started()
    assert before.exit_status() == 0
    wait_until(lambda: successor.logged("predecessor.ended"), "the predecessor has ended")
