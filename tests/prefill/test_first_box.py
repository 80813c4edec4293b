"""The first box of an agent waits for torch, which takes nothing of the lease of its slot."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch

from kvbus.protocol import Packed
from tests.agents import until
from tests.prefill.inside import prefill_agent
from tests.prefill.leases import leased

pytestmark = pytest.mark.anyio

SLOT_LEASE_S, WAIT_S, MAX_WAIT_S = 5.0, 0.3, 60.0


class Import:
    """An import of torch that ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.there = threading.Event(), threading.Event()

    def run(self) -> None:
        self.begun.set()
        self.there.wait(MAX_WAIT_S)


@pytest.fixture
def slow_import(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """What the first thread that copies does first."""
    made = Import()
    monkeypatch.setattr("kvbus.agent.staging.copiers._import_torch", made.run)
    yield made
    made.there.set()


async def test_a_slot_is_leased_once_torch_is_there_and_for_as_much_longer_as_that_took(
    folder: Path, slow_import: Import
) -> None:
    replies: list[Packed] = []
    async with (
        prefill_agent(folder) as agent,
        agent.engine() as source,
        agent.reader() as reader,
        leased(agent, source, reader) as case,
    ):

        async def ask() -> None:
            replies.append(await case.packed(slot_lease_s=SLOT_LEASE_S))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(slow_import.begun.is_set)
            loop = asyncio.get_running_loop()
            begun_at = loop.time()
            await until(lambda: loop.time() > begun_at + WAIT_S)
            counts = agent.counts
            slow_import.there.set()

        assert (counts["packs"], counts["slots"]) == (0, 0)
        assert torch.equal(case.slot(replies[0]), case.wanted())
        assert SLOT_LEASE_S + WAIT_S <= replies[0].slot_lease_s < SLOT_LEASE_S + MAX_WAIT_S

        again = await case.packed(slot_lease_s=SLOT_LEASE_S)
        assert again.slot_lease_s == SLOT_LEASE_S
