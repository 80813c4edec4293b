"""Engines whose agents are killed again and again go on, without a restart of their own."""

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.protocol import Outcome
from tests.agents import until
from tests.engines import failure_of
from tests.faults.kept_engines import BLOCKS_EACH, Handoffs, kept_engine

pytestmark = pytest.mark.anyio

NUM_HANDOFFS = 3
ROUNDS = 5
MORE = 10
WITHIN_S = 60.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("killed", "mapped"),
    [(["prefill"], False), (["decode"], False), (["prefill", "decode"], True)],
    ids=["prefill", "decode", "both"],
)
async def test_handoffs_go_on_after_each_of_five_deaths_of_an_agent(fresh, killed, mapped):
    agents = {"prefill": fresh.prefill(), "decode": fresh.decode(mapped=mapped)}
    fresh.start(*agents.values())
    shape = {"num_blocks": NUM_HANDOFFS * BLOCKS_EACH}
    async with (
        kept_engine(PrefillSession, agents["prefill"].attach, **shape) as source,
        kept_engine(DecodeSession, agents["decode"].attach, **shape) as target,
        anyio.create_task_group() as tasks,
    ):
        handoffs = [Handoffs(source, target, number) for number in range(NUM_HANDOFFS)]
        for one in handoffs:
            tasks.start_soon(one.run)

        async def each_goes_on() -> None:
            wanted = [one.num_completed + MORE for one in handoffs]
            await until(
                lambda: all(
                    one.num_completed >= count for one, count in zip(handoffs, wanted, strict=True)
                ),
                WITHIN_S,
            )

        for _ in range(ROUNDS):
            await each_goes_on()
            for role in killed:
                agents[role].kill()
            for role in killed:
                agents[role].launch()
            for role in killed:
                await anyio.to_thread.run_sync(agents[role].wait_started)
        await each_goes_on()
        for one in handoffs:
            one.is_over = True

    opened = {"prefill": source.control.num_opened, "decode": target.control.num_opened}
    assert [one.trouble for one in handoffs] == [[]] * NUM_HANDOFFS
    assert {times for one in handoffs for times in one.ends.values()} == {1}
    assert sum(one.failures.total() for one in handoffs) > 0
    assert opened == {role: 1 + ROUNDS * (role in killed) for role in agents}


async def test_a_decode_agent_that_is_back_need_not_wait_for_the_lease_of_the_one_before(fresh):
    prefill, decode = fresh.prefill(max_lease_s=120.0), fresh.decode(lease_s=120.0)
    fresh.start(prefill, decode)
    async with (
        kept_engine(PrefillSession, prefill.attach, num_blocks=4) as source,
        kept_engine(DecodeSession, decode.attach, num_blocks=4) as target,
    ):
        offer = await source.control.latest.offer(
            "r", num_tokens=0, block_ids={"full": []}, sealed=False
        )
        wanted = {"num_tokens": 16, "block_ids": {"full": [1]}}
        first = target.control.latest.fetch(offer.ticket, **wanted)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)
        decode.kill()
        lost = await failure_of(first)
        decode.launch()
        await anyio.to_thread.run_sync(decode.wait_started)

        again = (await target.control.opened()).fetch(offer.ticket, **wanted, timeout_s=30.0)
        await until(lambda: prefill.logged("lease.revoked", offer_id=offer.offer_id))
        await offer.extend(16, {"full": [2]})
        await offer.seal()
        await again.completed()

        assert (lost.stage, lost.blocks_free) == ("lost", True)
        assert await offer.released() is Outcome.COMPLETED
