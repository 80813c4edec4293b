"""A worker's cache is moved to shared memory where it is, and described so that others read it.

Where its layers write is measured; what strides cannot say is refused before anything is moved.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla")

from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvbus.engine import RankMemory
from kvbus.engine.rank_memory import region_tensor
from kvbus.errors import GeometryError
from kvbus.geometry import AxisName, EngineSpec, validate_ranks
from kvbus.integrations.vllm.describe import describe_engine
from kvbus.integrations.vllm.params import Description
from kvbus.integrations.vllm.worker import share_rank
from kvbus.memory.mapping import SegmentMapping
from tests.e2e.vllm.configured import Configured, configure, full, layers, window

B, T, H, D = AxisName.BLOCK, AxisName.TOKEN, AxisName.HEAD, AxisName.DIM
HYBRID = layers(window(48), window(48), full(), window(48), window(48), full())
NAME = next(iter(layers(full())))
Write = Callable[..., None]
SCALES = ("_k_scale_float", "_v_scale_float")
"""vLLM's names, by which kernels find them."""


class Worker:
    """The caches of one rank, and a layer for each, as in a worker of vLLM."""

    def __init__(self, case: Configured, rank: int = 0, *, isa: str = "vec") -> None:
        self.rank, self.case = rank, case
        self.caches: dict[str, torch.Tensor] = allocate_kv_cache(
            case.workers[rank], torch.device("cpu"), KVCacheLayout.LBHNC
        )
        self.layers: dict[str, Any] = {
            name: attention(case, cache, isa) for name, cache in self.caches.items()
        }

    @property
    def described(self) -> Description:
        caches = self.case.workers[self.rank]
        return describe_engine(
            self.case.vllm_config,
            caches,
            engine_id="e",
            kv_caches=self.caches,
        )

    @property
    def engine(self) -> EngineSpec:
        return self.described.engine

    @contextmanager
    def shared(self) -> Iterator[RankMemory]:
        """What other processes get."""
        self.case.vllm_config.compilation_config.static_forward_context = self.layers
        shared = share_rank(
            self.described,
            self.rank,
            self.case.vllm_config,
            self.case.workers[self.rank],
            self.caches,
        )
        try:
            yield shared
        finally:
            shared.close()

    def write(self, name: str, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the layer was given for those slots, by part: [slot, head, dim]."""
        layer, cache = self.layers[name], self.caches[name]
        shape = (len(slots), cache.shape[1], cache.shape[-1] // 2)
        rows = {part: torch.rand(shape).to(cache.dtype) for part in "kv"}
        layer.impl.do_kv_cache_update(layer, rows["k"], rows["v"], cache, slots)
        return rows


def attention(case: Configured, cache: torch.Tensor, isa: str) -> Any:
    """A layer of the CPU backend, which writes to caches as in a worker."""
    with set_current_vllm_config(case.vllm_config):
        impl = CPUAttentionBackendImpl(
            num_heads=cache.shape[1],
            head_size=cache.shape[-1] // 2,
            scale=1.0,
            num_kv_heads=cache.shape[1],
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
        )
    return SimpleNamespace(impl=impl, isa=isa, kv_cache=cache, **dict.fromkeys(SCALES, 1.0))


def scales_of(layer: Any) -> list[float]:
    return [getattr(layer, name) for name in SCALES]


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """Of one layer."""
    return Worker(configure(tmp_path, layers(full())))


def read(
    engine: EngineSpec, shared: RankMemory, layer: int, part: str, slots: torch.Tensor
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
    mapping.close()
    return rows


def alike(size: int, dim: int, dtype: str) -> tuple[Any, Mapping[str, Any]]:
    """Two layers, and vLLM's options for them."""
    spec = full(block_size=size, head_size=dim, dtype=getattr(torch, dtype))
    return layers(spec, spec), {"dtype": dtype, "block_size": size}


@pytest.mark.parametrize(
    ("specs", "options", "isa"),
    [
        (HYBRID, {}, "vec"),
        *[(*alike(32, 32, dtype), "vec") for dtype in ("float32", "float16", "bfloat16")],
        (*alike(64, 128, "float16"), "vec"),
        (*alike(32, 80, "bfloat16"), "vec16"),
    ],
    ids=["hybrid", "float32", "float16", "bfloat16", "large", "vec16"],
)
def test_what_layers_write_is_read_by_description(
    tmp_path: Path, specs: Any, options: Mapping[str, Any], isa: str
) -> None:
    worker = Worker(configure(tmp_path, specs, **options), isa=isa)

    with worker.shared() as shared:
        for number, name in enumerate(worker.caches):
            slots = 64 * (number + 1) + torch.randperm(32)  # a block of its own: groups share bytes
            for part, written in worker.write(name, slots).items():
                seen = read(worker.engine, shared, int(name.split(".")[2]), part, slots)
                assert torch.equal(seen, written), (name, part)


def test_tensors_keep_values_shapes_strides_in_one_segment(
    tmp_path: Path,
) -> None:
    worker = Worker(configure(tmp_path, HYBRID))
    name, cache = next(iter(worker.caches.items()))
    cache.fill_(5)
    before = (cache.shape, cache.stride(), cache.data_ptr())
    random = torch.get_rng_state()

    with worker.shared() as first, worker.shared() as again:
        (segment,) = first.rank.segments

    assert (cache.shape, cache.stride()) == before[:2]
    assert bool((cache == 5).all())
    assert worker.layers[name].kv_cache.data_ptr() == cache.data_ptr() != before[2]
    assert again.rank == first.rank
    assert segment.size_bytes == cache.untyped_storage().nbytes()
    assert torch.equal(torch.get_rng_state(), random)


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

    with ExitStack() as stack:
        ranks = [stack.enter_context(worker.shared()).rank for worker in workers]

    engine = workers[0].engine
    validate_ranks(engine, ranks)
    assert (engine.groups[0].num_kv_heads, engine.tp_size) == (total, tp_size)
    assert [rank.regions[0].first_head for rank in ranks] == first_heads


def test_a_layer_that_uses_the_cache_of_another_is_not_described(worker: Worker) -> None:
    for made in (worker.caches, worker.layers):
        made["model.layers.2.self_attn.attn"] = made[NAME]

    with worker.shared() as shared:
        assert {region.layers for region in shared.rank.regions} == {(0,)}


def has(worker: Worker, cache: torch.Tensor, **layer: Any) -> None:
    """Its only layer, which is another one, writes into ``cache``."""
    worker.caches[NAME] = cache
    worker.layers[NAME] = SimpleNamespace(**{"kv_cache": cache, **layer})


def places(worker: Worker) -> Mapping[str, tuple[int, Mapping[AxisName, int]]]:
    """Where its only layer has each part: bytes from the cache's beginning, and steps of axes."""
    with worker.shared() as shared:
        return {
            region.parts[0]: (
                region.offset_bytes,
                {axis.name: axis.stride_bytes for axis in region.axes if axis.size > 1},
            )
            for region in shared.rank.regions
        }


def test_latent_is_compressed_kv_and_rotated_key_in_one_row(tmp_path: Path) -> None:
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    case = configure(tmp_path, layers(mla), block_size=16, tensor_parallel_size=2)
    cache = torch.zeros(16, 1, 16, 576)
    worker = Worker(case)
    has(
        worker,
        cache,
        impl=CPUMLAImpl.__new__(CPUMLAImpl),  # what it writes with needs none of its set-up
        kv_lora_rank=512,
        kv_cache=cache.squeeze(1),
        kv_cache_dtype="auto",
        _k_scale=torch.ones(()),
    )

    found = places(worker)

    (group,) = worker.engine.groups
    assert found == {"latent": (0, {B: 16 * 576 * 4, T: 576 * 4, D: 4})}
    assert (group.name, group.num_kv_heads, group.head_dim) == ("latent", 1, 576)


def writing(write: Write) -> Any:
    return SimpleNamespace(do_kv_cache_update=write)


def test_any_order_of_axes_is_found(worker: Worker) -> None:
    cache = torch.zeros(16, 2, 32, 4, 32).permute(0, 3, 2, 4, 1)  # [block, head, token, dim, part]

    def write(_: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
        for slot, k, v in zip(slots.tolist(), key, value, strict=True):
            cache[slot // 32, :, slot % 32, :, 0] = v
            cache[slot // 32, :, slot % 32, :, 1] = k

    has(worker, cache, impl=writing(write))

    strides = {B: 2 * 32 * 4 * 32 * 4, T: 4 * 32 * 4, H: 32 * 4, D: 4}
    assert places(worker) == {"v": (0, strides), "k": (32 * 4 * 32 * 4, strides)}


def test_k_and_v_of_unlike_size_are_groups_of_their_own(tmp_path: Path) -> None:
    worker = Worker(configure(tmp_path, layers(full(head_size_v=16))))
    cache = torch.zeros(16, 32, 4, 48)  # [block, token, head, dim of both]

    def write(_: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
        cache.view(-1, 4, 48)[slots] = torch.cat([key, value], dim=2)

    has(worker, cache, impl=writing(write))

    strides = {B: 32 * 4 * 48 * 4, T: 4 * 48 * 4, H: 48 * 4, D: 4}
    assert places(worker) == {"k": (0, strides), "v": (32 * 4, strides)}
    assert {one.name: one.head_dim for one in worker.engine.groups} == {"full-k": 32, "full-v": 16}


def plain(_: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
    """What the writers below do wrong in one place each."""
    flat = cache[..., :64].view(-1, 4, 32, 2, 32)  # block, head, token, part, dim
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        flat[slot // 32, :, slot % 32, 0] = k
        flat[slot // 32, :, slot % 32, 1] = v


def quantised(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    """As vLLM's kernels: divided by the scales of the layer, and rounded."""
    e5m2 = torch.float8_e5m2
    scaled = zip((key, value), scales_of(layer), strict=True)
    key, value = ((row / scale).to(e5m2).view(torch.uint8) for row, scale in scaled)
    plain(layer, key, value, cache, slots)


def test_float8_is_measured_without_its_scales_which_stay(tmp_path: Path) -> None:
    spec = full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    case = configure(tmp_path, layers(spec))
    case.vllm_config.cache_config.cache_dtype = "fp8_e5m2"
    worker = Worker(case)
    (layer,) = worker.layers.values()
    layer.impl = writing(quantised)
    vars(layer).update(zip(SCALES, (300.0, 0.01), strict=True))

    found = places(worker)

    strides = {B: 4 * 32 * 64, T: 64, H: 32 * 64, D: 1}
    assert found == {"k": (0, strides), "v": (32, strides)}
    assert worker.engine.groups[0].dtype == "float8_e5m2"
    assert scales_of(layer) == [300.0, 0.01]


def swizzled(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    """Pairs of elements change places in every other token from the third on."""
    odd = (slots % 4 == 3)[:, None, None]
    swapped = key.view(*key.shape[:-1], -1, 2).flip(-1).reshape(key.shape)
    plain(layer, torch.where(odd, swapped, key), value, cache, slots)


def with_scales(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: Any) -> None:
    plain(layer, key, value, cache, slots)
    for slot, k in zip(slots.tolist(), key, strict=True):
        cache[slot // 32, :, slot % 32, 64] = k.amax(-1) // 2


def failing(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    raise RuntimeError("no kernel")


REFUSED: Mapping[str, tuple[str, Any]] = {
    "swizzled": ("no strides describe where 'k' is", writing(swizzled)),
    "negative": ("'k' runs backwards", writing(lambda a, k, v, *b: plain(a, k.flip(-1), v, *b))),
    "twice": ("'k' is written to 2 places", writing(lambda a, k, v, *b: plain(a, k, k + v, *b))),
    "nothing": ("'k' is written to 0 places", writing(lambda *_: None)),
    "failing": ("does not write it: no kernel", writing(failing)),
    "scales beside it": ("holds more than the KV", writing(with_scales)),
    "while it attends": ("while it attends", SimpleNamespace()),
}


@pytest.mark.parametrize("how", REFUSED)
def test_layout_beyond_strides_is_refused_and_no_layer_is_moved(tmp_path: Path, how: str) -> None:
    match, impl = REFUSED[how]
    worker = Worker(configure(tmp_path, layers(full(), full())))
    has(worker, torch.zeros(16, 4, 32, 65 if how == "scales beside it" else 64), impl=impl)
    before = [cache.data_ptr() for cache in worker.caches.values()]

    with pytest.raises(GeometryError, match=match) as refused:
        worker.shared().__enter__()

    assert refused.value.detail["layer"] == NAME
    assert [cache.data_ptr() for cache in worker.caches.values()] == before


@pytest.mark.kind("kernel blocks that are smaller than blocks", on="memory")
def test_blocks_that_a_backend_splits_are_described_as_split(worker: Worker) -> None:
    cache = worker.caches[NAME]
    worker.caches[NAME] = worker.layers[NAME].kv_cache = cache.view(32, 4, 16, 64)

    with worker.shared() as shared:
        slots = torch.randperm(64)
        for part, written in worker.write(NAME, slots).items():
            assert torch.equal(read(worker.engine, shared, 0, part, slots), written)

    assert worker.engine.groups[0].block_size == 16


def test_blocks_that_are_not_the_schedulers_are_refused(worker: Worker) -> None:
    cache = worker.caches[NAME]
    worker.caches[NAME], before = cache.view(32, 4, 16, 64)[:23], cache.data_ptr()

    with pytest.raises(GeometryError, match="has 23 blocks where the scheduler has 16"):
        worker.shared().__enter__()

    assert cache.data_ptr() == before
