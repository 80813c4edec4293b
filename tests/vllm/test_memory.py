"""A worker's cache is moved to shared memory where it is, and described so that others read it.

Where its layers write is measured; what strides cannot say is refused before anything is moved.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla")

from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvbus.engine.region_tensor import region_tensor
from kvbus.errors import GeometryError
from kvbus.geometry import AxisName, EngineSpec, validate_ranks
from kvbus.integrations.vllm.description import describe_engine
from kvbus.integrations.vllm.memory_export import SharedRank, share_rank
from kvbus.memory import SegmentMapping
from tests.vllm.configured import (
    Configured,
    attention,
    caches,
    configure,
    full,
    latent_attention,
    layers,
    window,
)

B, T, H, D = AxisName.BLOCK, AxisName.TOKEN, AxisName.HEAD, AxisName.DIM
HYBRID = layers(window(48), window(48), full(), window(48), window(48), full())
Write = Callable[..., None]
Places = Mapping[str, tuple[int, Mapping[AxisName, int]]]
"""By part: bytes from the cache's beginning, and of a step of each axis."""


class Worker:
    """The caches of one rank, and a layer for each, as in a worker of vLLM."""

    def __init__(self, case: Configured, rank: int = 0, *, isa: str = "vec") -> None:
        self.rank, self.case = rank, case
        self.config = case.workers[rank]
        self.caches = caches(self.config)
        self.engine: EngineSpec = describe_engine(case.vllm_config, self.config, engine_id="e")
        self.layers = {
            name: attention(case.vllm_config, cache, isa=isa) for name, cache in self.caches.items()
        }

    def has(self, cache: torch.Tensor, layer: Any) -> None:
        """Its only layer writes into ``cache``."""
        (name,) = self.layers
        self.caches[name], self.layers[name] = cache, layer

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

    def places(self) -> Places:
        """Where its only layer has each part."""
        shared = self.share()
        shared.close()
        return {
            region.parts[0]: (
                region.offset_bytes,
                {axis.name: axis.stride_bytes for axis in region.axes},
            )
            for region in shared.rank.regions
        }

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
    storage: Any = shared.storages[region.segment_id]
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

    for number, name in enumerate(worker.caches):
        slots = 32 * number + 32 + torch.randperm(32)  # a block of its own: groups share bytes
        for part, written in worker.write(name, slots).items():
            seen = read(worker.engine, shared, int(name.split(".")[2]), part, slots)
            assert torch.equal(seen, written), (name, part)
    shared.close()


def test_tensors_keep_their_values_shapes_and_strides_and_become_one_segment(
    tmp_path: Path,
) -> None:
    worker = Worker(configure(tmp_path, HYBRID))
    name, cache = next(iter(worker.caches.items()))
    cache.fill_(5)
    before = (cache.shape, cache.stride(), cache.data_ptr())
    random = torch.get_rng_state()

    first = worker.share()
    address = cache.data_ptr()
    again = worker.share()

    assert (cache.shape, cache.stride()) == before[:2]
    assert bool((cache == 5).all())
    assert worker.layers[name].kv_cache.data_ptr() == cache.data_ptr() == address != before[2]
    assert again.rank == first.rank
    (segment,) = first.rank.segments
    assert segment.size_bytes == cache.untyped_storage().nbytes()
    assert torch.equal(torch.get_rng_state(), random)
    first.close()
    again.close()


