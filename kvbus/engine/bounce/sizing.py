"""How large host buffers are: their layout, and the blocks of each group that they hold (pure)."""

from collections import Counter
from math import lcm, prod

from kvbus.errors import GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, EngineSpec, KvLayout, Region, lay_out_rank
from kvbus.geometry.layouts import ALIGNMENT_BYTES

HOST_LAYOUT = KvLayout.parse("block,layer,kv,token,head,dim")
"""The canonical form: a block of all layers is one piece, whatever the engine's device has."""

PIECE_BYTES = 32 << 20
"""Copied at a time, so that copies and the wire overlap."""


def host_blocks(engine: EngineSpec, *, buffer_bytes: int, num_states: int = 16) -> dict[str, int]:
    """Blocks by group, the same on every rank, so that no rank's buffer exceeds ``buffer_bytes``.

    Every group gets room for the same number of tokens; one of state gets ``num_states`` blocks,
    one for each request that is in the buffer. Raises `GeometryError`.
    """
    sizes = [_block_bytes(engine, rank) for rank in range(engine.num_ranks)]
    gaps_bytes = ALIGNMENT_BYTES * max(len(_regions(engine, n)) for n in range(engine.num_ranks))
    states = {group.name: num_states for group in engine.groups if group.state}
    paged = {group.name: group.block_size for group in engine.groups if not group.state}
    state_bytes = max(sum(size[name] * states[name] for name in states) for size in sizes)
    left_bytes = buffer_bytes - state_bytes - gaps_bytes
    largest_bytes = max(
        sum(size[name] / block_size for name, block_size in paged.items()) for size in sizes
    )
    num_tokens = int(left_bytes / largest_bytes) if paged else 0
    blocks = states | {name: num_tokens // block_size for name, block_size in paged.items()}
    if min(blocks.values()) < 1 or left_bytes < 0:
        raise GeometryError(
            f"a host buffer of {buffer_bytes} bytes does not hold one block of every group of "
            f"engine '{engine.engine_id}': these take {max(sum(s.values()) for s in sizes)}",
            buffer_bytes=buffer_bytes,
        )
    return blocks


def token_bytes(engine: EngineSpec) -> float:
    """Bytes of one token over all ranks, of groups that are not state; replicas count."""
    sizes = sum((_block_bytes(engine, rank) for rank in range(engine.num_ranks)), Counter[str]())
    return sum(sizes[group.name] / group.block_size for group in engine.groups if not group.state)


def _regions(engine: EngineSpec, rank: int) -> tuple[Region, ...]:
    """Of a buffer of one block of each group."""
    return lay_out_rank(engine, rank, HOST_LAYOUT, num_blocks=1).regions


def _block_bytes(engine: EngineSpec, rank: int) -> Counter[str]:
    """Bytes of one block of each group on a rank."""
    size_bytes = Counter[str]()
    for region in _regions(engine, rank):
        itemsize = DTYPE_SIZES_BYTES[engine.group(region.group).dtype]
        size_bytes[region.group] += itemsize * prod(axis.size for axis in region.axes)
    return size_bytes


def piece_tokens(engine: EngineSpec, *, piece_bytes: int) -> int:
    """Tokens that are about ``piece_bytes`` over all ranks, in whole blocks of every group.

    0 when all groups are states: they are one piece.
    """
    sizes = [group.block_size for group in engine.groups if not group.state]
    whole = lcm(*sizes)
    return max(1, int(piece_bytes / token_bytes(engine)) // whole) * whole if sizes else 0
