"""Agents that are replaced while handoffs run: not one fails, and none has other bytes.

Once each, at a rate that a busy machine has; more of it, and what it took, with
``KVBUS_REPLACEMENTS=20 KVBUS_HANDOFFS_S=100 pytest -s tests/faults/test_replaced_agents.py``.
"""

import os
import threading
from functools import partial

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from tests.agents import AgentProcess, port_range, wait_until
from tests.faults.conftest import Started
from tests.faults.kept_engines import kept_engine
from tests.faults.paced import Tally, blocking_pair, run_async

NUM_TIMES = int(os.environ.get("KVBUS_REPLACEMENTS", "1"))
RATE_S = float(os.environ.get("KVBUS_HANDOFFS_S", "40"))
NUM_WORKERS = 4


def room() -> dict[str, str]:
    return {"peer_bind": port_range(), "events_bind": port_range()}


@pytest.mark.anyio
@pytest.mark.timeout(1800)
async def test_no_handoff_fails_while_either_agent_is_replaced(fresh: Started) -> None:
    agents = {"prefill": fresh.prefill(**room()), "decode": fresh.decode(**room(), mapped=True)}
    fresh.start(*agents.values())
    tally, paths = Tally(), [agent.attach for agent in agents.values()]
    period_s, num_blocks = 2 * NUM_WORKERS / RATE_S, 4 * NUM_WORKERS
    with blocking_pair(*paths, num_blocks, tally) as pair:
        threads = [
            threading.Thread(target=pair.run, args=(n, period_s)) for n in range(NUM_WORKERS)
        ]
        async with (
            kept_engine(PrefillSession, paths[0], num_blocks=num_blocks) as source,
            kept_engine(DecodeSession, paths[1], num_blocks=num_blocks) as target,
            anyio.create_task_group() as tasks,
        ):
            for thread in threads:
                thread.start()
            for n in range(NUM_WORKERS):
                tasks.start_soon(partial(run_async, source, target, n, period_s, tally))
            try:
                for _ in range(NUM_TIMES):
                    for role, before in agents.items():
                        agents[role] = successor = fresh.successor(before)
                        successor.launch()
                        await anyio.to_thread.run_sync(wait_replaced, before, successor)
            finally:
                tally.is_over.set()
                for thread in threads:
                    await anyio.to_thread.run_sync(thread.join)

    print(
        f"{len(tally.took_s)} handoffs, {len(tally.failures)} failed, p50 "
        f"{tally.percentile_s(0.5) * 1e3:.1f} ms, p99 {tally.percentile_s(0.99) * 1e3:.1f} ms, "
        f"longest {max(tally.took_s) * 1e3:.0f} ms"
    )
    assert not tally.failures
    seen = [line["level"] for one in fresh.all for line in one.logged("peer.lost")]
    assert set(seen) == {"info"}, "an agent that was replaced is missed by nobody"
    assert len(tally.took_s) > 20


def wait_replaced(before: AgentProcess, successor: AgentProcess) -> None:
    """Return once the successor serves, and the one before it has ended."""
    successor.wait_started()
    assert before.exit_status() == 0
    wait_until(lambda: successor.logged("predecessor.ended"), "the predecessor has ended")
