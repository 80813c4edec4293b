"""Whole handoffs into memory of a GPU, and out of it, all but the CUDA calls real."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.handoffs.conftest import SLOTS
from tests.support.agents import until
from tests.support.engines import engine, hand_over
from tests.support.gpu_stand_in import StandIn, engine_on, gpu
from tests.unit.decode.neighbours import Neighbours, decode_agent
from tests.unit.prefill.inside import given_back, prefill_agent

pytestmark = pytest.mark.anyio
__all__ = ["gpu"]


@pytest.mark.parametrize("places", [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")], ids="-".join)
async def test_every_byte_arrives_through_slots_of_each_sides_place(
    folder: Path, gpu: StandIn, places: tuple[str, str]
) -> None:
    folders = [folder / name for name in "pd"]  # short, as sockets lie in them
    for path in folders:
        path.mkdir(mode=0o700)
    prefill_place, decode_place = (
        partial[Any](engine_on, gpu) if place == "gpu" else engine for place in places
    )
    async with (
        prefill_agent(folders[0], **SLOTS) as prefill,
        decode_agent(folders[1], path="packed", digest="full", **SLOTS) as decode,
    ):
        async with (
            prefill_place(prefill.attach, seed=1) as source,
            decode_place(decode.config.attach_path, seed=2) as target,
        ):
            for num_tokens, first_token in ((200, 0), (71, 60), (13, 5)):
                fetched = await hand_over(source, target, num_tokens, first_token=first_token)

                assert fetched.path == "packed"
            assert gpu.num_copies >= 3 * places.count("gpu")
            assert len(gpu.slots) == gpu.num_open == places.count("gpu")
            processes = Neighbours(prefill, decode).processes()
        await until(lambda: not gpu.num_open and all(map(given_back, processes)))
