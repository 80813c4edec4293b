"""An agent with remote ranks that is older than the home: it reads, and proves nothing."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed
from tests.agents import AgentProcess
from tests.e2e.spread_engines import spread_engine
from tests.engines import Engine, engine, make_spec, works
from tests.faults.conftest import Started

pytestmark = pytest.mark.anyio

OLDER = Path(__file__).parent / "processes" / "older_decode_agent.py"


@asynccontextmanager
async def with_older_sibling(
    fresh: Started, **settings: str
) -> AsyncIterator[tuple[Engine, Engine, AgentProcess]]:
    """Two engines; rank 1 of the decode engine is at an older agent, its home has ``settings``."""
    prefill, home, older = fresh.prefill(), fresh.decode(**settings), fresh.decode()
    older.runner = (sys.executable, str(OLDER))
    fresh.start(prefill, home, older)
    async with (
        engine(PrefillSession, prefill.attach, make_spec(tp=2), seed=1) as source,
        spread_engine(DecodeSession, [home, older], make_spec(tp=2), seed=2) as target,
    ):
        yield source, target, older


async def test_it_reads_for_a_newer_home(fresh: Started) -> None:
    async with with_older_sibling(fresh) as (source, target, _):
        assert await works(source, target)


async def test_a_home_that_compares_does_not_take_its_word_for_bytes_that_were_not(
    fresh: Started,
) -> None:
    async with with_older_sibling(fresh, digest="full") as (source, target, older):
        with pytest.raises(FetchFailed) as failed:
            await works(source, target)

        assert failed.value.code is ErrorCode.INCOMPATIBLE
        assert f"decode agent at {older.peer} makes no digests" in failed.value.message
        assert "run a newer kvbus there" in failed.value.message
