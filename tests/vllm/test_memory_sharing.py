"""A worker's cache is moved to shared memory where it is, and described so that others read it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla")

from kvbus.engine.region_tensor import region_tensor
from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, RankSpec, validate_ranks
from kvbus.integrations.vllm.description import describe_engine, layer_number
from kvbus.integrations.vllm.memory_export import SharedRank, share_rank
from kvbus.memory import SegmentMapping
from tests.vllm.configured import Configured, attention, caches, configure, full, layers, window

HYBRID = layers(window(48), window(48), full(), window(48), window(48), full())


class Worker:
    """The caches of one rank, and a layer for each, as in a worker of vLLM."""

    def __init__(self, case: Configured, rank: int = 0) -> None:
        self.rank, self.case = rank, case
        self.config = case.workers[rank]
        self.caches = caches(self.config)
        self.engine: EngineSpec = describe_engine(case.vllm_config, self.config, engine_id="e")
        self.layers = {
            name: attention(case.vllm_config, cache) for name, cache in self.caches.items()
        }

    def share(self) -> SharedRank:
        context = self.case.vllm_config.compilation_config.static_forward_context
        context.clear()
        context.update(self.layers)
        return share_rank(
            self.engine,
            self.rank,
            vllm_config=self.case.vllm_config,
            kv_cache_config=self.config,
            kv_caches=self.caches,
        )

    def write(self, name: str, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the layer was given for those slots, by part: [slot, head, dim]."""
        layer = self.layers[name]
        rows = {part: torch.rand(len(slots), layer.kv_cache.shape[1], 32) for part in "kv"}
        layer.impl.do_kv_cache_update(layer, rows["k"], rows["v"], self.caches[name], slots)
        return rows


def read(
    engine: EngineSpec, shared: SharedRank, layer: int, part: str, slots: torch.Tensor
) -> torch.Tensor:
    """[slot, head, dim] as another process sees it that has only the file and the description."""
    (region,) = (
        one for one in shared.rank.regions if one.layers == (layer,) and one.parts == (part,)
    )
    storage = shared.storages[region.segment_id]
    mapping = SegmentMapping(os.dup(storage.fd), size_bytes=storage.size_bytes)
    tensor = region_tensor(engine, region, mapping.tensor)
    size = engine.group(region.group).block_size
    rows = tensor[slots // size, 0, 0, slots % size].clone()
    del tensor
    mapping.unmap()
    return rows


@pytest.mark.parametrize("specs", [layers(full(), full()), HYBRID], ids=["full", "hybrid"])
def test_what_layers_write_is_read_by_description(tmp_path: Path, specs: Any) -> None:
    worker = Worker(configure(tmp_path, specs))

    shared = worker.share()

    for number, (name, _) in enumerate(worker.caches.items()):
        slots = 32 * number + 32 + torch.randperm(32)  # a block of its own: groups share bytes
        rows = worker.write(name, slots)
        for part, written in rows.items():
            seen = read(worker.engine, shared, layer_number(name), part, slots)
            assert torch.equal(seen, written), (name, part)
    shared.close()


def test_the_tensors_of_vllm_keep_their_values_shapes_and_strides(tmp_path: Path) -> None:
    worker = Worker(configure(tmp_path, HYBRID))
    name, cache = next(iter(worker.caches.items()))
    cache.fill_(5)
    before = (cache.shape, cache.stride(), cache.data_ptr())

    shared = worker.share()

    bound = worker.layers[name].kv_cache
    assert (cache.shape, cache.stride()) == before[:2]
    assert bool((cache == 5).all())
    assert bound.data_ptr() == cache.data_ptr() != before[2]
    shared.close()


def test_all_layers_are_one_segment(tmp_path: Path) -> None:
    worker = Worker(configure(tmp_path, HYBRID))

    shared = worker.share()

    (segment,) = shared.rank.segments
    assert shared.storages.keys() == {segment.segment_id}
    assert segment.size_bytes == next(iter(worker.caches.values())).untyped_storage().nbytes()
    shared.close()


def test_sharing_again_gives_the_same_description_of_the_same_memory(tmp_path: Path) -> None:
    worker = Worker(configure(tmp_path, HYBRID))
    first = worker.share()
    address = next(iter(worker.caches.values())).data_ptr()

    second = worker.share()

    assert second.rank == first.rank
    assert next(iter(worker.caches.values())).data_ptr() == address
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("total", "tp_size", "first_heads"),
    [(4, 2, [0, 2]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 0, 1, 1]), (1, 2, [0, 0])],
)
def test_ranks_hold_the_heads_that_vllm_gives_them(
    tmp_path: Path, total: int, tp_size: int, first_heads: list[int]
) -> None:
    specs = layers(full(max(1, total // tp_size)))
    model = {"num_key_value_heads": total}
    case = configure(tmp_path, specs, model=model, tensor_parallel_size=tp_size)
    workers = [Worker(case, rank) for rank in range(tp_size)]

    shared = [worker.share() for worker in workers]

    ranks: list[RankSpec] = [one.rank for one in shared]
    validate_ranks(workers[0].engine, ranks)
    assert [rank.regions[0].first_head for rank in ranks] == first_heads
    for one in shared:
        one.close()


def test_stages_hold_the_layers_by_their_numbers_in_the_model(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(*[full()] * 4), pipeline_parallel_size=2)
    workers = [Worker(case, rank) for rank in (0, 1)]

    shared = [worker.share() for worker in workers]

    held = [{layer for region in one.rank.regions for layer in region.layers} for one in shared]
    assert set.union(*held) == {0, 1, 2, 3}
    validate_ranks(workers[0].engine, [one.rank for one in shared])
    for one in shared:
        one.close()


def test_a_layer_that_uses_the_cache_of_another_is_not_described(tmp_path: Path) -> None:
    worker = Worker(configure(tmp_path, layers(full(), full())))
    first = next(iter(worker.caches))
    worker.caches["model.layers.2.self_attn.attn"] = worker.caches[first]
    worker.layers["model.layers.2.self_attn.attn"] = worker.layers[first]

    shared = worker.share()

    assert {region.layers for region in shared.rank.regions} == {(0,), (1,)}
    shared.close()


@pytest.mark.parametrize("seen_by", ["cache", "layer"])
def test_a_backend_that_splits_blocks_is_refused_before_memory_moves(
    tmp_path: Path, seen_by: str
) -> None:
    worker = Worker(configure(tmp_path, layers(full())))
    ((name, cache),) = worker.caches.items()
    split = cache.view(32, 4, 16, 64)
    if seen_by == "cache":
        worker.caches[name] = split
    else:
        worker.layers[name].kv_cache = split
    before = cache.data_ptr()

    with pytest.raises(GeometryError, match="Lower --block-size"):
        worker.share()

    assert cache.data_ptr() == before


def test_a_cache_that_cannot_be_described_is_not_moved(tmp_path: Path) -> None:
    worker = Worker(configure(tmp_path, layers(full(), full())))
    *_, last = worker.layers.values()
    last.impl.do_kv_cache_update = lambda *_: None
    before = {name: cache.data_ptr() for name, cache in worker.caches.items()}

    with pytest.raises(GeometryError, match=r"model\.layers\.1\."):
        worker.share()

    assert {name: cache.data_ptr() for name, cache in worker.caches.items()} == before
