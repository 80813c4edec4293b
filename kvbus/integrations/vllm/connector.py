"""vLLM's KV connector on kvbus: each call of vLLM goes to the side that it concerns."""

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

from kvbus.integrations.vllm.description import describe_engine
from kvbus.integrations.vllm.held_blocks import HeldBlocks
from kvbus.integrations.vllm.metrics import KvbusPromMetrics, KvbusStats
from kvbus.integrations.vllm.options import read_options
from kvbus.integrations.vllm.scheduler_side import SchedulerSide
from kvbus.integrations.vllm.step_results import NOTHING, StepDone, StepResults, WorkerPlaces
from kvbus.integrations.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

KVConnectorMetadata.register(StepResults)
KVConnectorHandshakeMetadata.register(WorkerPlaces)
KVConnectorWorkerMetadata.register(StepDone)


class KvbusConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV off through the agent at ``endpoint``; see docs/vllm.md."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        options = read_options(transfer.kv_connector_extra_config, transfer.kv_role)
        engine = describe_engine(
            vllm_config,
            kv_cache_config,
            engine_id=transfer.engine_id,
            model=options.model_id or None,
        )
        select = kv_cache_config.select_transfer_block_ids
        self._scheduler = SchedulerSide(
            options,
            engine,
            select,
            num_blocks=kv_cache_config.num_blocks,
            kv_role=transfer.kv_role,
        )
        self._worker = WorkerSide(options, engine)

    # Scheduler's process

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers have registered their memory."""
        self._scheduler.meet_workers(
            one.places for one in metadata.values() if isinstance(one, WorkerPlaces)
        )

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Where blocks are held that are offered."""
        drains = self._vllm_config.shutdown_timeout > 0
        self._scheduler.hold_in(HeldBlocks(gpu_block_pool, drains=drains))

    def has_pending_push_work(self) -> bool:
        """Whether vLLM is to go on with steps, to hear soon of offers that were read."""
        return self._scheduler.needs_steps

    def on_new_request(self, request: "Request") -> None:
        """A request has come."""
        self._scheduler.expect(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded, None if that is not known yet; it is between steps."""
        num_tokens = self._scheduler.matched(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """All that is handed off."""
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """The request has blocks: its load begins at once, beside the steps."""
        block_ids = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
        self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """What ended since the last step, and what this one is going to compute."""
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """A step is done: what it has computed may be read."""
        if isinstance(done := connector_output.kv_connector_worker_meta, StepDone):
            self._scheduler.done(done.step)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, of the only group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer what was computed for others; the blocks are held beyond the request's end."""
        transferred = self._kv_cache_config.select_transfer_block_ids(block_ids)
        return self._scheduler.finished(request, transferred)

    def get_finished_count(self) -> int | None:
        """One worker reports for all, as the agent tells of a handoff once."""
        return 1

    # Worker's process

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The step is done, if the scheduler's side wants to hear of it."""
        results = self._get_connector_metadata()
        step = results.step if isinstance(results, StepResults) else 0
        return StepDone(step) if step else None

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Share the KV cache with the agent."""
        self._worker.register(self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler's side must know of this worker."""
        return self._worker.places

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What ended since the last step, as the scheduler's side knows it."""
        results = self._get_connector_metadata()
        ended = self._worker.ended(results if isinstance(results, StepResults) else NOTHING)
        return KVConnectorTransferResults(
            finished_recving=set(ended.received),
            failed_recving=set(ended.failed),
        )

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing: loads began when their blocks were allocated."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled once its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: the KV is read from where it is."""

    def wait_for_save(self) -> None:
        """Nothing: the KV is read from where it is."""

    # Both

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:  # noqa: ARG003 - vLLM's
        """No: the cache that the agent has mapped would be taken from under it."""
        return False

    def shutdown(self) -> None:
        """End the sessions of this process."""
        self._scheduler.close()
        self._worker.close()

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """What happened since the last call; the scheduler's side has it all."""
        figures = self._scheduler.take_figures()
        return KvbusStats(data=figures) if figures is not None else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        """The figures that another process took."""
        return KvbusStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        """The connector's metrics, in vLLM's registry."""
        return KvbusPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
