"""The expected memory of a decode engine after a handoff, computed head by head.

This module uses no plan of kvbus: it looks tokens, heads and layers up in views and regions.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbus.geometry import EngineSpec, GroupSpec

if TYPE_CHECKING:
    from tests.support.engines import Blocks, Engine, Snapshot


def positions(group: GroupSpec, first_token: int, num_tokens: int) -> range:
    """Positions of a group that tokens [first_token, num_tokens) need."""
    if num_tokens <= first_token:
        return range(0)
    if group.state:
        return range(1)
    kept = num_tokens if group.window is None else group.window
    return range(max(first_token, num_tokens - kept), num_tokens)


def moved(group: GroupSpec, holder: GroupSpec, first_token: int, num_tokens: int) -> range:
    """Positions that a fetch reads of ``holder``, the group of the other side.

    A window is read from the start of a block of either side.
    """
    needed = positions(group, first_token, num_tokens)
    start = needed.start
    while group.window and first_token < start and start % group.block_size:
        if start % holder.block_size == 0:
            break
        start -= 1
    return range(start, needed.stop)


def expected_after(
    before: "Snapshot",
    source: "Engine",
    source_blocks: "Blocks",
    target: "Engine",
    target_blocks: "Blocks",
    *,
    num_tokens: int,
    first_token: int = 0,
    first_blocks: Mapping[str, int] | None = None,
    zero_tail: bool = False,
) -> "Snapshot":
    """``before`` with tokens [first_token, num_tokens) of ``source``, written head by head.

    ``first_blocks`` say where the source's tables start.
    """
    expected = {rank: memory.clone() for rank, memory in before.items()}
    held = _one_holder_each(source)
    for (rank, layer, part), tensor in target.views_of(expected).items():
        group = _group_of(target.spec, layer)
        name, size, theirs = group.name, group.block_size, source.spec.group(group.name)
        at = moved(group, theirs, first_token, num_tokens)
        if target.copies_on:
            at = positions(group, first_token, num_tokens)
        if not at:
            continue
        read = _slots(at, theirs, source_blocks[name], (first_blocks or {}).get(name, 0))
        written = _slots(at, group, target_blocks[name], at[0] // size)
        for number, head in enumerate(target.heads(rank, layer, part)):
            tensor[*written, number] = held[layer, part, head][read]
        if zero_tail and num_tokens % size and not group.state:
            tensor[target_blocks[name][-1], num_tokens % size :] = 0
    return expected


def num_read_bytes(
    source: "Engine",
    target: "Engine",
    num_tokens: int,
    first_token: int = 0,
    *,
    path: str = "direct",
    places: Sequence[object] | None = None,
) -> int:
    """Bytes that move for these tokens, to every rank.

    ``staged`` and ``packed`` read a head once for all ranks of one agent; ``places`` are the
    agents of the ranks.
    """
    num_bytes, seen = 0, set[object]()
    for (rank, layer, part), view in target.views().items():
        group = _group_of(target.spec, layer)
        needed = moved(group, source.spec.group(group.name), first_token, num_tokens)
        heads = places and places[rank], layer, part, *target.heads(rank, layer, part)
        if path not in ("staged", "packed") or heads not in seen:
            num_bytes += len(needed) * view[0, 0].nbytes
        seen.add(heads)
    return num_bytes


def num_pieces_compared(
    source: "Engine", target: "Engine", num_tokens: int, first_token: int = 0
) -> int:
    """Pieces of 16 tokens of a head, over all ranks, in a full comparison."""
    num = 0
    for rank, layer, part in target.views():
        group = _group_of(target.spec, layer)
        compared = moved(group, source.spec.group(group.name), first_token, num_tokens)
        num += len(target.heads(rank, layer, part)) * len({at // 16 for at in compared})
    return num


def _slots(
    moved: range, group: GroupSpec, block_ids: list[int], first_block: int
) -> tuple[Tensor, Tensor]:
    size = group.block_size
    blocks = [block_ids[position // size - first_block] for position in moved]
    return torch.tensor(blocks), torch.tensor([position % size for position in moved])


def _one_holder_each(source: "Engine") -> dict[tuple[int, str, int], Tensor]:
    """Each head of each layer and part, as [block, token, dim]; replicas are equal."""
    return {
        (layer, part, head): view[:, :, at].cpu()
        for (rank, layer, part), view in source.views().items()
        for at, head in enumerate(source.heads(rank, layer, part))
    }


def _group_of(spec: EngineSpec, layer: int) -> GroupSpec:
    return next(group for group in spec.groups if layer in group.layers)
