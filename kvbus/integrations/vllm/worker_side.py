"""The connector in a worker's process: its memory is the agent's to read and write.

Refuses to move anything: it reports what the scheduler's side was told by the agent.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from kvbus.engine import MemorySession
from kvbus.integrations.vllm.description import describe
from kvbus.integrations.vllm.link import AgentLink
from kvbus.integrations.vllm.options import ConnectorOptions
from kvbus.integrations.vllm.sessions import memory_session
from kvbus.integrations.vllm.step_results import WorkerIntroduction

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvbus")


class WorkerSide:
    """What vLLM's worker asks of the connector."""

    def __init__(
        self, options: ConnectorOptions, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
    ) -> None:
        self._options = options
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._link: AgentLink[MemorySession] | None = None
        self._introduction: WorkerIntroduction | None = None

    @property
    def is_reporter(self) -> bool:
        """Whether this worker tells vLLM what has ended; one does for all."""
        return self._introduction is not None and self._introduction.rank == 0

    def register(self, kv_caches: Mapping[str, "torch.Tensor"]) -> None:
        """Share the KV cache with the agent; waits for it a moment, and goes on without.

        Raises `GeometryError` when kvbus cannot serve what vLLM has.
        """
        cache = describe(
            self._vllm_config, self._kv_cache_config, kv_caches, model_id=self._options.model_id
        )
        link: AgentLink[MemorySession] = AgentLink(
            f"the memory session of rank {cache.rank.rank}",
            lambda: memory_session(
                self._options.attach_path, cache.engine, cache.rank, cache.storages
            ),
        )
        self._link = link
        if not link.wait_up(self._options.attach_timeout_s):
            logger.warning(
                "kvbus: no agent took the memory of rank %s within %s s: %s; requests are computed "
                "here until one does",
                cache.rank.rank,
                self._options.attach_timeout_s,
                link.problem,
            )
        session = link.session
        self._introduction = WorkerIntroduction(
            rank=cache.rank.rank,
            engine=msgspec.msgpack.encode(cache.engine),
            peer_endpoint=session.agent.peer_endpoint if session is not None else "",
        )

    @property
    def introduction(self) -> WorkerIntroduction | None:
        """What the scheduler's side must know of this worker."""
        return self._introduction

    def close(self) -> None:
        """End the memory session."""
        if self._link is not None:
            self._link.close()
