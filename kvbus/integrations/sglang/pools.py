"""Pools of one SGLang rank, moved to shared memory in place.

pool of layers     ──▶ group "full", with a draft model's layers if they have its shape
draft model        ──▶ else group "draft"
index keys of DSA  ──▶ groups "index" and "scale", in the pages of "full"
pool of windows    ──▶ group "window", of a model that has both kinds of layers
Mamba state        ──▶ group "mamba", a state
rows of metadata   ──▶ group "metadata", a state: the first token, and its details
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from kvbus.engine import RankMemory, describe_tensors
from kvbus.geometry import EngineSpec, GroupSpec, KvPart, StatePart, state_group
from kvbus.integrations.sglang.refusals import Server, check

FULL, DRAFT, INDEX, SCALE = "full", "draft", "index", "scale"
WINDOW, MAMBA, METADATA = "window", "mamba", "metadata"
PAGED, OTHER_BLOCKS = {FULL, DRAFT, INDEX, SCALE}, {WINDOW, MAMBA}
"""Groups that share the pages of a request, and those whose blocks SGLang names with the last."""
STATES = {StateType.SWA: WINDOW, StateType.MAMBA: MAMBA}
AXES = dict.fromkeys([*PAGED, WINDOW], "block token head dim")
AXES |= {MAMBA: "block head dim", METADATA: "block dim"}

Tensors = dict[tuple[int | str, str], torch.Tensor]
Group = tuple[GroupSpec, Tensors]


@dataclass(frozen=True)
class Pools:
    groups: tuple[GroupSpec, ...]
    tensors: Tensors
    paged: Sequence[Any]

    def engine(self, engine_id: str, model: str) -> EngineSpec:
        parallel = get_parallel()
        return EngineSpec(engine_id, model, parallel.attn_tp_size, self.groups, parallel.pp_size)

    def share(self, engine: EngineSpec) -> RankMemory:
        parallel = get_parallel()
        rank = parallel.pp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
        memory = describe_tensors(self.tensors, AXES, engine=engine, rank=rank)
        for pool in self.paged:
            _refresh_addresses(pool)  # its tensors have moved
        return memory


def pools_of(queue: Any, states: Collection[StateType] = ()) -> Pools:
    """``states`` are the kinds that SGLang hands over. Raises `ConfigError` for refused ones."""
    server = Server(queue, states)
    check(server)
    groups = _paged_groups(server)
    if server.mamba is not None:
        _add(groups, *_mamba(server.mamba))
    _add(groups, *_metadata(queue, layer=max(groups[FULL][0].layers)))
    tensors = {place: tensor for _, held in groups.values() for place, tensor in held.items()}
    return Pools(tuple(spec for spec, _ in groups.values()), tensors, server.paged)


def leads() -> bool:
    """Return whether this rank acts for all: it computes last, and has the first token."""
    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.pp_rank == parallel.pp_size - 1)


def replica_suffix() -> str:
    """Each data-parallel replica is an engine, also with data-parallel attention."""
    parallel = get_parallel()
    if parallel.num_dp_ranks == 1:
        return ""
    return f"-dp{parallel.dp_rank if parallel.dp_size > 1 else parallel.attn_dp_rank}"


def _add(groups: dict[str, Group], spec: GroupSpec, tensors: Tensors) -> None:
    if spec.name in groups:
        known, held = groups[spec.name]
        spec, tensors = replace(known, layers=(*known.layers, *spec.layers)), held | tensors
    groups[spec.name] = spec, tensors


def _paged_groups(server: Server) -> dict[str, Group]:
    scheduler, pool, draft = server.queue.scheduler, server.paged[0], server.draft
    model, groups = scheduler.model_config, dict[str, Group]()
    layers = getattr(server.pool, "full_attention_layer_id_mapping", pool.model_layer_ids)
    full, tensors = _pages(FULL, pool, layers, model.get_total_num_kv_heads())
    if get_parallel().pp_size > 1:  # a pool has only its stage's layers
        full = replace(full, layers=tuple(range(model.num_hidden_layers)))
    found = [(full, tensors), *_index(pool, layers)]
    if draft is not None:
        first = model.num_hidden_layers
        layers = tuple(range(first, first + draft.layer_num))
        spec, tensors = _pages(FULL, draft, layers, server.num_draft_heads)
        is_alike = replace(spec, layers=full.layers) == full
        found.append((spec if is_alike else replace(spec, name=DRAFT), tensors))
        found += _index(draft, layers)
    for group in found:
        _add(groups, *group)
    if server.has_windows:
        pool = server.pool.swa_kv_pool
        spec, tensors = _pages(WINDOW, pool, pool.model_layer_ids, model.get_swa_num_kv_heads(1))
        # SGLang's window excludes the token itself: it is the model's window less one. So after a
        # prompt, the next token needs just these last tokens, and SGLang names no other pages.
        _add(groups, replace(spec, window=scheduler.sliding_window_size), tensors)
    return groups


def _pages(name: str, pool: Any, layers: Sequence[int], num_heads: int) -> Group:
    """The buffers are [slot, head, dim]."""
    if isinstance(pool, MLATokenToKVPool):
        buffers, num_heads = {KvPart.LATENT: pool.kv_buffer}, 1
    else:
        buffers = {KvPart.KEY: pool.k_buffer, KvPart.VALUE: pool.v_buffer}
    tensors: Tensors = {
        (layer, part.value): buffer.view(-1, pool.page_size, *buffer.shape[1:])
        for part, of_part in buffers.items()
        for layer, buffer in zip(layers, of_part, strict=True)
    }
    head_dim = next(iter(tensors.values())).shape[3]
    dtype, parts = str(pool.dtype).removeprefix("torch."), tuple(part.value for part in buffers)
    spec = GroupSpec(name, tuple(layers), pool.page_size, num_heads, head_dim, dtype, parts)
    return spec, tensors


def _index(pool: Any, layers: Sequence[int]) -> Iterator[Group]:
    """A page has all of its keys, and then a scale for each key. Some layers have no index."""
    if not isinstance(pool, DSATokenToKVPool):
        return
    page, buffers = pool.page_size, zip(layers, pool.index_k_with_scale_buffer, strict=True)
    held = [(layer, buffer) for layer, buffer in buffers if len(buffer)]
    size = page * pool.index_head_dim
    for name, part in ((INDEX, slice(size)), (SCALE, slice(size, None))) if held else ():
        numbers = tuple(layer for layer, _ in held)
        pages = [buffer[:, part].unflatten(1, (page, 1, -1)) for _, buffer in held]
        spec = GroupSpec(name, numbers, page, 1, pages[0].shape[3], "uint8", (name,))
        yield spec, {(number, name): one for number, one in zip(numbers, pages, strict=True)}


def _mamba(pool: Any) -> Group:
    """A unit is a head of the temporal state, or a channel of a convolution."""
    num_ranks, cache = get_parallel().attn_tp_size, pool.mamba_cache
    views = {"temporal": cache.temporal.flatten(3)} if cache.temporal.numel() else {}
    for number, conv in enumerate(cache.conv):
        views |= _convolution(f"conv{number}", conv, pool)
    parts = tuple(
        StatePart(name, view.shape[2] * num_ranks, view[0, 0, 0].nbytes)
        for name, view in views.items()
    )
    tensors: Tensors = {
        (layer, name): view[at]
        for name, view in views.items()
        for at, layer in enumerate(pool.mamba_layer_ids)
    }
    return state_group(MAMBA, tuple(pool.mamba_layer_ids), parts), tensors


def _convolution(name: str, conv: torch.Tensor, pool: Any) -> dict[str, torch.Tensor]:
    """Return parts that are [layer, slot, channel, element].

    A rank has its share of the queries' channels, then of the keys' and of the values'. If SGLang
    does not list them, only servers of equal tensor parallelism have equal parts.
    """
    num_ranks = get_parallel().attn_tp_size
    views = {name: conv}
    if pool.conv_slice_axis == 1:  # [layer, slot, element, channel]
        views = {f"{name}.{at}": conv[:, :, at, :, None] for at in range(conv.shape[2])}
    if not pool.conv_shard_groups:
        return {f"{part} of {num_ranks}": view for part, view in views.items()}
    sizes = [size // num_ranks for size in pool.conv_shard_groups]
    return {
        f"{part} {block}": one
        for part, view in views.items()
        for block, one in enumerate(torch.split(view, sizes, dim=2))
    }


def _metadata(queue: Any, *, layer: int) -> Group:
    """Only SGLang has it."""
    rows = {n: one for n, one in vars(queue.metadata_buffers).items() if torch.is_tensor(one)}
    parts = tuple(StatePart(name, 1, tensor[0].nbytes) for name, tensor in rows.items())
    tensors: Tensors = {(METADATA, name): one.view(torch.uint8) for name, one in rows.items()}
    # Other ranks may write their rows only after the leader has sealed the offer.
    is_ours = leads() or queue.scheduler.server_args.disaggregation_mode == "decode"
    return state_group(METADATA, (layer,), parts, optional=True), tensors if is_ours else {}


def _refresh_addresses(pool: Any) -> None:
    if isinstance(pool, MHATokenToKVPool):
        pool._kv_buffer_descs = pool._build_kv_buffer_descs()
        pool._init_data_ptrs_and_strides()
    else:
        addresses = [buffer.data_ptr() for buffer in pool.kv_buffer]
        pool.data_ptrs.copy_(torch.tensor(addresses, dtype=pool.data_ptrs.dtype))
