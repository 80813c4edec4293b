"""The connector's half in a worker's process: its KV cache is the agent's to read and write."""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvbus.engine import AgentRanks, Link, RankMemory, describe_tensors, new_secret
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.describe import cache_of, layer_number, require
from kvbus.integrations.vllm.params import ConnectorOptions
from kvbus.integrations.vllm.probe import LayerProbe
from kvbus.integrations.vllm.steps import (
    CLOSE_WITHIN_S,
    NOTHING,
    EarlyCompletions,
    StepDone,
    StepResults,
    WorkerPlaces,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvbus")

REPORTER = 0
"""The rank that tells vLLM what has ended: one does for all."""


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
        self._memory: RankMemory | None = None
        self._memory_links: list[Link] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Share the KV cache with each agent; waits for it a moment, and goes on without.

        Raises `GeometryError` when kvbus cannot serve what vLLM has, `SegmentError` when there is
        no room for it.
        """
        self._rank = get_pp_group().rank_in_group * self._engine.tp_size
        self._rank += get_tp_group().rank_in_group
        self._memory = share_rank(
            self._engine, self._rank, self._vllm_config, self._kv_cache_config, kv_caches
        )
        on_fetched = self._early.tell if self._rank == REPORTER else None
        for path, role in self._options.agents:
            link = Link(
                path,
                self._engine,
                memory=self._memory,
                control=False,
                role=role,
                access=self._access,
                on_fetched=on_fetched,
                logger=logger,
            )
            self._memory_links.append(link.start())
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
        if self._memory is not None:
            self._memory.close()

    @property
    def _results(self) -> StepResults:
        results = self._get_connector_metadata()
        return results if isinstance(results, StepResults) else NOTHING

    def _place(self, link: Link) -> AgentRanks:
        endpoint, server_key = "", ""
        if link.is_open:
            endpoint, server_key = link.agent.peer_endpoint, link.agent.server_key
        return AgentRanks(endpoint, (self._rank,), self._access, server_key)


def share_rank(
    engine: EngineSpec,
    rank: int,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
) -> RankMemory:
    """Describe ``kv_caches`` as `register_kv_caches` gets them, and share their memory.

    ``engine`` is `describe_engine` of the same configurations. Layers that use the cache of another
    one are in no group. On a CPU the tensors change their addresses, in place, and need their
    memory twice for the time of the move; no request runs meanwhile. Raises `GeometryError` for
    what cannot be described, before anything is moved, and `SegmentError` when there is no room.
    """
    modules = vllm_config.compilation_config.static_forward_context
    views: dict[tuple[int, str], torch.Tensor] = {}
    for group, theirs in zip(engine.groups, kv_cache_config.transfer_groups, strict=True):
        for name in theirs.layer_names:
            layer, cache = modules[name], kv_caches[name]
            _check_blocks(name, layer, cache, num_blocks=kv_cache_config.num_blocks)
            probe = LayerProbe(
                name,
                layer,
                cache,
                group=group,
                num_heads=cache_of(theirs).num_kv_heads,
                dtype=vllm_config.model_config.dtype,
            )
            number = layer_number(name)
            views |= {(number, part): view for part, view in probe.views().items()}
    return describe_tensors(views, engine=engine, rank=rank)


def _check_blocks(name: str, layer: Any, cache: torch.Tensor, *, num_blocks: int) -> None:
    """The blocks of the cache, and of what the layer works on, are those of the scheduler."""
    seen = {cache.shape[0], layer.kv_cache.shape[0]}
    require(
        seen == {num_blocks},
        "block_size",
        f"the cache of layer '{name}' has {max(seen)} blocks where the scheduler has {num_blocks}: "
        "its attention backend splits them. Lower --block-size to what the backend supports",
    )
