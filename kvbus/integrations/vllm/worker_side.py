"""The connector in a worker's process: its memory is the agent's to read and write."""

import logging
from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvbus.engine import new_secret
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.memory_export import SharedRank, share_rank, worker_rank
from kvbus.integrations.vllm.options import ConnectorOptions
from kvbus.integrations.vllm.sessions import CLOSE_WITHIN_S, MemoryLink, memory_link
from kvbus.integrations.vllm.step_results import NOTHING, EarlyCompletions, StepResults, WorkerPlace

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
        self._link: MemoryLink | None = None

    def ended(self, results: StepResults) -> StepResults:
        """What this worker tells vLLM in this step, given what the scheduler's side says."""
        return self._early.take(results) if self._rank == REPORTER else NOTHING

    @property
    def place(self) -> WorkerPlace:
        """Where this worker's memory is."""
        session = self._link.session if self._link is not None else None
        if session is None:
            return WorkerPlace(self._rank, "", self._access)
        agent = session.agent
        return WorkerPlace(self._rank, agent.peer_endpoint, self._access, agent.server_key)

    def register(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> None:
        """Share the KV cache with the agent; waits for it a moment, and goes on without.

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
        self._link = memory_link(
            self._options.attach_path,
            self._engine,
            shared.rank,
            shared.storages,
            on_fetched=on_fetched,
            access=self._access,
        )
        if not self._link.wait_open(self._options.attach_timeout_s):
            logger.warning(
                "kvbus: no agent took the memory of rank %s within %s s: %s; until one does, this "
                "vLLM hands nothing off",
                rank,
                self._options.attach_timeout_s,
                self._link.problem,
            )

    def close(self) -> None:
        """End the memory session."""
        if self._link is not None:
            self._link.close(CLOSE_WITHIN_S)
        if self._shared is not None:
            self._shared.close()
