"""Checks of block tables. Each raises `GeometryError`."""

from collections.abc import Callable, Mapping

from kvbus.errors import GeometryError
from kvbus.geometry.blocks import NO_BLOCKS, BlockTable
from kvbus.geometry.spec import EngineSpec, GroupSpec

Tables = Mapping[str, BlockTable]
NumBlocks = Callable[[str], int]


def check_offered(
    engine: EngineSpec, tables: Tables, num_tokens: int, *, sealed: bool, num_blocks: NumBlocks
) -> None:
    """Check the tables of an offer.

    In an open offer, a group without tokens needs no table. A group with a window may lack blocks
    that its end does not need.
    """
    _check_groups(engine, tables, all_groups=sealed)
    for group in engine.groups:
        table = tables.get(group.name, NO_BLOCKS)
        table.check_ids(num_blocks(group.name))
        end = table.first_block + len(table)
        if group.state and end > 1:
            raise GeometryError(
                f"group '{group.name}' is a state: its table has one block, not {end}", given=end
            )
        if group.window is None and table.first_block:
            raise GeometryError(
                f"group '{group.name}' has no window, its table must start at block 0"
            )
        start, stop = group.positions(0, num_tokens)
        if not sealed:
            start = max(start, table.first_block * group.block_size)
        table.check_holds(start, stop, group.block_size, group=group.name)


def check_fetched(
    engine: EngineSpec, tables: Tables, first_token: int, num_tokens: int, *, num_blocks: NumBlocks
) -> None:
    """Check the tables of a fetch.

    A fetch of no tokens may still read states. An unwanted optional group has an empty table.
    """
    _check_groups(engine, tables, all_groups=True)
    for group in engine.groups:
        table = tables[group.name]
        if group.optional and not table.ids:
            continue
        span = group.positions(first_token, num_tokens)
        if group.state and num_tokens and len(table):
            span = 0, 1
        check_exact(group, table, span, num_blocks=num_blocks(group.name))


def check_exact(
    group: GroupSpec, table: BlockTable, span: tuple[int, int], *, num_blocks: int
) -> None:
    """Check that the table is exactly the blocks of ``span``, each once."""
    table.check_covers(*span, group.block_size)
    table.check_ids(num_blocks)


def check_readable(
    group: GroupSpec, table: BlockTable, span: tuple[int, int], *, num_blocks: int
) -> None:
    """Check that the table includes the blocks of ``span``; blocks may repeat."""
    table.check_holds(*span, group.block_size, group=group.name)
    table.check_below(num_blocks)


def _check_groups(engine: EngineSpec, tables: Tables, *, all_groups: bool) -> None:
    known = {group.name for group in engine.groups}
    if tables.keys() - known or (all_groups and tables.keys() != known):
        raise GeometryError(
            f"tables are of groups {sorted(tables)}, the engine has {sorted(known)}"
        )
