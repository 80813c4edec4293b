"""The views of a cache are the bytes of its regions; that there are no huge pages is told once."""

import logging
from collections.abc import Iterator

import pytest
import torch

from kvbus.engine import KvCache
from kvbus.engine.memory import allocate_storage
from kvbus.geometry import EngineSpec, KvLayout, lay_out_rank
from kvbus.memory import GIVING_WORDS, HugePages, SharedSegment, shmem_word
from tests.engine.recording import FULL, SPEC, STATE, WINDOW
from tests.memories import NHD


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    with SharedSegment(1 << 16, name="kvbus-test") as segment:
        yield segment


def test_a_state_is_seen_as_bytes_of_units_by_block(segment: SharedSegment) -> None:
    engine = EngineSpec("e", "m", 2, (STATE,))
    rank = lay_out_rank(engine, 1, KvLayout.parse("NHD"), num_blocks=3)
    segment.tensor[: rank.segments[0].size_bytes].random_(0, 256)

    cache = KvCache(engine, rank, segment.tensor)

    conv, norm = cache.view(2, "conv"), cache.view(2, "norm")
    assert (conv.dtype, norm.dtype) == (torch.uint8, torch.uint8)
    assert (tuple(conv.shape), tuple(norm.shape)) == ((3, 1, 2, 6), (3, 1, 1, 3))
    regions = {region.parts: region.offset_bytes for region in rank.regions}
    start = regions["conv",]
    assert torch.equal(conv.flatten(), segment.tensor[start : start + 36])


@pytest.mark.parametrize("cross_layer", [False, True])
def test_a_pipeline_stage_has_views_of_its_own_layers_only(
    cross_layer: bool, segment: SharedSegment
) -> None:
    engine = EngineSpec("e", "m", 1, (FULL, WINDOW, STATE), pp_size=3)
    layout = KvLayout.parse("HND", cross_layer=cross_layer)
    rank = lay_out_rank(engine, 1, layout, num_blocks={"full": 2, "window": 4, "state": 2})

    cache = KvCache(engine, rank, segment.tensor)

    assert tuple(cache.view(1, "k").shape) == (4, 4, 2, 8)
    for layer, part in ((0, "k"), (2, "conv"), (1, "latent")):
        with pytest.raises(KeyError):
            cache.view(layer, part)


def test_views_of_all_groups_of_a_rank_share_no_byte(segment: SharedSegment) -> None:
    rank = lay_out_rank(SPEC, 0, KvLayout.parse("NHD"), num_blocks=2)
    cache = KvCache(SPEC, rank, segment.tensor)
    places = [(0, "k"), (0, "v"), (1, "k"), (1, "v"), (2, "conv"), (2, "norm")]
    for number, place in enumerate(places, start=1):
        view = cache.view(*place)
        view.copy_(torch.full(view.shape, number).to(view.dtype))

    found = {place: set(cache.view(*place).flatten().tolist()) for place in places}

    assert found == {place: {number} for number, place in enumerate(places, start=1)}


@pytest.mark.parametrize("asked", [False, "advise"])
def test_a_machine_without_huge_pages_is_logged_if_they_were_asked_for(
    asked: HugePages, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvbus.engine"):
        storage = allocate_storage(SPEC, lay_out_rank(SPEC, 0, NHD, num_blocks=4), huge_pages=asked)
        storage.close()

    lines = [record.getMessage() for record in caplog.records]
    must_tell = asked == "advise" and shmem_word() not in GIVING_WORDS
    assert len(lines) == must_tell
    assert all("shmem_enabled" in line and SPEC.engine_id in line for line in lines)
