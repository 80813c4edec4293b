"""The blocks of one request, on the device and on the host, and what to copy between them (pure).

Refuses blocks that are not exactly those of the tokens that they are said to hold, and to touch
slots outside of a span: a block that is filled partly is copied partly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbus.engine.bounce.host_pool import HostTables
from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, num_blocks_for
from kvbus.geometry.blocks import BlockIds
from kvbus.planning import Spans

NO_BLOCKS = BlockTable(b"")


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Device block ``device_ids[i]`` and host block ``first_host_block + i``, all alike.

    Of each block, token slots [slots[0], slots[1]).
    """

    group: str
    device_ids: BlockIds
    first_host_block: int
    slots: tuple[int, int]


class RequestBlocks:
    """Two tables for each group, that of the device and that of the host.

    Both start at the same block of the request. The device's may grow; the host's are those of the
    whole request from the beginning.
    """

    def __init__(
        self,
        engine: EngineSpec,
        host_tables: HostTables,
        device_tables: Mapping[str, BlockTable],
    ) -> None:
        self.engine, self.host_tables = engine, dict(host_tables)
        self._device_tables = dict(device_tables)

    @property
    def first_blocks(self) -> dict[str, int]:
        """By group, the block of the request that both tables start at."""
        return {name: table.first_block for name, table in self._device_tables.items()}

    def add(self, num_tokens: int, given: Mapping[str, BlockTable]) -> None:
        """More blocks of the device, by group: with them there are those of ``num_tokens`` tokens.

        Of a state, its block, in place of what it was. Raises `GeometryError`, and adds none.
        """
        check_groups(self.engine, given)
        self._device_tables = {
            group.name: self._with(group, given.get(group.name, NO_BLOCKS), num_tokens)
            for group in self.engine.groups
        }

    def on_host(self, start: int, stop: int) -> dict[str, BlockIds]:
        """The host blocks that tokens up to ``stop`` need, and those up to ``start`` do not."""
        return {
            group.name: self.host_tables[group.name][
                self._num_blocks(group, start) : self._num_blocks(group, stop)
            ]
            for group in self.engine.groups
        }

    def copies(self, spans: Spans) -> list[BlockCopy]:
        """What to copy for these positions, by group; those in front of the tables are left out."""
        return [
            copy
            for name, span in spans.items()
            for copy in cut_into_copies(
                self.engine.group(name), self._device_tables[name], self.host_tables[name], span
            )
        ]

    def _num_blocks(self, group: GroupSpec, num_tokens: int) -> int:
        first = self._device_tables[group.name].first_block
        return blocks_of(group, num_tokens, first=first)

    def _with(self, group: GroupSpec, new: BlockTable, num_tokens: int) -> BlockTable:
        known = self._device_tables[group.name]
        if group.state:
            if len(new) > 1:
                raise GeometryError(
                    f"a state has one block, {len(new)} are given for group '{group.name}'",
                    field="block_ids",
                )
            return BlockTable(new.ids or known.ids, known.first_block)
        needed = self._num_blocks(group, num_tokens)
        if len(known) + len(new) != needed:
            raise GeometryError(
                f"{num_tokens} tokens need {needed} blocks of group '{group.name}', {len(known)} "
                f"are known and {len(new)} are given",
                field="block_ids",
                needed=needed,
            )
        return BlockTable(known.ids + new.ids, known.first_block)


def cut_into_copies(
    group: GroupSpec, device_table: BlockTable, host_ids: BlockIds, span: tuple[int, int]
) -> Iterator[BlockCopy]:
    """The copies of positions [span) of one group; both tables start at the same block.

    A copy is of blocks whose host blocks follow each other and are copied whole, or of one block
    that is not.
    """
    device_ids, size = device_table.array(), group.block_size
    start, stop = max(span[0], device_table.first_block * size), span[1]
    while start < stop:
        block, slot = divmod(start, size)
        at = block - device_table.first_block
        if slot or stop - start < size:
            end, num_blocks = min(stop, (block + 1) * size), 1
            slots = slot, end - block * size
        else:
            num_blocks = _run_length(host_ids[at : at + (stop - start) // size])
            end, slots = start + num_blocks * size, (0, size)
        yield BlockCopy(group.name, device_ids[at : at + num_blocks], int(host_ids[at]), slots)
        start = end


def _run_length(ids: BlockIds) -> int:
    """How many ids from the first on follow each other."""
    breaks = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1)
    return int(breaks[0]) + 1 if breaks.size else len(ids)


def block_tables(block_ids: Mapping[str, npt.ArrayLike]) -> dict[str, BlockTable]:
    """Copies of the ids; raises `GeometryError` for ids that are none."""
    return {name: BlockTable.of(ids) for name, ids in block_ids.items()}


def blocks_of(group: GroupSpec, num_tokens: int, *, first: int) -> int:
    """Blocks, from ``first`` on, that the first ``num_tokens`` tokens of a request occupy."""
    end = min(1, num_tokens) if group.state else num_blocks_for(num_tokens, group.block_size)
    return max(0, end - first)


def check_groups(engine: EngineSpec, named: Mapping[str, object]) -> None:
    """Raise `GeometryError` when a group is named that the engine does not have."""
    if unknown := sorted(named.keys() - {group.name for group in engine.groups}):
        raise GeometryError(f"the engine has no group {', '.join(unknown)}", field="block_ids")
