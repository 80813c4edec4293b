"""vLLM's KV connector for kvbus. Forward passes run none of it."""

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvbus.engine import AgentRanks, Link, RankMemory, new_secret
from kvbus.integrations.vllm.describe import describe_engine, tokens_left
from kvbus.integrations.vllm.params import (
    NOTHING,
    StepDone,
    StepResults,
    WorkerPlaces,
    read_options,
)
from kvbus.integrations.vllm.scheduler import CLOSE_WITHIN_S, SchedulerSide
from kvbus.integrations.vllm.stats import KvbusPromMetrics, KvbusStats
from kvbus.integrations.vllm.worker import share_rank

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

KVConnectorMetadata.register(StepResults)
KVConnectorHandshakeMetadata.register(WorkerPlaces)
KVConnectorWorkerMetadata.register(StepDone)

logger = logging.getLogger("vllm.kvbus")


class KvbusConnector(SchedulerSide, KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = read_options(transfer.kv_connector_extra_config, transfer.kv_role)
        engine = describe_engine(
            vllm_config,
            kv_cache_config,
            engine_id=transfer.engine_id,
            model=options.model_id or None,
        )
        drains = vllm_config.shutdown_timeout > 0
        SchedulerSide.__init__(
            self,
            options,
            engine,
            kv_cache_config,
            kv_role=transfer.kv_role,
            drains=drains,
            takes_images=vllm_config.model_config.is_multimodal_model,
            num_left=tokens_left(vllm_config, engine),
        )
        self._configs = vllm_config, kv_cache_config
        self._rank = 0
        self._rank_secret = new_secret()
        self._memory: RankMemory | None = None
        self._memory_links: list[Link] = []

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Wait up to ``attach_timeout_s`` for agents, then continue without."""
        self._rank = get_pp_group().rank_in_group * self._engine.tp_size
        self._rank += get_tp_group().rank_in_group
        self._memory = share_rank(self._engine, self._rank, *self._configs, kv_caches)
        for path, role in self._options.agents:
            link = Link(
                path,
                self._engine,
                memory=self._memory,
                control=False,
                role=role,
                rank_secret=self._rank_secret,
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
        return WorkerPlaces(tuple(self._place(link) for link in self._memory_links))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """`MultiConnector` needs the results of every rank."""
        results = self._results
        return KVConnectorTransferResults(
            finished_recving=set(results.received), failed_recving=set(results.failed)
        )

    def build_connector_worker_meta(self) -> StepDone | None:
        return StepDone(step) if (step := self._results.step) else None

    def shutdown(self) -> None:
        SchedulerSide.shutdown(self)
        for link in self._memory_links:
            link.close(CLOSE_WITHIN_S)
        if self._memory is not None:
            self._memory.close()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:  # noqa: ARG003 - vLLM's
        """Sleep mode frees the cache while the agent has it mapped."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbusStats:
        return KvbusStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvbusPromMetrics:
        return KvbusPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    @property
    def _results(self) -> StepResults:
        results = self._get_connector_metadata()
        return results if isinstance(results, StepResults) else NOTHING

    def _place(self, link: Link) -> AgentRanks:
        endpoint, server_key = "", ""
        if link.is_open:
            endpoint, server_key = link.agent.peer_endpoint, link.agent.server_key
        return AgentRanks(endpoint, (self._rank,), self._rank_secret, server_key)
