"""The connector's half in a worker's process: its KV cache is the agent's to read and write.

Nothing is moved before all layers were described. On a CPU the tensors change their addresses then,
in place, and need their memory twice for the time of the move; no request runs meanwhile.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvbus.engine import CudaStorage, SharedStorage, new_secret, share_tensors
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
from kvbus.integrations.vllm.describe import cache_of, layer_number, require
from kvbus.integrations.vllm.params import ConnectorOptions
from kvbus.integrations.vllm.probe import LayerProbe, PartLayout
from kvbus.integrations.vllm.sessions import CLOSE_WITHIN_S, MemoryLink, memory_link
from kvbus.integrations.vllm.steps import (
    NOTHING,
    EarlyCompletions,
    StepDone,
    StepResults,
    WorkerPlace,
    WorkerPlaces,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvbus")

REPORTER = 0
"""The rank that tells vLLM what has ended: one does for all."""

Storages = dict[str, SharedStorage | CudaStorage]


class WorkerSide(KVConnectorBase_V1):
    """What vLLM's worker calls, by vLLM's names."""

    def __init__(
        self,
        options: ConnectorOptions,
        engine: EngineSpec,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options, self._engine = options, engine
        self._rank = 0
        self._access = new_secret()
        self._early = EarlyCompletions()
        self._storages: Storages = {}
        self._memory_links: list[MemoryLink] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Share the KV cache with each agent; waits for it a moment, and goes on without.

        Raises `GeometryError` when kvbus cannot serve what vLLM has, `SegmentError` when there is
        no room for it.
        """
        self._rank = get_pp_group().rank_in_group * self._engine.tp_size
        self._rank += get_tp_group().rank_in_group
        shared = share_rank(
            self._engine, self._rank, self._vllm_config, self._kv_cache_config, kv_caches
        )
        self._storages = shared.storages
        on_fetched = self._early.tell if self._rank == REPORTER else None
        self._memory_links = [
            memory_link(
                path,
                self._engine,
                shared.rank,
                shared.storages,
                on_fetched=on_fetched,
                access=self._access,
                role=role,
            )
            for path, role in self._options.agents
        ]
        deadline = time.monotonic() + self._options.attach_timeout_s
        for link in self._memory_links:
            if not link.wait_open(max(0.0, deadline - time.monotonic())):
                logger.warning(
                    "kvbus: no agent took the memory of rank %s within %s s: %s; until one does, "
                    "this vLLM hands nothing off",
                    self._rank,
                    self._options.attach_timeout_s,
                    link.problem,
                )

    def get_handshake_metadata(self) -> WorkerPlaces | None:
        """What the scheduler's side must know of this worker."""
        return WorkerPlaces(tuple(self._place(link) for link in self._memory_links))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        ended = self._early.take(self._results) if self._rank == REPORTER else NOTHING
        return KVConnectorTransferResults(
            finished_recving=set(ended.received), failed_recving=set(ended.failed)
        )

    def build_connector_worker_meta(self) -> StepDone | None:
        """The step is done, if the scheduler's side wants to hear of it."""
        return StepDone(step) if (step := self._results.step) else None

    def shutdown(self) -> None:
        """End the memory sessions; vLLM's tensors keep their memory."""
        for link in self._memory_links:
            link.close(CLOSE_WITHIN_S)
        for storage in self._storages.values():
            storage.close()

    @property
    def _results(self) -> StepResults:
        results = self._get_connector_metadata()
        return results if isinstance(results, StepResults) else NOTHING

    def _place(self, link: MemoryLink) -> WorkerPlace:
        session = link.session
        if session is None:
            return WorkerPlace(self._rank, "", self._access)
        agent = session.agent
        return WorkerPlace(self._rank, agent.peer_endpoint, self._access, agent.server_key)


class SharedRank(NamedTuple):
    """The memory of one rank; the same again after the agent came back."""

    rank: RankSpec
    storages: Storages


@dataclass(frozen=True)
class _Layer:
    """One layer with a cache of its own, as it was measured."""

    number: int
    group: GroupSpec
    num_heads: int
    cache: torch.Tensor
    parts: Mapping[str, PartLayout]


def share_rank(
    engine: EngineSpec,
    rank: int,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
) -> SharedRank:
    """Describe ``kv_caches`` as `register_kv_caches` gets them, and share their memory.

    ``engine`` is `describe_engine` of the same configurations. Raises `GeometryError` for what
    cannot be described, `SegmentError` when there is no room.
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
