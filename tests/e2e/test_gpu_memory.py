"""Whole handoffs into memory of a GPU, and out of it, all but the CUDA calls real."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.agent.engines.local_engine import EngineProcess
from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from tests.agents import until
from tests.decode.neighbours import decode_agent
from tests.e2e.shapes import SLOT_BYTES, hand_over
from tests.engines import engine, failure_of
from tests.expected import num_pieces_compared
from tests.gpu_stand_in import engine_on, gpu
from tests.prefill.inside import prefill_agent

pytestmark = pytest.mark.anyio
__all__ = ["gpu"]

SLOTS = {"slot_bytes": SLOT_BYTES, "staging_bytes": 4 * SLOT_BYTES}


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    """Two folders with short paths, as Linux allows 107 bytes for a Unix socket's."""
    paths = [Path(tempfile.mkdtemp(prefix="kv-")) for _ in range(2)]
    yield paths
    for path in paths:
        shutil.rmtree(path)


@pytest.mark.parametrize("places", [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")], ids="-".join)
async def test_every_byte_arrives_through_the_slots_of_each_sides_place(folders, gpu, places):
    def made(place, kind, attach, seed):
        if place == "gpu":
            return engine_on(gpu, kind, attach, seed=seed)
        return engine(kind, attach, seed=seed)

    async with (
        prefill_agent(folders[0], **SLOTS) as prefill,
        decode_agent(folders[1], path="packed", digest="full", **SLOTS) as decode,
    ):
        async with (
            made(places[0], PrefillSession, prefill.attach, 1) as source,
            made(places[1], DecodeSession, decode.config.attach_path, 2) as target,
        ):
            for slots in gpu.slots:
                slots._segment.tensor.fill_(255)
            num_compared = 0
            for num_tokens, first_token in ((200, 0), (71, 60), (13, 5)):
                num_compared += num_pieces_compared(source, target, num_tokens, first_token)
                fetched = await hand_over(source, target, num_tokens, first_token=first_token)

                assert fetched.path == "packed"
            assert gpu.num_copies >= 3 * places.count("gpu")
            assert len(gpu.slots) == gpu.num_open == places.count("gpu")
            assert all(slots._segment.tensor.ne(255).any() for slots in gpu.slots)
            assert decode.service.counts()["slots"] == 0
            registry = decode.agent.metrics.registry
            equal = registry.get_sample_value("kvbus_digests_total", {"outcome": "equal"})
            assert equal == num_compared

            engines = [agent.agent.engines for agent in (prefill.runtime, decode)]
            processes = [
                p for known in engines for e in known.engines.values() for p in e.processes
            ]
        await until(lambda: not gpu.num_open and all(map(unmapped, processes)))


def unmapped(process: EngineProcess) -> bool:
    """Whether nothing of the process's shared memory is mapped here any more."""
    return all(getattr(one, "_pages", None) is None for one in process.segments.mappings.values())


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_slot_is_read_as_the_kind_of_memory_that_it_is_of(folders, gpu, side):
    async with (
        prefill_agent(folders[0], **SLOTS) as prefill,
        decode_agent(folders[1], path="packed", **SLOTS) as decode,
    ):
        async with (
            engine_on(gpu, PrefillSession, prefill.attach, seed=1) as source,
            engine_on(gpu, DecodeSession, decode.config.attach_path, seed=2) as target,
        ):
            gpu.slots[side == "decode"].memory = "VRAM"  # which NIXL was not told
            offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
            fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
            failure = await failure_of(fetch)
            await offer.withdraw()
        await until(lambda: not gpu.num_open)

    assert failure.code is ErrorCode.TRANSFER_FAILED
