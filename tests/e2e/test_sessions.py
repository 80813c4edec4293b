"""What else an engine can do with its agent, and what others see of it."""

import uuid
from collections.abc import Callable
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
)
from kvbus.errors import LocalError
from kvbus.geometry import Axis, AxisName, KvPart, RankSpec, Region, Segment
from kvbus.memory import SharedStorage, share_tensor
from kvbus.protocol import Fetched, Notice, Outcome
from tests.agents import until, wait_until
from tests.engines import (
    FULL,
    NHD,
    NUM_BLOCKS,
    Engine,
    bits,
    engine,
    failure_of,
    make_spec,
    pair,
    same,
    works,
)
from tests.strict_sessions import overwrite_once_released


def rank_of(kv: torch.Tensor, storage: SharedStorage) -> RankSpec:
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


@pytest.mark.anyio
async def test_a_tensor_that_the_engine_already_owns_is_its_cache(prefill, decode):
    caches = [
        torch.zeros(2, 2, 32, 16, 6, 8, dtype=torch.bfloat16).requires_grad_(False)
        for _ in range(2)
    ]
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
            offer.when_released(bits(caches[0]).zero_)
            fetch = target.fetch(offer.ticket, num_tokens=40, block_ids={"full": [30, 1, 7]})
            await fetch.completed()

    got = bits(caches[1])[:, :, [30, 1, 7]].flatten(2, 3)
    assert torch.equal(got[:, :, :40], sent[:, :, :40])
    assert not got[:, :, 40:].any()


def test_an_engine_without_an_event_loop_polls_for_what_ended(prefill, decode):
    specs = [make_spec(), make_spec()]
    with (
        BlockingMemory(prefill.attach, specs[0], 0) as theirs,
        BlockingMemory(decode.attach, specs[1], 0) as ours,
        BlockingPrefill(prefill.attach, specs[0]) as source,
        BlockingDecode(decode.attach, specs[1]) as target,
    ):
        cache = theirs.allocate(NHD, num_blocks=8)
        sent = cache.view(0, KvPart.KEY)
        got = ours.allocate(NHD, num_blocks=8).view(0, KvPart.KEY)
        bits(sent).random_(-(2**15), 2**15)
        for session in (source, target):
            session.register()
            session.ready()

        written = bits(sent).clone()
        offer = source.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
        overwrite_once_released(offer, cache, {"full": [3, 4]})
        source.extend(offer, 32, {"full": [3, 4]})
        fetch = target.fetch(offer.ticket, num_tokens=32, block_ids={"full": [1, 0]})
        source.seal(offer)
        fetched = taken_in_time(target.take_ended)
        released = taken_in_time(source.take_released)

        assert torch.equal(bits(got)[[1, 0]], written[[3, 4]])
        assert [(one.fetch_id, one.outcome) for one in fetched] == [
            (fetch.fetch_id, Outcome.COMPLETED)
        ]
        assert [(one.offer_id, one.outcome) for one in released] == [
            (offer.offer_id, Outcome.COMPLETED)
        ]
        assert target.take_ended() == source.take_released() == []


@pytest.mark.anyio
async def test_a_rank_that_asked_for_it_hears_what_the_control_session_hears(prefill, decode):
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
        target = Engine(spec, control, caches, NUM_BLOCKS)
        ours = target.some_blocks(4, 40)
        offer = await source.prefill.offer("r", num_tokens=40, block_ids=source.some_blocks(3, 40))

        completed = await control.fetch(offer.ticket, num_tokens=40, block_ids=ours).completed()
        failed = control.fetch(offer.ticket, num_tokens=40, block_ids=ours)
        await failure_of(failed)
        await until(lambda: len(heard) == 2)

        assert heard == [completed, failed.notice]


@pytest.mark.anyio
async def test_a_session_for_the_other_kind_of_agent_is_refused_with_both_named(decode):
    with pytest.raises(LocalError, match="for decode engines, not prefill"):
        async with PrefillSession(decode.attach, make_spec()):
            pass


def taken_in_time(take: Callable[[], list[Any]]) -> list[Any]:
    """The first batch that is not empty."""
    taken: list[Any] = []
    wait_until(lambda: taken.extend(take()) or taken, "something ended")
    return taken


