"""Whole handoffs into memory of a GPU, and out of it, all but the CUDA calls real."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from tests.agents import until
from tests.decode.neighbours import Neighbours, decode_agent
from tests.engines import Engine, engine, failure_of
from tests.gpu_stand_in import OpenedHandle, StandIn, engine_on, gpu
from tests.prefill.inside import is_mapped, prefill_agent
from tests.process.conftest import SLOTS
from tests.process.shapes import hand_over

pytestmark = pytest.mark.anyio
__all__ = ["gpu"]


@pytest.fixture
def folders(folder: Path) -> list[Path]:
    """Two folders with short paths, as Linux allows 107 bytes for a Unix socket's."""
    paths = [folder / name for name in "pd"]
    for path in paths:
        path.mkdir(mode=0o700)
    return paths


@pytest.mark.parametrize("places", [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")], ids="-".join)
async def test_every_byte_arrives_through_the_slots_of_each_sides_place(
    folders: list[Path], gpu: StandIn, places: tuple[str, str]
) -> None:
    def made(
        place: str, kind: type[PrefillSession] | type[DecodeSession], attach: Path, seed: int
    ) -> AbstractAsyncContextManager[Engine]:
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
            for num_tokens, first_token in ((200, 0), (71, 60), (13, 5)):
                fetched = await hand_over(source, target, num_tokens, first_token=first_token)

                assert fetched.path == "packed"
            assert gpu.num_copies >= 3 * places.count("gpu")
            assert len(gpu.slots) == gpu.num_open == places.count("gpu")
            assert decode.service.counts()["slots"] == 0
            of_hosts = [
                mapping
                for process in Neighbours(prefill, decode).processes()
                for mapping in process.segments.mappings.values()
                if not isinstance(mapping, OpenedHandle)
            ]
        await until(lambda: not gpu.num_open and not any(map(is_mapped, of_hosts)))


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_slot_is_read_as_the_kind_of_memory_that_it_is_of(
    folders: list[Path], gpu: StandIn, side: str
) -> None:
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
