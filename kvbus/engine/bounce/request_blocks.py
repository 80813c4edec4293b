"""The blocks of one request, on the device and on the host, by position (pure).

Refuses blocks that are not exactly those of the tokens that they are said to hold.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvbus.engine.bounce.copies import BlockCopy, cut_into_copies
from kvbus.engine.bounce.host_pool import HostTables
from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, num_blocks_for
from kvbus.geometry.blocks import BlockIds


class RequestBlocks:
    """Two tables for each group, that of the device and that of the host.

    Both start at block ``firsts[group]`` of the request. The device's may grow; the host's are
    those of the whole request from the beginning.
    """

    def __init__(
        self,
        engine: EngineSpec,
        *,
        firsts: Mapping[str, int],
        host_tables: HostTables,
        device_tables: Mapping[str, BlockTable] | None = None,
    ) -> None:
        self.engine, self.firsts, self.host_tables = engine, dict(firsts), dict(host_tables)
        known = {name: table.array() for name, table in (device_tables or {}).items()}
        self._device_ids = {
            group: known.get(group, np.empty(0, dtype=np.uint32)) for group in host_tables
        }

    def add(self, num_tokens: int, given: Mapping[str, BlockIds]) -> None:
        """More blocks of the device, by group: with them there are those of ``num_tokens`` tokens.

        Of a state, its block, in place of what it was. Raises `GeometryError`, and adds none.
        """
        check_groups(self.engine, given)
        merged = {
            group.name: self._with(group, given.get(group.name), num_tokens)
            for group in self.engine.groups
        }
        self._device_ids = merged

    def on_host(self, name: str, start: int, stop: int) -> BlockIds:
        """The host blocks that tokens up to ``stop`` need, and those up to ``start`` do not."""
        group, first = self.engine.group(name), self.firsts.get(name, 0)
        at, end = (max(0, blocks_of(group, tokens) - first) for tokens in (start, stop))
        return self.host_tables[name][at:end]

    def copies(self, spans: Mapping[str, tuple[int, int]]) -> list[BlockCopy]:
        """What to copy for these positions, by group; those in front of the tables are left out."""
        copies: list[BlockCopy] = []
        for name, (start, stop) in spans.items():
            group, first = self.engine.group(name), self.firsts.get(name, 0)
            copies += cut_into_copies(
                name,
                self._device_ids[name],
                self.host_tables[name],
                span=(max(start, first * group.block_size), stop),
                block_size=group.block_size,
                first_block=first,
            )
        return copies

    def _with(self, group: GroupSpec, new: BlockIds | None, num_tokens: int) -> BlockIds:
        known = self._device_ids[group.name]
        if new is None:
            new = np.empty(0, dtype=np.uint32)
        if group.state:
            if len(new) > 1:
                raise GeometryError(
                    f"a state has one block, {len(new)} are given for group '{group.name}'",
                    field="block_ids",
                )
            return new if len(new) else known
        needed = max(0, blocks_of(group, num_tokens) - self.firsts.get(group.name, 0))
        if len(known) + len(new) != needed:
            raise GeometryError(
                f"{num_tokens} tokens need {needed} blocks of group '{group.name}', {len(known)} "
                f"are known and {len(new)} are given",
                field="block_ids",
                needed=needed,
            )
        return np.concatenate([known, new])


def block_arrays(block_ids: Mapping[str, npt.ArrayLike]) -> dict[str, BlockIds]:
    """Copies of the ids; raises `GeometryError` for ids that are none."""
    return {name: BlockTable.of(ids).array() for name, ids in block_ids.items()}


def blocks_of(group: GroupSpec, num_tokens: int) -> int:
    """Blocks that the first ``num_tokens`` tokens of a request occupy."""
    return min(1, num_tokens) if group.state else num_blocks_for(num_tokens, group.block_size)


def check_groups(engine: EngineSpec, named: Mapping[str, object]) -> None:
    """Raise `GeometryError` when a group is named that the engine does not have."""
    if unknown := sorted(named.keys() - {group.name for group in engine.groups}):
        raise GeometryError(f"the engine has no group {', '.join(unknown)}", field="block_ids")
