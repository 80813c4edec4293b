"""Refusals of the backend when a server starts, by name and with the setting that helps."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvbus.errors import ConfigError
from kvbus.geometry import DTYPE_SIZES_BYTES

KINDS = (MHATokenToKVPool, MLATokenToKVPool, DSATokenToKVPool)
"""Pools with buffers [slot, head, dim]. Subclasses may have another layout."""
STATES = {StateType.SWA, StateType.MAMBA, StateType.DSA}
DRAFTS = {"EAGLE", "EAGLE3", "STANDALONE"}
OTHER_BACKEND = "serve this model with another --disaggregation-transfer-backend"
OTHER_DTYPE = (
    "start both servers with --kv-cache-dtype auto, or bfloat16 where the checkpoint asks for fp8"
)
NHD = "unset SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
SETTINGS = {
    "FP4": OTHER_DTYPE,
    "MXFP8": OTHER_DTYPE,
    "PageMajor": "start both servers without --enable-page-major-kv-layout",
    "Unified": "start both servers without --enable-unified-memory",
    "HiSparse": "start both servers without --enable-hisparse",
    "PageInterleave": "start both servers without --enable-kv-cache-sharding",
}
"""By a part of the pool's kind."""


@dataclass(frozen=True)
class Server:
    """A rank of a server, as the queue of its scheduler shows it."""

    queue: Any
    states: Collection[StateType]

    @property
    def pool(self) -> Any:
        return self.queue.token_to_kv_pool

    @property
    def draft(self) -> Any:
        return self.queue.draft_token_to_kv_pool

    @property
    def has_windows(self) -> bool:
        return type(self.pool) is SWAKVPool

    @property
    def mamba(self) -> Any:
        return self.pool.mamba_pool if type(self.pool) is HybridLinearKVPool else None

    @property
    def paged(self) -> list[Any]:
        """Pools of layers; the first is not of windows, and a draft model's is the last."""
        pools = [self.pool]
        if self.has_windows:
            pools = [self.pool.full_kv_pool, self.pool.swa_kv_pool]
        elif self.mamba is not None:
            pools = [self.pool.full_kv_pool]
        return pools if self.draft is None else [*pools, self.draft]

    @property
    def num_draft_heads(self) -> int:
        (runner, *_) = self.queue.scheduler.draft_worker.draft_worker.draft_runners
        return int(runner.model_config.get_total_num_kv_heads())


def check(at: Server) -> None:
    """Raise `ConfigError` for the first thing that is not handed over."""
    _check_pools(at)
    _check_states(at)
    if at.draft is not None:
        _check_draft(at)
    _check_options(at, at.queue.scheduler.server_args)


def _refuse(applies: object, what: str, setting: str) -> None:
    if applies:
        flag = "--disaggregation-transfer-backend kvbus"
        raise ConfigError(f"{flag} does not hand over the KV of {what}: {setting}")


def _check_pools(at: Server) -> None:
    kinds = [(type(pool), KINDS[:1] if at.has_windows else KINDS) for pool in at.paged]
    if at.mamba is not None:
        kinds.append((type(at.mamba), (MambaPool,)))
    for kind, known in kinds:
        name = kind.__name__
        setting = next((SETTINGS[part] for part in SETTINGS if part in name), OTHER_BACKEND)
        _refuse(kind not in known, f"a pool of the kind {name}", setting)
    for pool in at.paged:
        dtype, layout = str(pool.dtype).removeprefix("torch."), "nhd"
        if isinstance(pool, MHATokenToKVPool):
            is_other = pool.head_dim != pool.v_head_dim
            _refuse(is_other, "keys and values of unlike size", OTHER_BACKEND)
            dtype = dtype if pool.k_scale_buffer is None else pool.quant_method.name
            layout = pool.kv_cache_layout
        _refuse(dtype not in DTYPE_SIZES_BYTES, f"a quantised pool ({dtype})", OTHER_DTYPE)
        _refuse(layout != "nhd", f"a pool in the layout {layout}", NHD)
    _refuse(at.paged[0].layer_num == 0, "a model without full attention", OTHER_BACKEND)


def _check_states(at: Server) -> None:
    for state in at.states:
        _refuse(state not in STATES, f"a state of the kind {state.value}", OTHER_BACKEND)
    for pool in at.paged:
        if isinstance(pool, DSATokenToKVPool):
            is_other = pool.index_kpool > 1 or torch.version.hip or at.mamba is not None
            _refuse(is_other, "index keys pooled, on ROCm, or beside Mamba states", OTHER_BACKEND)
    if (mamba := at.mamba) is not None:
        is_other = mamba._slot_siblings or any(
            one.stride(-1) != 1 for one in mamba.mamba_cache.conv
        )
        _refuse(is_other, "Mamba states of AMX, with N-grams or short convolutions", OTHER_BACKEND)


def _check_draft(at: Server) -> None:
    name, num_heads = at.queue.scheduler.spec_algorithm.name, getattr(at.draft, "head_num", 0)
    _refuse(
        name not in DRAFTS,
        f"a draft model of {name}",
        "set --speculative-algorithm to EAGLE, EAGLE3, NEXTN or STANDALONE",
    )
    expected = max(1, at.num_draft_heads // get_parallel().attn_tp_size) if num_heads else 0
    _refuse(num_heads != expected, "a draft model of other tensor parallelism", "leave it unset")


def _check_options(at: Server, options: Any) -> None:
    parallel, has_stages = get_parallel(), get_parallel().pp_size > 1
    _refuse(
        has_stages and options.disaggregation_mode == "decode",
        "pipeline stages of decode",
        "start decode with --pp-size 1",
    )
    more = [state.value for state in at.states] + ["a draft model"] * (at.draft is not None)
    _refuse(
        has_stages and more,
        f"pipeline stages with more than full attention ({', '.join(more)})",
        "start prefill with --pp-size 1",
    )
    _refuse(
        options.enable_multi_layer_eagle,
        "several draft models",
        "start both servers without --enable-multi-layer-eagle",
    )
    _refuse(
        parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "context parallelism",
        "start both servers with --attn-cp-size 1 and --dcp-size 1",
    )
    _refuse(options.nnodes > 1, "a server on several machines", "start one on each: --nnodes 1")
    _refuse(
        options.disaggregation_decode_host_receive_threshold < 1,
        "requests that go to the host memory of decode",
        "start decode with --disaggregation-decode-host-receive-threshold 1",
    )
    _refuse(
        options.disaggregation_decode_allocation_policy != "early",
        "requests that decode allocates after prefill",
        "start both servers with --disaggregation-decode-allocation-policy early",
    )
    _refuse(options.enable_memory_saver, "memory to release", "unset --enable-memory-saver")
    uses_staging = envs.SGLANG_DISAGG_STAGING_BUFFER.get()
    _refuse(uses_staging, "SGLang's staging buffers", "unset SGLANG_DISAGG_STAGING_BUFFER")
