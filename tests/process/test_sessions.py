"""What an engine can do with its agent by the SDK, and what others see of it."""

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

import anyio
import pytest
import torch

from kvbus.bus import EventListener, EventSubscriber, new_context
from kvbus.engine import (
    BlockingDecode,
    BlockingMemory,
    BlockingPrefill,
    DecodeSession,
    MemorySession,
    PrefillSession,
    share_tensor,
)
from kvbus.errors import ErrorCode, LocalError, RequestRefused
from kvbus.geometry import Axis, AxisName, KvPart, RankSpec, Region, Segment
from kvbus.protocol import Fetched, Notice, Outcome
from tests.agents import AgentProcess, until, wait_until
from tests.engines import (
    FULL,
    NUM_BLOCKS,
    SMALL,
    Engine,
    engine,
    failure_of,
    make_spec,
    pair,
    same,
    works,
)
from tests.expected import expected_after
from tests.memories import NHD
from tests.process.shapes import GROUP, WINDOW, ShapedAgents, Side, hand_over, two_engines
from tests.process.spread_engines import ACCESS
from tests.strict_sessions import bits, overwrite_once_released

pytestmark = pytest.mark.anyio


def rank_of(kv: torch.Tensor, storage: Any) -> RankSpec:
    """One region for a tensor [layer, kv, block, token, head, dim], with the tensor's strides."""
    names = ("layer", "kv", "block", "token", "head", "dim")
    axes = tuple(
        Axis(AxisName(name), size, stride * kv.element_size())
        for name, size, stride in zip(names, kv.shape, kv.stride(), strict=True)
    )
    region = Region(
        segment_id="mine",
        offset_bytes=storage.offset_bytes_of(kv),
        group="full",
        layers=FULL.layers,
        parts=(KvPart.KEY, KvPart.VALUE),
        first_head=0,
        num_heads=FULL.num_kv_heads,
        axes=axes,
    )
    return RankSpec(0, (Segment("mine", storage.size_bytes),), (region,))