@pytest.mark.parametrize(
    ("total", "tp_size", "first_heads"),
    [(4, 2, [0, 2]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 0, 1, 1]), (1, 2, [0, 0])],
)
def test_ranks_hold_the_heads_that_vllm_gives_them(
    tmp_path: Path, total: int, tp_size: int, first_heads: list[int]
) -> None:
    specs, model = layers(full(max(1, total // tp_size))), {"num_key_value_heads": total}
    case = configure(tmp_path, specs, model=model, tensor_parallel_size=tp_size)
    workers = [Worker(case, rank) for rank in range(tp_size)]

    shared = [worker.share() for worker in workers]

    validate_ranks(workers[0].engine, [one.rank for one in shared])
    assert [one.rank.regions[0].first_head for one in shared] == first_heads
    for one in shared:
        one.close()


def test_stages_hold_the_layers_by_their_numbers_in_the_model(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(*[full()] * 4), pipeline_parallel_size=2)
    workers = [Worker(case, rank) for rank in (0, 1)]

    shared = [worker.share() for worker in workers]

    validate_ranks(workers[0].engine, [one.rank for one in shared])
    held = [sorted({one.layers for one in each.rank.regions}) for each in shared]
    assert held == [[(0,), (2,)], [(1,), (3,)]]
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("size", "dim", "isa"), [(32, 32, "vec"), (64, 128, "vec"), (32, 80, "vec16")]
)
def test_the_cpu_backend_has_keys_by_element_and_values_by_token(
    tmp_path: Path, dtype: str, size: int, dim: int, isa: str
) -> None:
    spec = full(block_size=size, head_size=dim, dtype=getattr(torch, dtype))
    case = configure(tmp_path, layers(spec), dtype=dtype, block_size=size)

    found = Worker(case, isa=isa).places()

    one = 4 if dtype == "float32" else 2
    outer = {B: 8 * size * dim * one, H: 2 * size * dim * one}
    assert found["k"] == (0, {**outer, D: size * one, T: one})
    assert found["v"] == (size * dim * one, {**outer, T: dim * one, D: one})


@pytest.mark.skipif(
    "amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AMX"
)
def test_the_tiles_of_amx_are_refused_with_the_layer_and_what_to_do(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(full(dtype=torch.bfloat16)), dtype="bfloat16")

    with pytest.raises(GeometryError, match=r"no strides .* 'k' .* --dtype float16") as refused:
        Worker(case, isa="amx").share()

    assert refused.value.detail["layer"] == "model.layers.0.self_attn.attn"


def test_a_latent_is_the_compressed_kv_and_the_rotated_key_in_one_row(tmp_path: Path) -> None:
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    worker = Worker(configure(tmp_path, layers(mla), block_size=16))
    cache = torch.zeros(16, 1, 16, 576)
    worker.has(cache, latent_attention(cache, kv_lora_rank=512))

    assert worker.places() == {"latent": (0, {B: 16 * 576 * 4, T: 576 * 4, D: 4})}


def writing(write: Write | None, cache: torch.Tensor) -> Any:
    writes = {} if write is None else {"do_kv_cache_update": write}
    return SimpleNamespace(impl=SimpleNamespace(**writes), kv_cache=cache)


def test_any_order_of_axes_is_found(tmp_path: Path) -> None:
    cache = torch.zeros(16, 2, 32, 4, 32).permute(0, 3, 2, 4, 1)  # [block, head, token, dim, part]

    def write(_: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
        for slot, k, v in zip(slots.tolist(), key, value, strict=True):
            cache[slot // 32, :, slot % 32, :, 0] = v
            cache[slot // 32, :, slot % 32, :, 1] = k

    worker = Worker(configure(tmp_path, layers(full())))
    worker.has(cache, writing(write, cache))

    found = worker.places()

    strides = {B: 2 * 32 * 4 * 32 * 4, T: 4 * 32 * 4, H: 32 * 4, D: 4}
    assert found == {"v": (0, strides), "k": (32 * 4 * 32 * 4, strides)}


def plain(_: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
    """What the writers below do wrong in one place each."""
    flat = cache[..., :64].view(-1, 4, 32, 2, 32)  # block, head, token, part, dim
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        flat[slot // 32, :, slot % 32, 0] = k
        flat[slot // 32, :, slot % 32, 1] = v


def swizzled(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    """Pairs of elements change places in every other token from the third on."""
    odd = (slots % 4 == 3)[:, None, None]
    swapped = key.view(*key.shape[:-1], -1, 2).flip(-1).reshape(key.shape)
    plain(layer, torch.where(odd, swapped, key), value, cache, slots)


def last_block_apart(layer: Any, key: torch.Tensor, value: Any, cache: Any, slots: Any) -> None:
    """Blocks do not follow each other as the first two do."""
    plain(layer, key, value, cache, torch.where(slots >= 64, (slots - 64 + 16) % 32 + 64, slots))


def with_scales(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: Any) -> None:
    plain(layer, key, value, cache, slots)
    for slot, k in zip(slots.tolist(), key, strict=True):
        cache[slot // 32, :, slot % 32, 64] = k.amax(-1) // 2


def failing(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    raise RuntimeError("no kernel")


REFUSED: Mapping[str, tuple[str, Write | None]] = {
    "swizzled": ("no strides describe where 'k' is", swizzled),
    "last block apart": ("no strides describe where 'k' is", last_block_apart),
    "scaled": ("no strides describe where 'k' is", lambda a, k, v, *b: plain(a, k * 2, v, *b)),
    "negative": ("'k' runs backwards", lambda a, k, v, *b: plain(a, k.flip(-1), v, *b)),
    "twice": ("'k' is written to 2 places", lambda a, k, v, *b: plain(a, k, k + v, *b)),
    "nothing": ("'k' is written to 0 places", lambda *_: None),
    "failing": ("does not write it: no kernel", failing),
    "scales beside it": ("holds more than the KV", with_scales),
    "while it attends": ("while it attends", None),
}


def test_the_plain_writer_is_described(tmp_path: Path) -> None:
    worker, cache = Worker(configure(tmp_path, layers(full()))), torch.zeros(16, 4, 32, 64)
    worker.has(cache, writing(plain, cache))

    assert worker.places().keys() == {"k", "v"}


@pytest.mark.parametrize("how", REFUSED)
def test_what_strides_cannot_say_is_refused_and_not_moved(tmp_path: Path, how: str) -> None:
    match, write = REFUSED[how]
    cache = torch.zeros(16, 4, 32, 65 if write is with_scales else 64)
    worker = Worker(configure(tmp_path, layers(full())))
    worker.has(cache, writing(write, cache))
    before = cache.data_ptr()

    with pytest.raises(GeometryError, match=match) as refused:
        worker.share()

    assert refused.value.detail["layer"] == "model.layers.0.self_attn.attn"
    assert cache.data_ptr() == before


def test_one_layer_that_cannot_be_described_leaves_all_where_they_are(tmp_path: Path) -> None:
    worker = Worker(configure(tmp_path, layers(full(), full())))
    *_, last = worker.layers.values()
    last.impl.do_kv_cache_update = lambda *_: None
    before = [cache.data_ptr() for cache in worker.caches.values()]

    with pytest.raises(GeometryError, match=r"model\.layers\.1\."):
        worker.share()

    assert [cache.data_ptr() for cache in worker.caches.values()] == before


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
