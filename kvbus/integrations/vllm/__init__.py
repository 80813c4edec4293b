"""vLLM's connector to kvbus, registered as a plugin. It needs vLLM 0.32 or later."""

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbus.integrations.vllm.connector import KvbusConnector

__all__ = ["INSIDE_VLLM", "KvbusConnector", "register"]

INSIDE_VLLM = {
    "vllm.config.vllm:VllmConfig": (
        "cache_config compilation_config kv_transfer_config model_config "
        "num_prefill_lookahead_tokens parallel_config shutdown_timeout speculative_config"
    ),
    "vllm.config.cache:CacheConfig": "cache_dtype enable_prefix_caching",
    "vllm.config.compilation:CompilationConfig": "static_forward_context",
    "vllm.config.kv_transfer:KVTransferConfig": "engine_id kv_connector_extra_config kv_role",
    "vllm.config.model:ModelConfig": (
        "dtype enable_sleep_mode get_total_num_hidden_layers get_total_num_kv_heads hf_text_config "
        "is_encoder_decoder is_multimodal_model model multimodal_config quantization revision"
    ),
    "vllm.config.multimodal:MultiModalConfig": "language_model_only mm_processor_cache_gb",
    "vllm.config.parallel:ParallelConfig": (
        "decode_context_parallel_size pipeline_parallel_size prefill_context_parallel_size "
        "tensor_parallel_size"
    ),
    "vllm.config.speculative:SpeculativeConfig": (
        "draft_model_config uses_draft_kv_cache uses_extract_hidden_states"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "_get_connector_metadata"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": (
        "_counter_cls _histogram_cls _labelnames per_engine_labelvalues"
    ),
    "vllm.lora.request:LoRARequest": "lora_name lora_path",
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention": (
        "_k_scale impl kv_cache kv_cache_dtype kv_lora_rank"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": "do_kv_cache_update",
    "vllm.v1.core.block_pool:BlockPool": (
        "blocks evict_blocks free_blocks get_num_free_blocks touch"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "get_block_ids",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "block_pool get_block_ids",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_hash",
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens preempted_req_ids",
    "vllm.v1.kv_cache_interface:KVCacheConfig": (
        "kv_cache_groups needs_kv_cache_zeroing num_blocks select_transfer_block_ids "
        "transfer_group_ids transfer_groups"
    ),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": (
        "enable_kv_transfer host_resident kv_cache_spec layer_names role"
    ),
    "vllm.v1.kv_cache_interface:MambaSpec": (
        "dtypes mamba_type num_speculative_blocks shapes tp_replicated"
    ),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": (
        "block_size dtype head_size head_size_v kv_quant_mode num_kv_heads tokens_per_state"
    ),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "extra_retained_tokens sliding_window",
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.v1.outputs:KVConnectorOutput": "finished_recving kv_connector_worker_meta",
    "vllm.v1.request:RequestStatus": "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    "vllm.v1.structured_output.request:StructuredOutputRequest": "grammar",
    "vllm.v1.request:Request": (
        "_all_token_ids abort_immediately all_token_ids get_skip_reading_prefix_cache "
        "kv_transfer_params lora_request max_tokens mm_features num_computed_tokens "
        "num_prompt_tokens num_tokens priority prompt_embeds prompt_token_ids request_id "
        "sampling_params status structured_output_request trace_headers"
    ),
}
"""Parts of vLLM beyond the connector's base class, each checked by a contract test."""


def register() -> None:
    """Register the connector, by which `MultiConnector` finds its statistics. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    with suppress(ValueError):  # the name is already registered
        KVConnectorFactory.register_connector("KvbusConnector", __name__, "KvbusConnector")


def __getattr__(name: str) -> type:
    if name != "KvbusConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvbus.integrations.vllm.connector import KvbusConnector  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"KvbusConnector needs vLLM 0.32 or later: {error}") from error
    return KvbusConnector
