"""Requests about offers wait for the GPU work of their engine, and keep their order.

Links of host memory reach a number when `Link.record` returns, so the test is the GPU.
"""

import threading
import time
from typing import Any

import anyio
import msgspec
import pytest
import torch

from kvbus.engine import Completion, Outcome, SharedStorage, share_tensor
from kvbus.errors import ErrorCode, LocalError, RequestRefused
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import AwaitWork, CancelRequest, PassSegment, to_body
from tests.support.agents import until
from tests.support.engines import NUM_BLOCKS, make_spec, rank_link
from tests.support.pageless import link_without_page
from tests.unit.prefill.inside import PrefillAgent, given_back
from tests.unit.prefill.test_gpu_memory import greeted

pytestmark = pytest.mark.anyio

ONE: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [3]}}
STEP = 512


async def parks(agent: PrefillAgent, number: int) -> None:
    await until(lambda: agent.counts["waiting_requests"] == number)


async def test_requests_of_an_offer_keep_their_order(agent: PrefillAgent) -> None:
    async with agent.engine() as source:
        link, order = source.control, list[str]()

        def note(name: str, done: Completion[Any]) -> None:
            done.then(lambda: order.append(name))

        offer = link.offer("r", sealed=False, after=STEP, **ONE)
        other = link.offer("s", sealed=False, **ONE)
        note("offer", offer.made)
        await other
        note("withdraw other", other.withdraw())
        await other.ended
        assert order == ["withdraw other"]
        link.record(STEP)
        await offer
        note("second", offer.extend(32, {"full": [5]}, after=3 * STEP))
        note("first", offer.extend(48, {"full": [7]}, after=2 * STEP))
        note("seal", offer.seal())
        note("withdraw", offer.withdraw())
        await parks(agent, 4)
        link.record(2 * STEP)
        await link.offer("t", **ONE)  # a round trip: the agent has seen the number
        await parks(agent, 4)
        link.record(3 * STEP)
        assert await offer.ended is Outcome.WITHDRAWN
    assert order == ["withdraw other", "offer", "second", "first", "seal", "withdraw"]


async def test_number_that_never_comes_times_out_by_name(agent: PrefillAgent) -> None:
    agent.runtime.service.ordering.wait_s = 0.05
    async with agent.engine() as source:
        link = source.control
        refused = link.offer("r", after=7, **ONE)
        with pytest.raises(RequestRefused, match=r"number 7 of engine .* record") as failure:
            await refused
        offer = await link.offer("s", sealed=False, **ONE)
        with pytest.raises(RequestRefused, match="number 8 of engine"):
            await offer.extend(32, {"full": [5]}, after=8)
        await offer.ended
        assert agent.counts["waiting_requests"] == 0
        await link.offer("t", after=link.record(), **ONE)
    assert failure.value.code is ErrorCode.TIMEOUT


async def test_lost_engine_leaves_nothing_parked(agent: PrefillAgent) -> None:
    async with agent.engine() as other:
        offer = other.control.offer("r", after=9, **ONE)
        await parks(agent, 1)
        async with agent.engine() as source:
            lost = source.control.offer("r", after=9, **ONE)
            await parks(agent, 2)
        await parks(agent, 1)
        assert lost.ended.exception(0) is not None
        other.control.record(9)
        await offer


async def test_request_of_engine_without_page_is_refused_by_name(agent: PrefillAgent) -> None:
    async with link_without_page(agent.attach) as link:
        with pytest.raises(RequestRefused, match="passed no page of sequence") as refused:
            await link.offer("r", after=5, **ONE)
        await link.offer("r", **ONE)
    assert refused.value.code is ErrorCode.SEGMENT


@pytest.mark.parametrize(
    ("size_bytes", "is_sealed", "words"),
    [(8192, True, "has 4096 bytes, not 8192"), (4096, False, "must be sealed")],
)
async def test_wrong_page_is_refused_at_attach(
    agent: PrefillAgent, size_bytes: int, is_sealed: bool, words: str
) -> None:
    page = PassSegment("words", size_bytes, kind="sequence")
    unsealed = share_tensor(torch.zeros(size_bytes, dtype=torch.uint8))
    assert isinstance(unsealed, SharedStorage)
    with SharedSegment(size_bytes) as sealed, unsealed:
        fd = sealed.fd if is_sealed else unsealed.fd
        async with greeted(agent) as client:
            with pytest.raises(RequestRefused, match=words) as refused:
                await client.call({"op": page.op, "body": to_body(page)}, [fd])
    assert refused.value.code is ErrorCode.SEGMENT


# A step loop that never idles has recorded later steps by the time that the agent looks, and has
# launched more. An event that is recorded again and again is never ready in such a loop.
async def test_nothing_starves_while_a_step_loop_never_idles(agent: PrefillAgent) -> None:
    async with agent.engine() as source:
        link, is_over, recorded = source.control, threading.Event(), 0

        def step_loop() -> None:
            nonlocal recorded
            while not is_over.wait(1e-4):
                recorded += STEP  # before the record: a read of it is never too small
                link.record(recorded)

        thread = threading.Thread(target=step_loop)
        thread.start()
        late_s, early = list[float](), 0
        for number in range(30):
            since, after = time.monotonic(), recorded + 50 * STEP
            offer = await link.offer(f"r{number}", after=after, **ONE)
            early += recorded < after
            late_s.append(time.monotonic() - since)
            await offer.withdraw()
            await offer.ended
        is_over.set()
        thread.join()
    assert early == 0
    assert max(late_s) < 1.0


async def test_numbers_of_two_streams_are_refused_for_one_offer(agent: PrefillAgent) -> None:
    async with agent.engine() as source:
        offer = source.control.offer("r", sealed=False, after=source.control.record(), **ONE)
        with pytest.raises(LocalError, match="of two streams"):
            offer.seal(after=STEP + 1)
        await offer.seal(after=source.control.record())
        await offer.withdraw()


async def test_ranks_without_their_scheduler_are_waited_for(agent: PrefillAgent) -> None:
    agent.runtime.service.ordering.wait_s = 600.0  # no wait ends by itself
    spec = make_spec(tp=2)
    rank, _ = rank_link(agent.attach, spec, 1, num_blocks=NUM_BLOCKS)
    async with rank, agent.reader() as reader:
        engine = agent.runtime.agent.engines.engines[spec.engine_id]
        memory = {"memory_id": engine.memory_id, "rank_secret": engine.rank_secret}
        request = AwaitWork(agent.boot, spec.engine_id, after=STEP, **memory)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.ask, request)
            await parks(agent, 1)
            rank.record(STEP)
        await reader.ask(request)
        later = msgspec.structs.replace(request, after=2 * STEP)
        cancelled = reader.client.send(later, timeout_s=30.0, on_reply=lambda _: None)
        await parks(agent, 1)
        await reader.ask(CancelRequest(cancelled))
        await parks(agent, 0)
        (process,) = engine.processes
    await until(lambda: given_back(process))
