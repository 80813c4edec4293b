"""One worker's KV cache, moved to shared memory and described, for its memory session."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvbus.engine import CudaStorage, SharedStorage, share_tensors
from kvbus.geometry import (
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    Segment,
    held_heads,
    validate_rank,
)
from kvbus.integrations.vllm.description import layer_number
from kvbus.integrations.vllm.probe import LayerProbe, PartLayout
from kvbus.integrations.vllm.refusals import cache_of, require

Storages = dict[str, SharedStorage | CudaStorage]


@dataclass(frozen=True)
class SharedRank:
    """What `MemorySession.register` takes; the same again after the agent came back."""

    rank: RankSpec
    storages: Storages

    def close(self) -> None:
        """Close the descriptors; idempotent. vLLM's tensors keep their memory."""
        for storage in self.storages.values():
            storage.close()


@dataclass(frozen=True)
class _Layer:
    """One layer with a cache of its own, as it was measured."""

    number: int
    group: GroupSpec
    num_heads: int
    cache: torch.Tensor
    parts: Mapping[str, PartLayout]


def worker_rank(engine: EngineSpec) -> int:
    """Which rank of ``engine`` the worker in this process is."""
    stage: int = get_pp_group().rank_in_group
    tp_rank: int = get_tp_group().rank_in_group
    return stage * engine.tp_size + tp_rank


def share_rank(
    engine: EngineSpec,
    rank: int,
    *,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
) -> SharedRank:
    """Describe ``kv_caches`` as `register_kv_caches` gets them, and share their memory.

    ``engine`` is `describe_engine` of the same configurations. Nothing is moved before all layers
    were described. Call it while no request runs: on a CPU the tensors change their addresses, in
    place, and need their memory twice for the time of the move.
    Raises `GeometryError` for what cannot be described, `SegmentError` when there is no room.
    """
    layers = _measure(engine, vllm_config, kv_cache_config, kv_caches)
    shared = share_tensors(layer.cache for layer in layers)
    storages: Storages = {f"kv{number}": one for number, one in enumerate(shared)}
    try:
        segments = tuple(Segment(name, one.size_bytes) for name, one in storages.items())
        regions = tuple(
            _region(engine, rank, layer, part, storages) for layer in layers for part in layer.parts
        )
        spec = RankSpec(rank, segments, regions)
        validate_rank(engine, spec)
    except BaseException:
        for one in shared:
            one.close()
        raise
    return SharedRank(spec, storages)


def _measure(
    engine: EngineSpec,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
) -> list[_Layer]:
    """Each layer of each group; those that use another layer's cache are not in the groups."""
    modules = vllm_config.compilation_config.static_forward_context
    measured = []
    for group, theirs in zip(engine.groups, kv_cache_config.transfer_groups, strict=True):
        num_heads: int = cache_of(theirs).num_kv_heads
        for name in theirs.layer_names:
            layer, cache = modules[name], kv_caches[name]
            _check_blocks(name, layer, cache, num_blocks=kv_cache_config.num_blocks)
            probe = LayerProbe(
                name,
                layer,
                cache,
                group=group,
                num_heads=num_heads,
                dtype=vllm_config.model_config.dtype,
            )
            number = layer_number(name)
            measured.append(_Layer(number, group, num_heads, cache, probe.layouts()))
    return measured


def _check_blocks(name: str, layer: Any, cache: torch.Tensor, *, num_blocks: int) -> None:
    """The blocks of the cache, and of what the layer works on, are those of the scheduler."""
    seen = {cache.shape[0], layer.kv_cache.shape[0]}
    require(
        seen == {num_blocks},
        "block_size",
        f"the cache of layer '{name}' has {max(seen)} blocks where the scheduler has {num_blocks}: "
        "its attention backend splits them. Lower --block-size to what the backend supports",
    )


def _region(engine: EngineSpec, rank: int, layer: _Layer, part: str, storages: Storages) -> Region:
    layout, group = layer.parts[part], layer.group
    address = layer.cache.untyped_storage().data_ptr()
    segment_id = next(name for name, one in storages.items() if one.address == address)
    sizes = {
        AxisName.BLOCK: layer.cache.shape[0],
        AxisName.HEAD: layer.num_heads,
        AxisName.TOKEN: group.block_size,
        AxisName.DIM: group.head_dim,
    }
    axes = (
        Axis(axis, sizes[axis], stride_bytes) for axis, stride_bytes in layout.strides_bytes.items()
    )
    return Region(
        segment_id=segment_id,
        offset_bytes=storages[segment_id].offset_bytes_of(layer.cache) + layout.offset_bytes,
        group=group.name,
        layers=(layer.number,),
        parts=(part,),
        first_head=held_heads(rank % engine.tp_size, engine.tp_size, group.num_kv_heads).start,
        num_heads=layer.num_heads,
        axes=tuple(sorted(axes, key=lambda axis: -axis.stride_bytes)),
    )
