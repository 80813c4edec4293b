"""A decode agent maps the memory of a prefill engine of its machine, for as long as that lives."""

import os
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.geometry import Segment, lay_out_rank
from kvbus.memory import SharedSegment
from kvbus.protocol import Handshake, HandshakeDone, MemorySocket
from kvbus_decode.peer.borrowing import is_near
from tests.agents import until
from tests.decode.lent import bytes_at, bytes_of, files_at, neighbours
from tests.engines import NUM_BLOCKS, engine, make_spec, works
from tests.memories import NHD, Memory
from tests.prefill.inside import given_back
from tests.vectors.examples import ROOMS

pytestmark = pytest.mark.anyio


async def test_a_handoff_leaves_the_prefill_engines_memory_mapped_byte_for_byte(folder) -> None:
    async with neighbours(folder) as both, both.engines(tp=2) as (source, target):
        assert await works(source, target)

        memory = both.the_memory()
        assert memory.is_open
        assert sorted(memory.addresses) == [0, 1]
        assert bytes_of(memory, source)
        source.fill(99)
        assert bytes_of(memory, source)
        assert both.state == "open"


@pytest.mark.parametrize("mapped", [True, False])
async def test_agents_of_one_machine_know_it_also_where_nothing_is_lent(folder, mapped) -> None:
    async with (
        neighbours(folder, prefill={"mapped": mapped}) as both,
        both.engines() as (source, target),
    ):
        assert await works(source, target)

        assert [source.near for route in both.all_routes for source in route.sources] == [True]


@pytest.mark.parametrize("socket", [None, MemorySocket(machine="another kernel"), MemorySocket()])
def test_an_agent_that_does_not_say_that_it_is_here_is_not_near(socket) -> None:
    _, done = ROOMS["peer"][Handshake]
    assert isinstance(done, HandshakeDone)

    assert not is_near(replace(done, memory_socket=socket))


async def test_the_end_of_the_engine_puts_zeros_under_the_same_addresses(folder) -> None:
    async with neighbours(folder) as both:
        async with both.engines() as (source, target):
            assert await works(source, target)
            memory = both.the_memory()
            first, end = memory.extents[0]
            assert bytes_at(first, end - first).any()

        await until(lambda: not memory.is_open)

        assert not bytes_at(first, end - first).any()
        assert both.mapped == []
        assert both.lender.num_readers == 0
        assert "ended" in both.state


async def test_a_route_that_nobody_wants_leaves_the_bytes_to_who_still_copies(folder) -> None:
    async with neighbours(folder) as both, both.engines() as (source, target):
        assert await works(source, target)
        memory = both.the_memory()

        both.forget_routes()

        assert memory.is_open
        assert bytes_of(memory, source)
        assert both.lender.num_readers == 1
        held = weakref.ref(memory)
        del memory
        await until(lambda: held() is None)  # a thread may still enter its pages
        await until(lambda: both.lender.num_readers == 0)
        assert await works(source, target)


async def test_the_event_loop_does_not_unmap_what_it_was_the_last_to_hold(folder) -> None:
    async with neighbours(folder) as both, both.engines() as (source, target):
        assert await works(source, target)
        (first, end), *_ = both.the_memory().extents
        mapped = files_at(first, end)
        assert mapped

        both.forget_routes()

        assert both.routes.borrower.num_bytes == 0
        assert files_at(first, end) == mapped
        await until(lambda: files_at(first, end) != mapped)


async def test_two_routes_to_one_engine_share_what_is_mapped(folder) -> None:
    async with neighbours(folder) as both, both.engines() as (source, target):
        assert await works(source, target)
        async with engine(
            DecodeSession, both.decode.config.attach_path, make_spec(), seed=3
        ) as other:
            assert await works(source, other)

            one, another = both.mapped
            assert one is another
            assert both.lender.num_readers == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prefill": {"mapped": False}}, "closed by the prefill agent's config (mapped = false)"),
        ({"decode": {"mapped": False}}, "closed by the decode agent's config (mapped = false)"),
        ({"decode": {"path": "direct"}}, "closed by the decode agent's config (path = 'direct')"),
    ],
)
async def test_what_config_closes_is_read_with_nixl_and_says_so(folder, settings, reason) -> None:
    async with neighbours(folder, **settings) as both, both.engines() as (source, target):
        assert await works(source, target)

        assert both.mapped == [None]
        assert reason in both.state


async def test_unregistered_memory_is_mapped_as_well(folder) -> None:
    async with (
        neighbours(folder) as both,
        both.engines(memory=Memory(direct=False)) as (source, target),
    ):
        assert await works(source, target)

        assert bytes_of(both.the_memory(), source)


async def test_a_rank_of_more_segments_than_a_message_carries_is_mapped_whole(folder) -> None:
    spec, count = make_spec(), 150
    rank = lay_out_rank(spec, 0, NHD, num_blocks=NUM_BLOCKS)
    extra = tuple(Segment(f"more-{number}", 4096) for number in range(count))
    with ExitStack() as stack:
        sizes = {one.segment_id: one.size_bytes for one in (*rank.segments, *extra)}
        storages = {name: stack.enter_context(SharedSegment(size)) for name, size in sizes.items()}
        for number, storage in enumerate(storages.values()):
            storage.view()[:] = number
        async with neighbours(folder) as both, both.engines() as (_, target):
            attach = both.prefill.attach
            async with (
                PrefillSession(attach, spec) as control,
                MemorySession(attach, spec, 0) as one,
            ):
                await one.register(replace(rank, segments=(*rank.segments, *extra)), storages)
                await control.register()
                await control.ready()
                offer = await control.offer("r", num_tokens=16, block_ids={"full": [1]})
                fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
                await fetch.completed()

                memory = both.the_memory()
                assert len(memory.extents) == count + 1
                for number, name in enumerate(storages):
                    assert (bytes_at(memory.addresses[0][name], sizes[name]) == number).all()
                local = both.prefill.runtime.agent.engines.engines[spec.engine_id]
                processes = list(local.processes)
            await until(lambda: all(given_back(process) for process in processes))


async def test_memory_that_its_engine_cuts_reads_as_zeros_and_is_open_no_more(folder) -> None:
    async with neighbours(folder) as both:
        both.decode.bus_errors.install()
        try:
            async with both.engines(memory=Memory(apart=True)) as (source, target):
                assert await works(source, target)
                memory = both.the_memory()
                (first, end), *_ = memory.extents
                assert bytes_of(memory, source)

                cut_what_torch_shares()

                assert not np.array(bytes_at(first, end - first)).any()
                assert not memory.is_open
                await until(lambda: both.mapped == [])
                assert "cut" in both.state
        finally:
            both.decode.bus_errors.restore()


def cut_what_torch_shares() -> None:
    """As the engine could, since these files cannot be sealed."""
    for fd in Path("/proc/self/fd").iterdir():
        if fd.is_symlink() and fd.readlink().name.startswith("torch_"):
            with suppress(OSError):  # what is lent is open for reading only
                os.ftruncate(int(fd.name), 0)
