"""The memory of one SGLang rank: its pools, moved to shared memory in place, as agents know it.

    pool of layers   ──▶ group "full", and "window" of the layers that see a window
    rows of metadata ──▶ group "metadata", a state: the first token, and what is told of it

Whatever else a pool may be is refused by name, before a request comes.
"""

from collections.abc import Mapping
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


@dataclass(frozen=True)
class Pools:
    """What one process of SGLang has to share; ``window`` is how many tokens `WINDOW` keeps."""

    groups: tuple[GroupSpec, ...]
    tensors: Mapping[tuple[int | str, str], torch.Tensor]
    plain: tuple[Any, ...]
    window: int | None

    def engine(self, engine_id: str, model: str) -> EngineSpec:
        """The engine that this process is a rank of."""
        return EngineSpec(engine_id, model, get_parallel().attn_tp_size, self.groups)

    def share(self, engine: EngineSpec) -> RankMemory:
        """Move the tensors to shared memory; raises the errors of `describe_tensors`."""
        rank = get_parallel().attn_tp_rank
        memory = describe_tensors(self.tensors, AXES, engine=engine, rank=rank)
        for pool in self.plain:
            _read_addresses_again(pool)
        return memory


def pools_of(queue: Any) -> Pools:
    """The pools of ``queue``, a queue of SGLang's scheduler.

    Raises `ConfigError` that names what kvbus does not hand over.
    """
    plain = _plain_pools(queue.token_to_kv_pool)
    _refuse(queue, plain)
    scheduler = queue.scheduler
    heads = scheduler.model_config.get_total_num_kv_heads()
    windows = {WINDOW: scheduler.sliding_window_size}
    groups: list[GroupSpec] = []
    tensors: dict[tuple[int | str, str], torch.Tensor] = {}
    for name, pool in plain.items():
        buffers = _buffers_of(pool)
        groups.append(
            GroupSpec(
                name,
                tuple(dict.fromkeys(layer for layer, _ in buffers)),
                pool.page_size,
                1 if isinstance(pool, MLATokenToKVPool) else heads,
                next(iter(buffers.values())).shape[2],
                str(pool.store_dtype).removeprefix("torch."),
                tuple(dict.fromkeys(part for _, part in buffers)),
                windows.get(name),
            )
        )
        for place, buffer in buffers.items():
            tensors[place] = buffer.unflatten(0, (-1, pool.page_size))
    rows = vars(queue.metadata_buffers).items()
    metadata = {name: one for name, one in rows if isinstance(one, torch.Tensor)}
    parts = tuple(StatePart(name, 1, one[0].nbytes) for name, one in metadata.items())
    # Only readers that are SGLang have a place for them.
    groups.append(state_group(METADATA, (), parts, optional=True))
    for name, one in metadata.items():
        tensors[METADATA, name] = one.view(torch.uint8)
    window = windows[WINDOW] if WINDOW in plain else None
    return Pools(tuple(groups), tensors, tuple(plain.values()), window)


def _refuse(queue: Any, plain: Mapping[str, Any]) -> None:
    parallel, options = get_parallel(), queue.scheduler.server_args
    others = [type(one).__name__ for one in plain.values() if type(one) not in KINDS]
    problems = {
        f"the KV pool {', '.join(others)}": bool(others),
        "the KV of a draft model": queue.draft_token_to_kv_pool is not None,
        "pipeline stages (--pp-size)": parallel.pp_size > 1,
        "data parallelism (--dp-size)": parallel.dp_size > 1,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "a server on several machines (--nnodes)": options.nnodes > 1,
        "windows together with a radix cache of the decode server": WINDOW in plain
        and bool(options.disaggregation_decode_enable_radix_cache),
    }
    for what, is_there in problems.items():
        if is_there:
            raise ConfigError(f"--disaggregation-transfer-backend kvbus: {what} is not supported")


KINDS = (MHATokenToKVPool, MLATokenToKVPool)
"""Pools whose buffers are [slot, head, dim]; of a subclass nobody knows."""


def _plain_pools(pool: Any) -> dict[str, Any]:
    """The pools of full attention, and of windows, by their group."""
    if isinstance(pool, SWAKVPool):
        return {FULL: pool.full_kv_pool, WINDOW: pool.swa_kv_pool}
    return {FULL: pool}


def _buffers_of(pool: Any) -> dict[tuple[int, str], torch.Tensor]:
    """The tensors [slot, head, dim] of a pool, by layer and part."""
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


def _read_addresses_again(pool: Any) -> None:
    """SGLang keeps addresses of the buffers, for its kernels."""
    if isinstance(pool, MHATokenToKVPool):
        pool._kv_buffer_descs = pool._build_kv_buffer_descs()
        pool._init_data_ptrs_and_strides()
    else:
        addresses = [buffer.data_ptr() for buffer in pool.kv_buffer]
        pool.data_ptrs.copy_(torch.tensor(addresses, dtype=pool.data_ptrs.dtype))