async def test_a_tensor_that_the_engine_already_owns_is_its_cache(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    caches = [torch.zeros(2, 2, 32, 16, 6, 8, dtype=torch.bfloat16) for _ in range(2)]
    bits(caches[0]).random_(-(2**15), 2**15)
    specs = [make_spec(), make_spec()]
    with share_tensor(caches[0]) as given, share_tensor(caches[1]) as taken:
        async with (
            MemorySession(prefill.attach, specs[0], 0) as theirs,
            MemorySession(decode.attach, specs[1], 0) as ours,
            PrefillSession(prefill.attach, specs[0]) as source,
            DecodeSession(decode.attach, specs[1]) as target,
        ):
            await theirs.register(rank_of(caches[0], given), {"mine": given})
            await ours.register(rank_of(caches[1], taken), {"mine": taken})
            await source.register()
            await target.register()

            sent = bits(caches[0])[:, :, [5, 9, 2]].flatten(2, 3)
            offer = await source.offer("r", num_tokens=40, block_ids={"full": [5, 9, 2]})

            def overwrite() -> None:
                bits(caches[0]).zero_()

            offer.when_released(overwrite)
            fetch = target.fetch(offer.ticket, num_tokens=40, block_ids={"full": [30, 1, 7]})
            await fetch.completed()

    got = bits(caches[1])[:, :, [30, 1, 7]].flatten(2, 3)
    assert torch.equal(got[:, :, :40], sent[:, :, :40])
    assert not got[:, :, 40:].any()


def test_an_engine_without_an_event_loop_polls_for_what_ended(
    prefill: AgentProcess, decode: AgentProcess, other_decode: AgentProcess
) -> None:
    """Its second rank is at another agent."""
    theirs, ours = make_spec(), make_spec(tp=2)
    with ExitStack() as stack:
        memories = [
            stack.enter_context(BlockingMemory(agent.attach, spec, rank, access=ACCESS))
            for agent, spec, rank in (
                (prefill, theirs, 0),
                (decode, ours, 0),
                (other_decode, ours, 1),
            )
        ]
        cache, *caches = (memory.allocate(NHD, num_blocks=8) for memory in memories)
        sent, *got = (bits(one.view(0, KvPart.KEY)) for one in (cache, *caches))
        source = stack.enter_context(BlockingPrefill(prefill.attach, theirs))
        target = stack.enter_context(BlockingDecode(decode.attach, ours))
        sent.random_(-(2**15), 2**15)
        source.register()
        target.register(others={other_decode.peer: [1]}, access=ACCESS)
        source.ready()
        target.ready()

        written = sent.clone()
        offer = source.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
        overwrite_once_released(offer, cache, {"full": [3, 4]})
        source.extend(offer, 32, {"full": [3, 4]})
        fetch = target.fetch(offer.ticket, num_tokens=32, block_ids={"full": [1, 0]})
        source.seal(offer)
        fetched = taken_in_time(target.take_ended)
        released = taken_in_time(source.take_released)

        assert torch.equal(torch.cat(got, dim=2)[[1, 0]], written[[3, 4]])
        assert [(one.fetch_id, one.outcome) for one in fetched] == [
            (fetch.fetch_id, Outcome.COMPLETED)
        ]
        assert [(one.offer_id, one.outcome) for one in released] == [
            (offer.offer_id, Outcome.COMPLETED)
        ]
        assert [*target.take_ended(), *source.take_released()] == []


def taken_in_time(take: Callable[[], list[Any]]) -> list[Any]:
    """The first batch that is not empty."""
    taken: list[Any] = []

    def is_some() -> bool:
        taken.extend(take())
        return bool(taken)

    wait_until(is_some, "something ended")
    return taken


async def test_a_rank_that_asked_for_it_hears_what_the_control_session_hears(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    spec = make_spec(tp=2)
    heard: list[Fetched] = []
    async with (
        engine(PrefillSession, prefill.attach, make_spec(tp=2), seed=1) as source,
        DecodeSession(decode.attach, spec) as control,
        MemorySession(decode.attach, spec, 0, on_fetched=heard.append) as listening,
        MemorySession(decode.attach, spec, 1) as deaf,
    ):
        caches = [await one.allocate(NHD, num_blocks=NUM_BLOCKS) for one in (listening, deaf)]
        await control.register()
        await control.ready()
        ours = Engine(spec, control, caches, NUM_BLOCKS).some_blocks(4, 40)
        offer = await source.prefill.offer("r", num_tokens=40, block_ids=source.some_blocks(3, 40))

        completed = await control.fetch(offer.ticket, num_tokens=40, block_ids=ours).completed()
        failed = control.fetch(offer.ticket, num_tokens=40, block_ids=ours)
        await failure_of(failed)
        await until(lambda: len(heard) == 2)

        assert heard == [completed, failed.notice]


async def test_a_session_for_the_other_kind_of_agent_is_refused_with_both_named(
    decode: AgentProcess,
) -> None:
    with pytest.raises(LocalError, match="for decode engines, not prefill"):
        async with PrefillSession(decode.attach, make_spec()):
            pass


async def test_many_handoffs_at_a_time_do_not_mix(shapes: ShapedAgents) -> None:
    """Of an engine at one agent, of one at two, and of others that use the same request ids."""
    spread = Side(tp=2, places="01")
    async with (
        two_engines(shapes, "packed", spread, spread, max_tokens=16 * 32) as first,
        two_engines(shapes, "direct", Side(), Side(), groups=[SMALL], max_tokens=16 * 32) as other,
        anyio.create_task_group() as tasks,
    ):
        for engines in (first, other):
            tasks.start_soon(many_handoffs, *engines)


async def many_handoffs(source: Engine, target: Engine) -> None:
    """32 at a time, each of a few blocks."""
    (group,) = source.spec.groups
    num_blocks, num_all = 16 // group.block_size, 16 * 32
    theirs, ours = source.some_blocks(5, num_all), target.some_blocks(6, num_all)
    wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=num_all)

    async def one(number: int) -> None:
        part = slice(number * num_blocks, (number + 1) * num_blocks)
        mine, yours = ({group.name: all_ids[group.name][part]} for all_ids in (theirs, ours))
        offer = await source.prefill.offer(str(number), num_tokens=16, block_ids=mine)
        await target.decode.fetch(offer.ticket, num_tokens=16, block_ids=yours).completed()
        await offer.released()

    async with anyio.create_task_group() as tasks:
        for number in Random(0).sample(range(32), 32):
            tasks.start_soon(one, number)
    assert same(target.snapshot(), wanted)


async def test_an_engine_comes_back_under_its_id_and_works(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    spec = make_spec()
    async with engine(DecodeSession, decode.attach, seed=7) as target:
        for seed in (1, 2):
            async with engine(PrefillSession, prefill.attach, spec, seed=seed) as source:
                assert await works(source, target)


async def test_a_window_that_starts_before_what_the_offer_kept_is_refused(
    shapes: ShapedAgents,
) -> None:
    groups = (GROUP, WINDOW)
    async with two_engines(shapes, "direct", Side(), Side(tp=2), groups=groups) as (source, target):
        before = target.snapshot()
        with pytest.raises(RequestRefused, match="window of 21 tokens") as refused:
            await source.prefill.offer(
                "r",
                num_tokens=60,
                block_ids={"full": [1, 2, 3, 4], "window": [5]},
                first_blocks={"window": 7},
            )
        offer = await source.prefill.offer(
            "r",
            num_tokens=60,
            block_ids=source.some_blocks(5, 60),
            first_blocks=source.first_blocks(60),
        )
        failure = await failure_of(
            target.decode.fetch(offer.ticket, num_tokens=40, block_ids=target.some_blocks(6, 40))
        )
        await offer.withdraw()

        assert (refused.value.code, failure.code) == (ErrorCode.GEOMETRY, ErrorCode.GEOMETRY)
        assert "window" in failure.message
        assert same(target.snapshot(), before)


@pytest.mark.parametrize(("size", "are_whole"), [(8, True), (48, False)])
async def test_a_fetch_says_whether_the_blocks_of_its_windows_are_whole(
    shapes: ShapedAgents, size: int, are_whole: bool
) -> None:
    """Of a prefill engine that has the window's blocks of 8 tokens, and nothing before them."""
    sides, groups = (Side(block_size=8), Side(block_size=size)), (GROUP, WINDOW)
    async with two_engines(shapes, "direct", *sides, groups=groups) as engines:
        fetched = await hand_over(*engines, 60, only_tails=True)

        assert fetched.whole_blocks is are_whole


async def test_status_says_which_engines_are_ready_and_what_is_held(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []})

        theirs, ours = prefill.status(), decode.status()

        assert theirs["agent_id"] == prefill.settings["agent_id"]
        assert theirs["role"] == "prefill"
        assert theirs["engines"] == {source.spec.engine_id: True}
        assert theirs["counts"].items() >= {"offers": 1, "leases": 0}.items()
        assert ours["engines"] == {target.spec.engine_id: True}
        assert ours["counts"].items() >= {"fetches": 0, "draining_fetches": 0}.items()
        assert not theirs["draining"]
        await offer.withdraw()


class Heard(EventListener):
    """Keeps the events, in order."""

    def __init__(self) -> None:
        self.boots: set[str] = set()
        self.events: list[Notice] = []

    def on_boot(self, endpoint: str, boot: str) -> None:
        self.boots.add(endpoint)

    def on_event(self, endpoint: str, event: Notice) -> None:
        self.events.append(event)

    def about(self, key: str, value: str) -> list[str]:
        """The events of one offer or fetch or engine."""
        return [event.op for event in self.events if event.body.get(key) == value]


async def test_a_subscriber_hears_the_life_of_a_handoff(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    heard = Heard()
    endpoints = {agent.started["events"] for agent in (prefill, decode)}

    async def event_heard(key: str, value: str, op: str) -> None:
        await until(lambda: op in heard.about(key, value))

    with new_context() as context:
        async with anyio.create_task_group() as tasks:
            subscriber = EventSubscriber(context, heard)
            tasks.start_soon(subscriber.run)
            for endpoint in endpoints:
                subscriber.add(endpoint)
            await until(lambda: heard.boots == endpoints)
            async with pair(prefill.attach, decode.attach) as (source, target):
                nothing: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
                offer = await source.prefill.offer("r", **nothing, sealed=False)
                await offer.seal()
                fetch = target.decode.fetch(offer.ticket, **nothing)
                await fetch.completed()
                await event_heard("offer_id", offer.offer_id, "offer.released")
                await event_heard("fetch_id", fetch.fetch_id, "fetch.completed")
            await event_heard("engine_id", target.spec.engine_id, "engine.lost")
            tasks.cancel_scope.cancel()

    assert heard.about("offer_id", offer.offer_id) == [
        "offer.opened",
        "offer.sealed",
        "lease.granted",
        "lease.ended",
        "offer.released",
    ]
    assert heard.about("engine_id", target.spec.engine_id) == ["engine.ready", "engine.lost"]


async def test_what_was_done_is_counted_and_one_line_of_each_agent_tells_of_it(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    counts: Sequence[tuple[AgentProcess, str, dict[str, str]]] = [
        (decode, "handoffs_total", {"outcome": "completed"}),
        (decode, "read_bytes_total", {}),
        (decode, "handoff_seconds_count", {}),
        (prefill, "offers_total", {"outcome": "completed"}),
        (prefill, "leases_total", {"reason": "ended"}),
        (decode, "digests_total", {"outcome": "equal"}),
    ]

    def read() -> list[float]:
        return [agent.metric(name, **labels) for agent, name, labels in counts]

    request_id = uuid.uuid4().hex
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        before = read()
        offer = await source.prefill.offer(request_id, num_tokens=16, block_ids={"full": [1]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        await fetch.completed()
        await offer.released()
        told = [
            agent.says(event, request_id=request_id)
            for agent, event in ((prefill, "offer.released"), (decode, "handoff.completed"))
        ]
        gained = [now - then for now, then in zip(read(), before, strict=True)]

        assert gained == [1, 16 * 2 * 2 * 6 * 8 * 2, 1, 1, 1, 0]
        assert [len(lines) for lines in told] == [1, 1]
        assert decode.metric("engines") == prefill.metric("engines") == 1
        assert decode.metric("registered_bytes") > 0
        assert decode.metric("peers") >= 1
        assert decode.metric("outstanding_handles") == 0
