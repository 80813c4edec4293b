"""Pools of one SGLang rank, moved to shared memory in place.

pool of layers     ──▶ group "full"
pool of windows    ──▶ group "window", of a model that has both kinds of layers
rows of metadata   ──▶ group "metadata", a state: the first token, and its details
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvbus.engine import RankMemory, describe_tensors
from kvbus.errors import ConfigError
from kvbus.geometry import EngineSpec, GroupSpec, KvPart, StatePart, state_group

FULL, WINDOW, METADATA = "full", "window", "metadata"
AXES = {FULL: "block token head dim", WINDOW: "block token head dim", METADATA: "block dim"}
KINDS = (MHATokenToKVPool, MLATokenToKVPool)
"""Pools with buffers [slot, head, dim]. Subclasses may have another layout."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Tensors = Mapping[tuple[int | str, str], torch.Tensor]


@dataclass(frozen=True)
class Pools:
    groups: tuple[GroupSpec, ...]
    tensors: Tensors
    pools: Mapping[str, Any]

    def engine(self, engine_id: str, model: str) -> EngineSpec:
        parallel = get_parallel()
        return EngineSpec(engine_id, model, parallel.attn_tp_size, self.groups, parallel.pp_size)

    def share(self, engine: EngineSpec) -> RankMemory:
        parallel = get_parallel()
        rank = parallel.pp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
        memory = describe_tensors(self.tensors, AXES, engine=engine, rank=rank)
        for pool in self.pools.values():
            _refresh_addresses(pool)  # its tensors have moved
        return memory


def pools_of(queue: Any) -> Pools:
    """Raises `ConfigError` for unsupported pools."""
    pools = _pools_by_group(queue.token_to_kv_pool)
    _refuse(queue, pools)
    groups: list[GroupSpec] = []
    tensors: dict[tuple[int | str, str], torch.Tensor] = {}
    for name, pool in pools.items():
        buffers = _buffers_of(pool)
        groups.append(_group(name, pool, buffers, queue.scheduler))
        for (layer, part), buffer in buffers.items():
            tensors[layer, part] = buffer.view(-1, pool.page_size, *buffer.shape[1:])
    rows = {
        name: tensor
        for name, tensor in vars(queue.metadata_buffers).items()
        if isinstance(tensor, torch.Tensor)
    }
    parts = tuple(StatePart(name, 1, tensor[0].nbytes) for name, tensor in rows.items())
    last_layer = max(groups[0].layers)
    groups.append(state_group(METADATA, (last_layer,), parts, optional=True))  # only SGLang has it
    # Other ranks may write their rows only after the leader has sealed the offer.
    if leads() or queue.scheduler.server_args.disaggregation_mode == "decode":
        for name, tensor in rows.items():
            tensors[METADATA, name] = tensor.view(torch.uint8)
    return Pools(groups=tuple(groups), tensors=tensors, pools=pools)


def leads() -> bool:
    """Return whether this rank acts for all: it computes last, and has the first token."""
    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.pp_rank == parallel.pp_size - 1)


def _pools_by_group(pool: Any) -> dict[str, Any]:
    if type(pool) is SWAKVPool:
        return {FULL: pool.full_kv_pool, WINDOW: pool.swa_kv_pool}
    return {FULL: pool}


def _refuse(queue: Any, pools: Mapping[str, Any]) -> None:
    parallel, options = get_parallel(), queue.scheduler.server_args
    has_stages = parallel.pp_size > 1
    kinds = KINDS if WINDOW not in pools else (MHATokenToKVPool,)
    unknown = [type(pool).__name__ for pool in pools.values() if type(pool) not in kinds]
    problems = {
        f"a pool of the kind {', '.join(unknown)}": bool(unknown),
        **_pool_problems([] if unknown else pools.values()),
        "a model whose layers all have a sliding window": WINDOW in pools
        and queue.token_to_kv_pool.full_layer_nums == 0,
        "a draft model": queue.draft_token_to_kv_pool is not None,
        "pipeline stages, at decode": has_stages and options.disaggregation_mode == "decode",
        "pipeline stages of layers with a sliding window": has_stages and WINDOW in pools,
        "data parallelism": parallel.dp_size > 1,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "a server on several machines": options.nnodes > 1,
        "requests to the host memory of decode": (
            options.disaggregation_decode_host_receive_threshold < 1
        ),
    }
    for what, is_there in problems.items():
        if is_there:
            raise ConfigError(
                f"--disaggregation-transfer-backend kvbus does not hand over the KV of {what}"
            )


def _pool_problems(pools: Iterable[Any]) -> dict[str, bool]:
    problems: dict[str, bool] = {}
    for pool in pools:
        quant = getattr(pool, "quant_method", None)
        name = getattr(quant, "name", "unquantized")
        dtype = str(pool.dtype) if name == "unquantized" else name
        layout = getattr(pool, "kv_cache_layout", "nhd")
        problems |= {
            f"a quantised pool ({dtype.removeprefix('torch.')}): start both servers with "
            "--kv-cache-dtype auto, or bfloat16 where the checkpoint asks for fp8": (
                name != "unquantized" or pool.dtype not in DTYPES
            ),
            f"a pool in the layout {layout}: unset SGLANG_USE_HND_KVCACHE and "
            "SGLANG_AITER_KV_CACHE_LAYOUT": layout != "nhd",
        }
    return problems


# SGLang's window excludes the token itself: it is the model's window less one. So after a prompt,
# the next token needs just these last tokens, and SGLang names no other pages.
def _group(
    name: str, pool: Any, buffers: Mapping[tuple[int, str], torch.Tensor], scheduler: Any
) -> GroupSpec:
    model, num_heads = scheduler.model_config, 1
    layers = dict.fromkeys(layer for layer, _ in buffers)
    if get_parallel().pp_size > 1:  # a pool has only its stage's layers
        layers = dict.fromkeys(range(model.num_hidden_layers))
    if not isinstance(pool, MLATokenToKVPool):
        is_window = name == WINDOW
        num_heads = model.get_swa_num_kv_heads(1) if is_window else model.get_total_num_kv_heads()
    return GroupSpec(
        name=name,
        layers=tuple(layers),
        block_size=pool.page_size,
        num_kv_heads=num_heads,
        head_dim=next(iter(buffers.values())).shape[2],
        dtype=str(pool.store_dtype).removeprefix("torch."),
        parts=tuple(dict.fromkeys(part for _, part in buffers)),
        window=scheduler.sliding_window_size if name == WINDOW else None,
    )


def _buffers_of(pool: Any) -> dict[tuple[int, str], torch.Tensor]:
    """Return tensors [slot, head, dim] by layer and part."""
    if isinstance(pool, MLATokenToKVPool):
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        parts = {KvPart.LATENT: pool.kv_buffer}
    else:
        layers = pool.model_layer_ids
        parts = {KvPart.KEY: pool.k_buffer, KvPart.VALUE: pool.v_buffer}
    return {
        (layer, part.value): buffer
        for part, buffers in parts.items()
        for layer, buffer in zip(layers, buffers, strict=True)
    }


def _refresh_addresses(pool: Any) -> None:
    if isinstance(pool, MHATokenToKVPool):
        pool._kv_buffer_descs = pool._build_kv_buffer_descs()
        pool._init_data_ptrs_and_strides()
    else:
        addresses = [buffer.data_ptr() for buffer in pool.kv_buffer]
        pool.data_ptrs.copy_(torch.tensor(addresses, dtype=pool.data_ptrs.dtype))
