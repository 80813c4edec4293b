"""Which blocks of a group one request needs, on the side that computes and on the one that reads.

Refuses to keep what a sliding window has left behind: the decode side has the tail only.
"""

from collections.abc import Callable

from kvbus.demo.paged_cache import Tables
from kvbus.demo.work import EngineSetup
from kvbus.geometry import GroupSpec, num_blocks_for

MostBlocks = Callable[[GroupSpec, EngineSetup], int]


def prefill_blocks(group: GroupSpec, num_tokens: int) -> range:
    """By position, the blocks of a prompt."""
    return range(num_blocks_for(num_tokens, group.block_size))


def decode_blocks(group: GroupSpec, num_tokens: int, num_new: int) -> range:
    """By position, the blocks of what is read of a prompt, and of the new tokens after it."""
    first, _ = group.positions(0, num_tokens)
    size = group.block_size
    return range(first // size, num_blocks_for(num_tokens + num_new, size))


def new_blocks(tables: Tables, block_size: int, start: int, stop: int) -> dict[str, list[int]]:
    """By group, the blocks of tokens up to ``stop`` that those up to ``start`` do not need."""
    new = slice(num_blocks_for(start, block_size), num_blocks_for(stop, block_size))
    return {group: table.array()[new].tolist() for group, table in tables.items()}


def num_blocks(tables: Tables) -> int:
    """Blocks of all groups."""
    return sum(map(len, tables.values()))


def most_prefill_blocks(group: GroupSpec, setup: EngineSetup) -> int:
    """How many one request can need."""
    return len(prefill_blocks(group, setup.max_prompt_tokens))


def most_decode_blocks(group: GroupSpec, setup: EngineSetup) -> int:
    """How many one request can need; a window begins anywhere in a block."""
    size, num_tokens = group.block_size, setup.max_prompt_tokens + setup.max_new_tokens
    if group.window is not None:
        num_tokens = min(num_tokens, group.window + setup.max_new_tokens + size - 1)
    return num_blocks_for(num_tokens, size)
