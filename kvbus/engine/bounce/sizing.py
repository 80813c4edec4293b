"""How large host buffers are: their layout, and the blocks of each group that they hold (pure)."""

from bisect import bisect
from math import lcm, prod

from kvbus.errors import GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, EngineSpec, KvLayout, lay_out_rank

HOST_LAYOUT = KvLayout.parse("block,layer,kv,token,head,dim")
"""The canonical form: a block of all layers is one piece, whatever the engine's device has."""

PIECE_BYTES = 32 << 20
"""Copied at a time, so that copies and the wire overlap."""


def host_blocks(engine: EngineSpec, *, buffer_bytes: int, num_states: int = 16) -> dict[str, int]:
    """Blocks by group, the same on every rank, so that no rank's buffer exceeds ``buffer_bytes``.

    Every group gets room for the same number of tokens; one of state gets ``num_states`` blocks,
    one for each request that is in the buffer. Raises `GeometryError`.
    """

    def blocks(num_tokens: int) -> dict[str, int]:
        return {
            group.name: num_states if group.state else num_tokens // group.block_size
            for group in engine.groups
        }

    def size_bytes(num_blocks: int | dict[str, int]) -> int:
        ranks = (
            lay_out_rank(engine, rank, HOST_LAYOUT, num_blocks=num_blocks)
            for rank in range(engine.num_ranks)
        )
        return max(rank.segments[0].size_bytes for rank in ranks)

    least = max(group.block_size for group in engine.groups)
    sizes = range(least, max(least, buffer_bytes) + 1)  # no token has less than a byte
    num_fitting = bisect(sizes, buffer_bytes, key=lambda num_tokens: size_bytes(blocks(num_tokens)))
    num_blocks = blocks(sizes[num_fitting - 1])
    if not num_fitting or min(num_blocks.values()) < 1:
        raise GeometryError(
            f"a host buffer of {buffer_bytes} bytes does not hold one block of every group of "
            f"engine '{engine.engine_id}': these take {size_bytes(1)}",
            buffer_bytes=buffer_bytes,
        )
    return num_blocks


def piece_tokens(engine: EngineSpec, *, piece_bytes: int) -> int:
    """Tokens that are about ``piece_bytes`` over all ranks, in whole blocks of every group.

    0 when all groups are states: they are one piece. Replicas count.
    """
    paged = {group.name: group for group in engine.groups if not group.state}
    if not paged:
        return 0
    token_bytes = sum(
        DTYPE_SIZES_BYTES[paged[region.group].dtype]
        * prod(axis.size for axis in region.axes)
        / paged[region.group].block_size
        for rank in range(engine.num_ranks)
        for region in lay_out_rank(engine, rank, HOST_LAYOUT, num_blocks=1).regions
        if region.group in paged
    )
    whole = lcm(*(group.block_size for group in paged.values()))
    return max(1, int(piece_bytes / token_bytes) // whole) * whole
