"""A decode agent maps the memory of a prefill engine of its machine, for as long as that lives."""

import asyncio
import errno
import gc
import os
import signal
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from kvbus.engine import Link, RankMemory
from kvbus.geometry import Segment, lay_out_rank
from kvbus.memory.libc import map_zeros_over
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import Outcome, Trace
from tests.support import inside_agents
from tests.support.agents import until, wait_until
from tests.support.engines import NUM_BLOCKS, engine, failure_of, make_spec, works
from tests.support.memories import NHD, Memory
from tests.unit.decode.neighbours import (
    Neighbours,
    before_each_copy,
    begin,
    bytes_at,
    bytes_of,
    files_at,
    neighbours,
)
from tests.unit.prefill.inside import given_back

pytestmark = pytest.mark.anyio

MANY_TOKENS = 600


@pytest.mark.parametrize(
    ("tp", "memory"), [(2, None), (1, Memory(direct=False))], ids=["registered", "unregistered"]
)
async def test_map_ends_with_its_engine(both: Neighbours, tp: int, memory: Memory | None) -> None:
    """Zeros are under the same addresses afterwards."""
    async with both.engines(tp=tp, memory=memory) as (source, target):
        assert await works(source, target)
        mapped = both.the_memory()
        assert not mapped.closed
        assert sorted(mapped.addresses) == list(range(tp))
        assert bytes_of(mapped, source)
        source.fill(99)
        assert bytes_of(mapped, source)
        assert both.state == "open"
        first, end = mapped.extents[0]
        assert bytes_at(first, end - first).any()
    await until(lambda: mapped.closed)
    assert not bytes_at(first, end - first).any()
    assert both.mapped == []
    assert both.lender.num_readers == 0
    assert "ended" in both.state


