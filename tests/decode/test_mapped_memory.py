"""A decode agent maps the memory of a prefill engine of its machine, for as long as that lives."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.engine import DecodeSession
from tests.agents import until
from tests.decode.lent import bytes_at, bytes_of, neighbours
from tests.engines import engine, make_spec, works

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The agents need the asyncio backend."""
    return "asyncio"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as Linux allows 107 bytes for a Unix socket's."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


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
        assert held() is None
        await until(lambda: both.lender.num_readers == 0)
        assert await works(source, target)


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
        ({"prefill": {"mapped": False}}, "lends nothing: closed there by config (mapped = false)"),
        ({"decode": {"mapped": False}}, "closed here by config (mapped = false)"),
        ({"decode": {"path": "direct"}}, "closed here by config (path = 'direct')"),
    ],
)
async def test_what_config_closes_is_read_with_nixl_and_says_so(folder, settings, reason) -> None:
    async with neighbours(folder, **settings) as both, both.engines() as (source, target):
        assert await works(source, target)

        assert both.mapped == [None]
        assert reason in both.state
