"""Of fetches that wait for each other the urgent one has its turn first, from the SDK on."""

import signal
import uuid

import pytest

from tests.agents import Agents, agents_ended, until
from tests.engines import expected_after, pair, same, works

pytestmark = pytest.mark.anyio

NUM_TOKENS = 40
PRIORITIES = {"first": 0, "second": 0, "third": -1, "urgent": 1}


async def test_an_urgent_fetch_waits_for_less_than_those_that_came_before_it() -> None:
    """While the prefill agent is stopped, each fetch gives its place on after a second."""
    with agents_ended(Agents) as agents:
        prefill, decode = agents.prepare("prefill"), agents.prepare("decode", fetches_at_once=1)
        agents.start(prefill, decode)
        async with pair(prefill.attach, decode.attach) as (source, target):
            assert await works(source, target)
            theirs, ours = source.some_blocks(3, NUM_TOKENS), target.some_blocks(4, NUM_TOKENS)
            wanted = expected_after(
                target.snapshot(), source, theirs, target, ours, num_tokens=NUM_TOKENS
            )
            offers = {
                name: await source.prefill.offer(
                    uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs
                )
                for name in PRIORITIES
            }
            prefill.signal(signal.SIGSTOP)
            fetches = {
                name: target.decode.fetch(
                    offers[name].ticket, num_tokens=NUM_TOKENS, block_ids=ours, priority=priority
                )
                for name, priority in PRIORITIES.items()
            }
            await until(lambda: decode.status()["counts"]["queued_fetches"] <= 1)
            prefill.signal(signal.SIGCONT)
            queued_s = {
                name: (await fetch.completed()).stages_s.queued for name, fetch in fetches.items()
            }

            as_they_began = sorted(queued_s, key=queued_s.__getitem__)
            assert as_they_began == ["first", "urgent", "second", "third"]
            assert same(target.snapshot(), wanted)
        agents.check()
