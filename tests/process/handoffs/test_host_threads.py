"""Engines with a ring of host blocks, without an event loop."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch

from kvbus.engine import KvCache, Link
from kvbus.engine.bounce import CopyBlocks, HostBuffer, HostLink, HostPool, LocalCopier
from kvbus.errors import ErrorCode, FetchFailed, LocalError
from kvbus.lab.lab_engine import device_copy
from kvbus.protocol import Outcome
from tests.support.agents import AgentProcess, wait_until
from tests.support.engines import FULL, make_spec
from tests.support.memories import Memory, private_cache

SIZE = FULL.block_size
PLACES = [(layer, part) for layer in (0, 1) for part in "kv"]
NUM_TOKENS = 2 * SIZE + 3


class Sides:
    """A prefill and a decode engine in this thread; copies wait while ``gate`` is shut."""

    def __init__(self, stack: ExitStack, *agents: AgentProcess) -> None:
        self.gate = Event()
        self.gate.set()
        self.rings, self.caches = list[HostPool](), list[KvCache]()
        hosts = list[HostLink]()
        for agent in agents:
            spec = make_spec(groups=(FULL,))
            ring = HostPool({"full": 8})
            buffer = HostBuffer(spec, 0, ring.num_blocks)
            cache = private_cache(spec, 0, Memory(), 40)
            for place in PLACES:
                cache.view(*place).normal_()
            link = stack.enter_context(Link(agent.attach, spec, memory=buffer.memory))
            copier = LocalCopier([buffer], partial(self._copy, device_copy([cache])))
            hosts.append(HostLink(link, ring, copier))
            self.rings.append(ring)
            self.caches.append(cache)
        self.prefill, self.decode = hosts

    def _copy(self, copy: CopyBlocks, *args: Any) -> None:
        assert self.gate.wait(60)
        copy(*args)


@pytest.fixture
def sides(prefill: AgentProcess, decode: AgentProcess) -> Iterator[Sides]:
    with ExitStack() as stack:
        made = Sides(stack, prefill, decode)
        yield made
        made.gate.set()
        wait_until(lambda: not any(ring.num_held for ring in made.rings), "empty rings")


def test_step_waits_for_no_save_or_fetch_and_reads_ids_at_call(sides: Sides) -> None:
    sides.gate.clear()
    offer = sides.prefill.offer("r", num_tokens=NUM_TOKENS).wait()
    blocks = [3]
    saves = [offer.save(SIZE, {"full": blocks})]
    blocks[:] = 4, 1
    saves.append(offer.save(NUM_TOKENS, {"full": blocks}))
    blocks[0] = 9
    fetch = sides.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids={"full": [7, 9, 8]})
    early = [save.done() for save in saves], sides.decode.ended()
    sides.gate.set()
    offer.seal()
    for save in saves:
        save.wait(60)
    ended: list[object] = []

    def has_ended() -> bool:
        ended.extend(sides.decode.ended())
        return bool(ended)

    wait_until(has_ended, "the end of the fetch")
    assert early == ([False, False], [])
    assert ended == [fetch]
    assert fetch.ended.wait().outcome is Outcome.COMPLETED
    assert offer.ended.wait(60) is Outcome.COMPLETED
    for place in PLACES:
        sent, got = (cache.view(*place) for cache in sides.caches)
        assert torch.equal(got[[7, 9]], sent[[3, 4]])
        assert torch.equal(got[8, :3], sent[1, :3])


def test_requests_are_given_up_and_full_rings_are_busy(sides: Sides) -> None:
    first = sides.prefill.offer("r", num_tokens=8 * SIZE).wait()
    second = sides.prefill.offer("s", num_tokens=1)
    with pytest.raises(LocalError) as refused:
        second.wait()
    fetch = sides.decode.fetch(
        first.ticket, num_tokens=8 * SIZE, block_ids={"full": list(range(8))}
    )
    fetch.cancel()
    with pytest.raises(FetchFailed) as failed:
        fetch.ended.wait(60)
    first.withdraw()
    assert (refused.value.code, failed.value.code) == (ErrorCode.BUSY, ErrorCode.CANCELLED)
    assert first.ended.wait(60) is Outcome.WITHDRAWN
