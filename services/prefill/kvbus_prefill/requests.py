"""Checks what an engine offers against the memory that it registered."""

from collections.abc import Mapping

from kvbus.agent.engines import LocalEngine
from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable, GroupSpec, num_blocks_for

NO_BLOCKS = BlockTable(b"")


def check_tables(
    engine: LocalEngine, tables: Mapping[str, BlockTable], num_tokens: int, *, sealed: bool
) -> None:
    """Raise `GeometryError` unless ``tables`` hold what ``num_tokens`` tokens need of each group.

    While an offer is open, a group may have no table yet if no token needs it, and one with a
    window may lack blocks that its end does not need.
    """
    groups = {group.name: group for group in engine.spec.groups}
    if tables.keys() - groups.keys() or (sealed and tables.keys() != groups.keys()):
        raise GeometryError(
            f"tables are of groups {sorted(tables)}, the engine has {sorted(groups)}"
        )
    for name, group in groups.items():
        table = tables.get(name, NO_BLOCKS)
        table.check_ids(engine.num_blocks(name))
        _check_table(group, table, num_tokens, sealed=sealed)


def _check_table(group: GroupSpec, table: BlockTable, num_tokens: int, *, sealed: bool) -> None:
    start, stop = group.positions(0, num_tokens)
    needed, given = num_blocks_for(stop, group.block_size), table.first_block + len(table)
    if given < needed:
        raise GeometryError(
            f"group '{group.name}': {num_tokens} tokens need {needed} blocks, "
            f"the table ends at block {given}",
            needed=needed,
            given=given,
        )
    if group.state and given > 1:
        raise GeometryError(
            f"group '{group.name}' is a state: its table has one block, not {given}", given=given
        )
    if group.window is None and table.first_block:
        raise GeometryError(f"group '{group.name}' has no window, its table must start at block 0")
    if sealed and stop > start and table.first_block > start // group.block_size:
        raise GeometryError(
            f"group '{group.name}': a window of {group.window} tokens before token {num_tokens} "
            f"starts in block {start // group.block_size}, the table in {table.first_block}",
            needed=start // group.block_size,
            given=table.first_block,
        )
