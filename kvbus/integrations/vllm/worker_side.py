"""The connector in a worker's process: its memory is the agent's to read and write."""

import logging
import time
from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvbus.engine import new_secret
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.memory_export import SharedRank, share_rank, worker_rank
from kvbus.integrations.vllm.options import ConnectorOptions
from kvbus.integrations.vllm.sessions import CLOSE_WITHIN_S, MemoryLink, memory_link
from kvbus.integrations.vllm.step_results import (
    NOTHING,
    EarlyCompletions,
    StepResults,
    WorkerPlace,
    WorkerPlaces,
)

logger = logging.getLogger("vllm.kvbus")

REPORTER = 0
"""The rank that tells vLLM what has ended: one does for all."""


class WorkerSide:
    """What vLLM's worker asks of the connector."""

    def __init__(self, options: ConnectorOptions, engine: EngineSpec) -> None:
        self._options, self._engine = options, engine
        self._rank = 0
        self._access = new_secret()
        self._early = EarlyCompletions()
        self._shared: SharedRank | None = None
        self._links: list[MemoryLink] = []

    def ended(self, results: StepResults) -> StepResults:
        """What this worker tells vLLM in this step, given what the scheduler's side says."""
        return self._early.take(results) if self._rank == REPORTER else NOTHING

    @property
    def places(self) -> WorkerPlaces:
        """Where this worker's memory is."""
        return WorkerPlaces(tuple(self._place(link) for link in self._links))

    def register(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> None:
        """Share the KV cache with each agent; waits for it a moment, and goes on without.

        Raises `GeometryError` when kvbus cannot serve what vLLM has, `SegmentError` when there is
        no room for it.
        """
        rank = self._rank = worker_rank(self._engine)
        shared = self._shared = share_rank(
            self._engine,
            rank,
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            kv_caches=kv_caches,
        )
        on_fetched = self._early.tell if rank == REPORTER else None
        self._links = [
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
        for link in self._links:
            if not link.wait_open(max(0.0, deadline - time.monotonic())):
                logger.warning(
                    "kvbus: no agent took the memory of rank %s within %s s: %s; until one does, "
                    "this vLLM hands nothing off",
                    rank,
                    self._options.attach_timeout_s,
                    link.problem,
                )

    def close(self) -> None:
        """End the memory sessions."""
        for link in self._links:
            link.close(CLOSE_WITHIN_S)
        if self._shared is not None:
            self._shared.close()

    def _place(self, link: MemoryLink) -> WorkerPlace:
        session = link.session
        if session is None:
            return WorkerPlace(self._rank, "", self._access)
        agent = session.agent
        return WorkerPlace(self._rank, agent.peer_endpoint, self._access, agent.server_key)
