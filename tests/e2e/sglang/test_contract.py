"""What the backend uses of SGLang is there: a version without it fails here, not in production."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

USED = {
    "arg_groups/choices.py": ["add_disagg_transfer_backend_choices"],
    "plugins/hook_registry.py": ["HookRegistry", "register", "HookType", "REPLACE", "AROUND"],
    "disaggregation/utils.py": [
        *("TransferBackend", "get_kv_class", "MetadataBuffers", "cached_tokens", "output_ids"),
        *("output_token_logprobs_idx", "output_token_logprobs_val", "bootstrap_room"),
    ],
    "disaggregation/base/conn.py": ["KVPoll", "StateType", "SWA", "MAMBA", "DSA", "state_types"],
    "disaggregation/prefill.py": [
        *("PrefillBootstrapQueue", "_init_kv_manager", "add", "transfer_backend", "scheduler"),
        *("token_to_kv_pool", "metadata_buffers", "draft_token_to_kv_pool", "num_kv_tokens"),
        *("kv_manager", "_swa_payload", "translate_swa_indices_for_transfer"),
        *("SchedulerDisaggregationPrefillMixin", "process_batch_result_disagg_prefill"),
        "indices_event",
    ],
    "disaggregation/decode.py": [
        *("DecodePreallocQueue", "_init_kv_manager", "add", "transfer_backend", "scheduler"),
        *("token_to_kv_pool", "metadata_buffers", "draft_token_to_kv_pool", "decode_prefix_len"),
        *("kv_manager", "_swa_payload", "translate_swa_indices_for_transfer"),
    ],
    "disaggregation/common/conn.py": [
        *("CommonKVManager", "CommonKVSender", "CommonKVReceiver", "CommonKVBootstrapServer"),
        *("attn_tp_rank", "disaggregation_mode", "server_args", "kv_args", "bootstrap_timeout"),
        *("waiting_timeout", "record_failure", "update_status", "conclude_state", "curr_idx"),
        *("num_kv_indices", "aux_index", "bootstrap_room", "bootstrap_addr", "bootstrap_infos"),
        *("_record_transfer_indices", "ensure_abort_notified", "_setup_routes", "page_size"),
        *("get_parallel", "attn_dcp_size", "PrefillServerInfo", "try_ensure_parallel_info"),
        *("prefill_info_table", "prefill_http_port"),
    ],
    "mem_cache/memory_pool.py": [
        *("MHATokenToKVPool", "MLATokenToKVPool", "k_buffer", "v_buffer", "kv_buffer"),
        *("model_layer_ids", "start_layer", "layer_num", "store_dtype", "page_size", "data_ptrs"),
        *("_kv_buffer_descs", "_build_kv_buffer_descs", "_init_data_ptrs_and_strides"),
        *("quant_method", "kv_cache_layout", "k_scale_buffer", "head_num", "v_head_dim"),
        *("DSATokenToKVPool", "index_k_with_scale_buffer", "index_head_dim", "index_kpool"),
        *("HybridLinearKVPool", "full_attention_layer_id_mapping", "mamba_pool", "MambaPool"),
        *("mamba_layer_ids", "mamba_cache", "conv", "temporal", "conv_slice_axis"),
        *("conv_shard_groups", "_slot_siblings"),
    ],
    "layers/quantization/fp4_kv_cache_quant_method.py": ["UnquantizedKVCacheMethod", "name"],
    "mem_cache/allocator/base.py": ["create_prefill_budget"],
    "mem_cache/prefill_budget.py": ["remaining_total"],
    "mem_cache/events.py": ["KvEventLoraNames", "resolve", "lora_id", "lora_name"],
    "mem_cache/swa_memory_pool.py": [
        *("SWAKVPool", "full_kv_pool", "swa_kv_pool", "full_layer_nums", "page_size"),
    ],
    "managers/scheduler.py": [
        *("sliding_window_size", "server_args", "model_config", "kv_event_lora_names"),
        *("draft_worker", "spec_algorithm", "pd_rebootstrap_in_progress"),
        *("tree_cache", "waiting_queue", "max_total_num_tokens", "token_to_kv_pool_allocator"),
        *("enable_overlap", "forward_stream", "forward_ct", "forward_iter", "run_batch"),
    ],
    "managers/scheduler_pp_mixin.py": ["run_batch", "process_batch_result"],
    "speculative/base_spec_worker.py": ["draft_worker", "draft_runners"],
    "speculative/eagle_worker_v2.py": ["draft_runner", "model_config"],
    "arg_groups/fields/parallel.py": ["num_dp_ranks", "attn_dcp_size"],
    "environ.py": ["SGLANG_DISAGG_STAGING_BUFFER"],
    "arg_groups/fields/exec_.py": ["enable_memory_saver"],
    "arg_groups/fields/spec.py": ["enable_multi_layer_eagle"],
    "configs/model_config.py": [
        "get_total_num_kv_heads",
        "get_swa_num_kv_heads",
        "num_hidden_layers",
    ],
    "mem_cache/common.py": ["skip_radix_cache_insert"],
    "arg_groups/fields/disagg.py": [
        "disaggregation_decode_host_receive_threshold",
        "disaggregation_decode_allocation_policy",
    ],
    "runtime_context.py": [
        *("get_parallel", "attn_tp_size", "attn_tp_rank", "pp_size", "dp_size", "attn_cp_size"),
        *("pp_rank", "dp_rank", "attn_dp_rank"),
    ],
    "managers/schedule_batch.py": [
        *(
            "origin_input_ids",
            "bootstrap_room",
            "bootstrap_host",
            "lora_id",
            "sampling_params",
            "return_logprob",
        ),
        *("logprob", "top_logprobs_num", "return_sampling_mask", "skip_radix_cache_insert"),
        "output_ids",
    ],
    "sampling/sampling_params.py": ["custom_params"],
}
"""By the file of `sglang.srt` that has them."""


def names_in(path: Path) -> Iterator[str]:
    """All that a file defines, or reads of something."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.arg(arg=name)
                | ast.keyword(arg=str(name))
            ):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


@pytest.mark.parametrize("file", USED)
def test_what_the_backend_uses_is_in_sglang(file: str) -> None:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0]) / "srt"

    missing = set(USED[file]) - set(names_in(root / file))

    assert not missing