async def test_trace_of_mapped_copy_shows_it_as_transfer_of_reading(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        assert await works(source, target)
        for num_tokens in (16, MANY_TOKENS):  # copied at once, and in the data process
            offer, fetch = await begin(source, target, num_tokens)
            assert (await fetch.ended).path == "mapped"
            await offer.ended
            (spans,) = both.service.histories.remembered(Trace(fetch_id=fetch.fetch_id)).entries
            (reading,) = [span for span in spans if span.name == "reading"]
            (transfer,) = [span for span in spans if span.about]
            assert (transfer.name, transfer.about, transfer.depth) == ("copying", "transfer 0", 2)
            assert transfer.end_s is not None
            assert reading.end_s is not None
            assert reading.start_s <= transfer.start_s <= transfer.end_s <= reading.end_s


async def test_forgotten_route_leaves_its_bytes_to_running_copies(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        assert await works(source, target)
        memory = both.the_memory()
        (first, end), *_ = memory.extents
        files = files_at(first, end)
        both.forget_routes()
        assert not memory.closed
        assert bytes_of(memory, source)
        assert both.lender.num_readers == 1
        held = weakref.ref(memory)
        del memory
        await until(lambda: held() is None)  # a thread may still enter its pages
        assert files_at(first, end) == files != []
        await until(lambda: files_at(first, end) != files)
        await until(lambda: both.lender.num_readers == 0)
        assert await works(source, target)


async def test_rank_of_more_segments_than_one_message_is_mapped_whole(both: Neighbours) -> None:
    spec = make_spec()
    rank = lay_out_rank(spec, 0, NHD, num_blocks=NUM_BLOCKS)
    extra = tuple(Segment(f"more-{number}", 4096) for number in range(150))
    rank = replace(rank, segments=(*rank.segments, *extra))
    async with both.engines() as (_, target):
        attach = both.prefill.attach
        storages = {one.segment_id: SharedSegment(one.size_bytes) for one in rank.segments}
        for number, storage in enumerate(storages.values()):
            storage.view()[:] = number
        async with Link(attach, spec, memory=RankMemory(rank, storages)) as control:
            offer = await control.offer("r", num_tokens=16, block_ids={"full": [1]})
            fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
            await fetch.ended
            addresses = both.the_memory().addresses[0]
            local = both.prefill.runtime.agent.engines.engines[spec.engine_id]
            processes = list(local.processes)
            assert addresses.keys() == storages.keys()
            for number, one in enumerate(rank.segments):
                assert (bytes_at(addresses[one.segment_id], one.size_bytes) == number).all()
        await until(lambda: all(map(given_back, processes)))


async def test_memory_cut_by_engine_reads_as_zeros_and_route_is_remade(both: Neighbours) -> None:
    both.decode.agent.bus_errors.install()
    try:
        async with both.engines(memory=Memory(apart=True)) as (source, target):
            assert await works(source, target)
            memory = both.the_memory()
            (first, end), *_ = memory.extents
            assert bytes_of(memory, source)
            cut_what_torch_shares()
            assert not bytes_at(first, end - first).any()
            assert memory.closed
            await until(lambda: both.mapped == [])
            assert "cut" in both.state
    finally:
        both.decode.agent.bus_errors.restore()
    async with both.engines() as (source, target):
        assert await works(source, target)
        (route,) = both.routes
        both.the_memory().cut()
        assert await works(source, target)
        assert route not in list(both.routes)


def cut_what_torch_shares() -> None:
    """As the engine could, since these files cannot be sealed."""
    for fd in Path("/proc/self/fd").iterdir():
        if fd.is_symlink() and fd.readlink().name.startswith("torch_"):
            with suppress(OSError):  # what is lent is open for reading only
                os.ftruncate(int(fd.name), 0)


@contextmanager
def before_one_copy(both: Neighbours, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the memory before the next copy, here or in the data process."""
    is_over, data = Event(), both.decode.agent.data

    def end_once() -> None:
        if not is_over.is_set():
            is_over.set()
            memory = both.the_memory()
            memory.close("it was cut")
            for first, end in memory.extents:
                map_zeros_over(first, end - first)

    before_each_copy(patch, end_once)
    os.kill(data.status().pid, signal.SIGSTOP)

    def end_in_time() -> None:
        wait_until(lambda: is_over.is_set() or data.num_jobs > 0, "the copy has begun")
        loop.call_soon_threadsafe(end_once)
        is_over.wait()
        os.kill(data.status().pid, signal.SIGCONT)

    loop, thread = asyncio.get_running_loop(), Thread(target=end_in_time)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize("num_tokens", [16, MANY_TOKENS], ids=["here", "in the data process"])
async def test_copy_of_memory_ended_meanwhile_is_void_and_made_again(
    both: Neighbours, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    async with both.engines() as (source, target):
        assert await works(source, target)
        with monkeypatch.context() as patched, before_one_copy(both, patched):
            offer, fetch = await begin(source, target, num_tokens)
            fetched = await fetch.ended
            await offer.ended
        assert fetched.attempts == 2
        assert fetched.path == "mapped"


async def drop_the_peer(both: Neighbours, _: Any) -> None:
    for told in both.decode.agent.access.on_change:
        told(frozenset({""}))


async def end_the_memory(_: Neighbours, memory: Any) -> None:
    memory.shut_down()
    await until(lambda: memory.closed)


async def lose_the_engine(both: Neighbours, _: Any) -> None:
    (one,) = both.decode.agent.engines.engines.values()
    one.lost = True  # its memory goes a little later
    both.decode.service.on_engine_lost(one)


def when_mapped(
    both: Neighbours, happens: Callable[[Neighbours, Any], Awaitable[None]]
) -> list[Any]:
    """Have something happen once, in the middle of a handshake; what was mapped by then."""
    borrower, seen = both.routes.borrower, list[Any]()
    borrow = borrower.borrow

    async def borrow_and_go_on(*args: Any, **more: Any) -> Any:
        memory = await borrow(*args, **more)
        assert not isinstance(memory, str), memory
        if not seen:
            await happens(both, memory)
        seen.append(memory)
        return memory

    borrower.borrow = borrow_and_go_on  # type: ignore[method-assign]  # it lasts until then
    return seen


@pytest.mark.parametrize("happens", [drop_the_peer, end_the_memory])
async def test_no_route_is_kept_whose_source_went_during_its_handshake(
    both: Neighbours, happens: Callable[[Neighbours, Any], Awaitable[None]]
) -> None:
    async with both.engines() as (source, target):
        seen = when_mapped(both, happens)
        offer, fetch = await begin(source, target, 16)
        await fetch.ended
        assert await offer.ended is Outcome.COMPLETED
        assert await works(source, target)
        assert both.mapped == [seen[1]]
        assert not seen[1].closed


async def test_no_route_is_kept_into_engine_lost_during_handshake(both: Neighbours) -> None:
    async with both.engines() as (source, target):
        (local,) = both.decode.agent.engines.engines.values()
        when_mapped(both, lose_the_engine)
        with capture_logs() as lines:
            offer, _ = await begin(source, target, 16)
            await until(lambda: {"handshake.done", "handshake.refused"} & events(lines))
        kept = both.mapped
        assert kept == []
        local.lost = False  # it leaves now
        await offer.withdraw()
        await offer.ended


def events(lines: list[Any]) -> set[str]:
    return {line["event"] for line in lines if line.get("peer") != "decode"}


async def test_a_decode_agent_keeps_nothing_of_an_engine_that_has_left(both: Neighbours) -> None:
    """Its fetches were completed, or failed with errors whose frames refer to the engine."""
    async with both.engines() as (source, target):
        offer, fetch = await begin(source, target, MANY_TOKENS)
        await fetch.ended
        await offer.ended
        both.forget_routes()
        offer, fetch = await begin(source, target, MANY_TOKENS)
        await offer.withdraw()
        failure, left = await failure_of(fetch), target.spec.engine_id
        kind = type(both.decode.agent.engines.engines[left])

    def kept() -> list[Any]:
        gc.collect()
        found: list[Any] = [one for one in gc.get_objects() if type(one) is kind]
        return [one for one in found if one.engine_id == left]

    await until(lambda: not kept(), within_s=5.0)
    assert failure.stage == "resolving"


async def test_agents_outlive_failed_unmaps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(inside_agents, "spawner", inside_agents.thread_spawner)
    async with neighbours(folder) as both:
        theirs, ours = both.prefill.attach, both.decode.config.attach_path
        with capture_logs() as lines:
            async with engine(theirs, seed=1) as source, engine(ours, seed=2) as target:
                assert await works(source, target)
                monkeypatch.setattr("kvbus.memory.mapping.SegmentMapping.discard", refuse)
            await until(lambda: sum(line["event"] == "segment.kept" for line in lines) >= 2)
        monkeypatch.undo()
        async with both.engines() as (source, target):
            assert await works(source, target)
