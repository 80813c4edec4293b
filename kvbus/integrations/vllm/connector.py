"""vLLM's KV connector on kvbus."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvbus.integrations.vllm.describe import describe_engine
from kvbus.integrations.vllm.params import read_options
from kvbus.integrations.vllm.scheduler import SchedulerSide
from kvbus.integrations.vllm.stats import KvbusPromMetrics, KvbusStats
from kvbus.integrations.vllm.steps import StepDone, StepResults, WorkerPlaces
from kvbus.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

KVConnectorMetadata.register(StepResults)
KVConnectorHandshakeMetadata.register(WorkerPlaces)
KVConnectorWorkerMetadata.register(StepDone)


class KvbusConnector(SchedulerSide, WorkerSide, SupportsHMA):
    """Hands KV off through the agent at ``endpoint``; see docs/vllm.md."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        options = read_options(transfer.kv_connector_extra_config, transfer.kv_role)
        engine = describe_engine(
            vllm_config,
            kv_cache_config,
            engine_id=transfer.engine_id,
            model=options.model_id or None,
        )
        SchedulerSide.__init__(
            self,
            options,
            engine,
            kv_cache_config,
            kv_role=transfer.kv_role,
            drains=vllm_config.shutdown_timeout > 0,
        )
        WorkerSide.__init__(self, options, engine, vllm_config, role, kv_cache_config)

    def shutdown(self) -> None:
        """End the sessions of this process."""
        SchedulerSide.shutdown(self)
        WorkerSide.shutdown(self)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:  # noqa: ARG003 - vLLM's
        """No: the cache that the agent has mapped would be taken from under it."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbusStats:
        """The figures that another process took."""
        return KvbusStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvbusPromMetrics:
        """The connector's metrics, in vLLM's registry."""
        return KvbusPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Of a forward pass: loads begin when blocks are allocated, a request is scheduled when its load
    # is over, and what is computed is read from where it is.

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""
