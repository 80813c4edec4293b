"""Fixtures of the prefill agent's tests."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.agent import digests
from kvbus.agent.digests import digest_pieces
from kvbus.memory.copying import PagedMemory
from tests.prefill.inside import WITHIN_S, PrefillAgent, prefill_agent
from tests.prefill.leases import Case, leased


@pytest.fixture
async def agent(folder: Path) -> AsyncIterator[PrefillAgent]:
    """A prefill agent with four slots of 64 KiB."""
    async with prefill_agent(folder) as started:
        yield started


@pytest.fixture
async def case(agent: PrefillAgent) -> AsyncIterator[Case]:
    """An engine of that agent, and a leased offer."""
    async with (
        agent.engine() as source,
        agent.reader() as reader,
        leased(agent, source, reader) as made,
    ):
        yield made


class HeldUp:
    """Copies into slots, or digests, that stand in their thread until they may go on."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    async def wait_begun(self) -> None:
        assert await anyio.to_thread.run_sync(self.begun.wait, WITHIN_S)

    def late(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, as soon as it may go on."""

        def wait(*arguments: Any) -> Any:
            self.begun.set()
            assert self.may_end.wait(WITHIN_S)
            return call(*arguments)

        return wait


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    """From now on every copy stands still before it begins."""
    held = HeldUp()
    monkeypatch.setattr(PagedMemory, "gather", held.late(PagedMemory.gather))
    yield held
    held.may_end.set()


@pytest.fixture
def held_up_digests(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    """From now on digests are made in threads, and stand still before."""
    held = HeldUp()
    monkeypatch.setattr(digests, "SHORT_BYTES", 0)
    monkeypatch.setattr(digests, "digest_pieces", held.late(digest_pieces))
    yield held
    held.may_end.set()