@pytest.mark.anyio
async def test_status_says_which_engines_are_ready_and_what_is_held(prefill, decode):
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
    """Keeps the events of one offer or fetch or engine, in order, by endpoint."""

    def __init__(self) -> None:
        self.boots: set[str] = set()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def on_boot(self, endpoint: str, boot: str) -> None:
        self.boots.add(endpoint)

    def on_event(self, endpoint: str, event: Notice) -> None:
        self.events.append((event.op, dict(event.body)))

    def about(self, key: str, value: str) -> list[str]:
        return [op for op, body in self.events if body.get(key) == value]


@pytest.mark.anyio
async def test_a_subscriber_hears_the_life_of_a_handoff(prefill, decode):
    heard = Heard()
    endpoints = {agent.started["events"] for agent in (prefill, decode)}
    with new_context() as context:
        async with anyio.create_task_group() as tasks:
            subscriber = EventSubscriber(context, heard)
            tasks.start_soon(subscriber.run)
            for endpoint in endpoints:
                subscriber.add(endpoint)
            await agents_heard(heard, endpoints)
            async with pair(prefill.attach, decode.attach) as (source, target):
                offer = await source.prefill.offer(
                    "r", num_tokens=0, block_ids={"full": []}, sealed=False
                )
                await offer.seal()
                fetch = target.decode.fetch(offer.ticket, num_tokens=0, block_ids={"full": []})
                await fetch.completed()
                await event_heard(heard, "offer_id", offer.offer_id, "offer.released")
                await event_heard(heard, "fetch_id", fetch.fetch_id, "fetch.completed")
            await event_heard(heard, "engine_id", target.spec.engine_id, "engine.lost")
            tasks.cancel_scope.cancel()

    assert heard.about("offer_id", offer.offer_id) == [
        "offer.opened",
        "offer.sealed",
        "lease.granted",
        "lease.ended",
        "offer.released",
    ]
    assert heard.about("engine_id", target.spec.engine_id) == ["engine.ready", "engine.lost"]


async def agents_heard(heard: Heard, endpoints: set[str]) -> None:
    await until(lambda: heard.boots == endpoints)


async def event_heard(heard: Heard, key: str, value: str, op: str) -> None:
    await until(lambda: op in heard.about(key, value))


@pytest.mark.anyio
async def test_the_metrics_page_counts_what_was_done(prefill, decode):
    counts = {
        ("decode", "handoffs_total"): {"outcome": "completed"},
        ("decode", "read_bytes_total"): {},
        ("decode", "handoff_seconds_count"): {},
        ("prefill", "offers_total"): {"outcome": "completed"},
        ("prefill", "leases_total"): {"reason": "ended"},
    }
    agents = {"prefill": prefill, "decode": decode}

    def read() -> list[float]:
        return [agents[who].metric(name, **labels) for (who, name), labels in counts.items()]

    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        before = read()
        assert await works(source, target, num_tokens=16)
        gained = [now - then for now, then in zip(read(), before, strict=True)]

        assert gained == [1, 16 * 2 * 2 * 6 * 8 * 2, 1, 1, 1]
        assert decode.metric("engines") == prefill.metric("engines") == 1
        assert decode.metric("registered_bytes") > 0
        assert decode.metric("peers") >= 1
        assert decode.metric("outstanding_handles") == 0


@pytest.mark.anyio
async def test_both_agents_log_one_line_a_handoff_with_the_same_request_id(prefill, decode):
    request_id = uuid.uuid4().hex
    async with pair(prefill.attach, decode.attach) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer(request_id, num_tokens=0, block_ids={"full": []})
        fetch = target.decode.fetch(offer.ticket, num_tokens=0, block_ids={"full": []})
        await fetch.completed()
        await offer.released()

        assert len(prefill.says("offer.released", request_id=request_id)) == 1
        assert len(decode.says("handoff.completed", request_id=request_id)) == 1
        assert same(before, target.snapshot())


@pytest.mark.anyio
async def test_an_offer_that_nobody_reads_ends_when_its_time_is_up(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, _):
        offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, ttl_s=0.05)

        assert await offer.released() is Outcome.EXPIRED
