"""vLLM's block ids, by group and from the request's start, as the tables of a fetch or an offer.

Refuses a table in which a block that is needed is vLLM's null block: vLLM keeps no KV there.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, GroupSpec, num_blocks_for

NULL_BLOCK = 0
"""vLLM's placeholder for the blocks that a window has left behind."""


class Tables(NamedTuple):
    """Block ids by group, and the block of the request with which each table starts.

    In ``partial`` blocks, each the first of a window, the window does not begin with the block.
    """

    block_ids: dict[str, list[int]]
    first_blocks: dict[str, int]
    partial: set[int]


NO_TABLES = Tables({}, {}, set())


def tables_of(
    engine: EngineSpec, block_ids: Sequence[Sequence[int]], first_token: int, num_tokens: int
) -> Tables:
    """The blocks of tokens [first_token, num_tokens); ``block_ids`` are in order of the groups.

    Raises `GeometryError`.
    """
    tables = Tables({}, {}, set())
    for group, ids in zip(engine.groups, block_ids, strict=True):
        start, stop = group.positions(first_token, num_tokens)
        if start < stop:
            first = start // group.block_size
            tables.block_ids[group.name] = _needed(group, ids, first, stop)
            tables.first_blocks[group.name] = first
            if start > max(first_token, first * group.block_size):
                tables.partial.add(tables.block_ids[group.name][0])
    return tables


def _needed(group: GroupSpec, ids: Sequence[int], first: int, stop: int) -> list[int]:
    end = num_blocks_for(stop, group.block_size)
    needed = list(ids[first:end])
    if len(needed) < end - first or NULL_BLOCK in needed:
        raise GeometryError(
            f"group '{group.name}': vLLM keeps {len(ids)} blocks of the request, and not all of "
            f"blocks {first} to {end} that tokens up to {stop} need",
            group=group.name,
        )
    return needed
