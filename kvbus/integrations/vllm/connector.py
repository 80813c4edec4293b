"""vLLM's KV connector for kvbus. Forward passes run none of it."""

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
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
from kvbus.integrations.vllm.describe import (
    Layers,
    describe_engine,
    has_states,
    joined,
    refuse_unserved,
    tokens_left,
)
from kvbus.integrations.vllm.params import (
    NOTHING,
    Description,
    StepDone,
    StepResults,
    WorkerPlaces,
    read_options,
    require,
)
from kvbus.integrations.vllm.scheduler import CLOSE_WITHIN_S, SchedulerSide
from kvbus.integrations.vllm.stats import KvbusPromMetrics, KvbusStats
from kvbus.integrations.vllm.worker import share_rank

if TYPE_CHECKING:
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
        refuse_unserved(vllm_config, kv_cache_config)
        is_stateful = has_states(kv_cache_config)
        require(
            not (is_stateful and options.bidirectional_kv_xfer),
            "bidirectional_kv_xfer",
            "bidirectional_kv_xfer with states (Mamba, gated delta nets, short convolutions): the "
            "next turn cannot load the KV of an answer. Set bidirectional_kv_xfer to false",
        )
        SchedulerSide.__init__(
            self,
            options,
            kv_cache_config,
            kv_role=transfer.kv_role,
            drains=vllm_config.shutdown_timeout > 0,
            takes_images=vllm_config.model_config.is_multimodal_model,
            num_left=tokens_left(vllm_config, kv_cache_config),
            has_states=is_stateful,
            describe=self._describe_engine,
        )
        self._described: Description | None = None
        self._configs = vllm_config, kv_cache_config
        self._rank = 0
        self._rank_secret = new_secret()
        self._memory: RankMemory | None = None
        self._memory_links: list[Link] = []

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Wait up to ``attach_timeout_s`` for agents, then continue without."""
        described = self._described = self._describe_engine(
            kv_caches=kv_caches, gather=_of_all_stages
        )
        self._rank = get_pp_group().rank_in_group * described.engine.tp_size
        self._rank += get_tp_group().rank_in_group
        self._memory = share_rank(described, self._rank, *self._configs, kv_caches)
        for path, role in self._options.agents:
            link = Link(
                path,
                described.engine,
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
        if self._described is None:
            return None
        links = self._memory_links
        pages = tuple(page for link in links for page in link.sequence_pages)
        return WorkerPlaces(tuple(self._place(link) for link in links), self._described, pages)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """`MultiConnector` needs the results of every rank."""
        if not get_pp_group().is_last_rank:  # with drafts, vLLM calls no `wait_for_save` there
            self._record_step()
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
        """Record the step. In the last pipeline stage, vLLM calls this behind the drafts."""
        self._record_step()

    def _describe_engine(self, **of_worker: Any) -> Description:
        vllm_config, kv_cache_config = self._configs
        return describe_engine(
            vllm_config,
            kv_cache_config,
            engine_id=vllm_config.kv_transfer_config.engine_id,
            model=self._options.model_id or None,
            **of_worker,
        )

    def _record_step(self) -> None:
        number = self._results.number
        for link in self._memory_links if number else ():
            link.record(number)

    @property
    def _results(self) -> StepResults:
        results = self._get_connector_metadata()
        return results if isinstance(results, StepResults) else NOTHING

    def _place(self, link: Link) -> AgentRanks:
        endpoint, server_key = "", ""
        if link.is_open:
            endpoint, server_key = link.agent.peer_endpoint, link.agent.server_key
        return AgentRanks(endpoint, (self._rank,), self._rank_secret, server_key)


def _of_all_stages(layers: Layers, problem: str) -> Layers:
    """Runs in all workers at the same time; a problem of one stage is raised in all."""
    stages, mine = get_pp_group(), (layers, problem)
    found = [mine] * stages.world_size
    if stages.world_size > 1:
        torch.distributed.all_gather_object(found, mine, group=stages.cpu_group)
    return joined(found)
