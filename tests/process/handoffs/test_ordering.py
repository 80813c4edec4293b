"""Late work of engines on their blocks: right bytes with `Link.record`, and wrong ones without.

Threads are the GPUs: what a step writes comes late, and then its number.
"""

from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

import pytest

from kvbus.engine import Link
from kvbus.errors import ErrorCode
from tests.process.handoffs.shapes import ShapedAgents
from tests.support.agents import Agents, until
from tests.support.engines import Engine, Handoff, begin, failure_of, pair, same, spread_engine

pytestmark = pytest.mark.anyio

STEP = 512
ONE: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [60]}}
BY_ORDER = pytest.mark.parametrize("in_order", [True, False])


class LateStep:
    """A step whose work runs when it `may_run`, before its number is recorded on each link."""

    def __init__(self, work: Callable[[], object], *links: Link) -> None:
        self._work, self._links = work, links
        self._may_run = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.run()

    def run(self) -> None:
        self._may_run.set()
        self._thread.join()

    def _run(self) -> None:
        self._may_run.wait()
        self._work()
        for link in self._links:
            link.record(STEP)


async def passes(engine: Engine) -> None:
    """The agent has processed all earlier requests of this engine."""
    await (await engine.control.offer("passes", **ONE)).withdraw()


def zero_blocks(handoff: Handoff, rank: int = 0) -> None:
    for (of, *_), view in handoff.target.views().items():
        if of == rank:
            view[handoff.ours["full"]] = 0


@BY_ORDER
async def test_tokens_of_a_late_step_are_read_after_it(agents: Agents, in_order: bool) -> None:
    prefill, decode = agents.all[:2]
    async with pair(prefill.attach, decode.attach) as (source, target):
        link, blocks = source.control, source.whole_blocks(3, 40)
        before = target.snapshot()
        with LateStep(lambda: source.fill(7), link) as late:
            offering = link.offer(
                "r", num_tokens=40, block_ids=blocks, after=STEP if in_order else 0
            )
            await passes(source)
            assert offering.made.done() is not in_order
            if in_order:
                late.run()
            offer = await offering
            handoff = await begin(source, target, offer=offer, before=before)
            await handoff.fetch.ended
            found = target.snapshot()
            await offer.ended
        wanted = handoff.wanted
        if not in_order:
            source.fill(7)
            handoff = await begin(source, target, before=before)
            wanted = handoff.wanted
            await handoff.fetch.ended
    assert same(found, wanted) is in_order


@BY_ORDER
async def test_late_step_does_not_write_over_fetched_blocks(agents: Agents, in_order: bool) -> None:
    prefill, decode = agents.all[:2]
    async with pair(prefill.attach, decode.attach) as (source, target):
        after = STEP if in_order else 0
        handoff = await begin(source, target, 48, after=after)
        with LateStep(lambda: zero_blocks(handoff), target.control) as late:
            other = {"num_tokens": 16, "block_ids": {"full": [handoff.theirs["full"][0]]}}
            offer = await source.control.offer("s", **other)
            free = [one for one in range(64) if one not in handoff.ours["full"]]
            refused = target.control.fetch(offer.ticket, num_tokens=16, block_ids={"full": free})
            assert (await failure_of(refused)).code is ErrorCode.GEOMETRY  # it came behind
            if not in_order:
                await handoff.fetch.ended
            assert handoff.fetch.ended.done() is not in_order
            late.run()
            await handoff.fetch.ended
            await offer.withdraw()
        assert handoff.has_landed() is in_order


@BY_ORDER
async def test_remote_part_waits_for_step_of_its_own_rank(
    shapes: ShapedAgents, in_order: bool
) -> None:
    async with (
        spread_engine([shapes.prefill], seed=1) as source,
        spread_engine(shapes.of("direct"), seed=2) as target,
    ):
        target.links[0].record(STEP)
        handoff = await begin(source, target, 48, after=STEP if in_order else 0)
        with LateStep(lambda: zero_blocks(handoff, rank=1), target.links[1]) as late:
            if in_order:
                await until(
                    lambda: shapes.of("direct")[1].status()["counts"]["waiting_requests"] == 1
                )
            else:
                await handoff.fetch.ended
            late.run()
            await handoff.fetch.ended
        assert handoff.has_landed() is in_order


@BY_ORDER
@pytest.mark.parametrize(
    ("path", "num_agents"), [("direct", 2), ("direct", 1), ("packed", 1), ("mapped", 1)]
)
async def test_tokens_of_a_late_rank_at_another_agent_are_read_after_its_step(
    shapes: ShapedAgents, path: str, num_agents: int, in_order: bool
) -> None:
    home, other = shapes.of("prefill")
    async with (
        spread_engine([home, other], seed=1) as source,
        spread_engine(shapes.of(path)[:num_agents], seed=2) as target,
    ):
        first = await begin(source, target)
        await first.completed()
        source.fill(1)
        target.fill(2)
        memory, written = source.memories()[1], source.snapshot()[1]
        memory.zero_()
        source.links[0].record(STEP)
        with LateStep(lambda: memory.copy_(written), source.links[1]) as late:
            after = STEP if in_order else 0
            second = await begin(source, target, made={"after": after})
            if in_order:
                await until(lambda: other.status()["counts"]["waiting_requests"] == 1)
                late.run()
            await second.fetch.ended
        await second.offer.ended
        assert same(target.snapshot(), first.wanted) is in_order
