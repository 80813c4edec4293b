"""From a `Pack` to what has to be gathered, checked against the engine and the rank that holds it.

Refuses boxes, tables and orders that are none of the group's. What the rank does not hold is
refused by the copy itself, before any byte moves.
"""

from dataclasses import dataclass

from kvbus.agent.engines import LocalEngine
from kvbus.agent.segments import RankMemory
from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    BlockTable,
    Box,
    GroupSpec,
    SlotOrder,
    slot_bytes,
    slot_region,
)
from kvbus.protocol.peer import Pack


@dataclass(frozen=True, slots=True)
class Gather:
    """One box to be copied: from the blocks ``table`` of a rank, into a slot in ``order``."""

    engine: LocalEngine
    memory: RankMemory
    group: GroupSpec
    box: Box
    table: BlockTable
    order: SlotOrder
    num_bytes: int


def check_box(engine: LocalEngine, pack: Pack, *, max_bytes: int) -> Gather:
    """What to copy for ``pack``; raises `GeometryError` for a box that is not there."""
    box, order = pack.box, pack.order
    memory, group = check_rank_has(engine, pack.rank, box, pack.table)
    _check_size(group, box, order, max_bytes)
    slot_region(group, box, order)  # refuses a box that is none of the group's
    return Gather(
        engine=engine,
        memory=memory,
        group=group,
        box=box,
        table=pack.table,
        order=order,
        num_bytes=slot_bytes(group, box, order),
    )


def check_rank_has(
    engine: LocalEngine, rank: int, box: Box, table: BlockTable
) -> tuple[RankMemory, GroupSpec]:
    """The memory and the group of a box; raises `GeometryError` for a table that is not theirs."""
    memory, groups = engine.ranks.get(rank), {one.name: one for one in engine.spec.groups}
    if memory is None:
        raise GeometryError(
            f"rank {rank} of engine '{engine.engine_id}' is not here, but "
            f"{', '.join(map(str, sorted(engine.ranks)))}",
            field="rank",
        )
    group = groups.get(box.group)
    if group is None:
        raise GeometryError(
            f"no group '{box.group}', the engine has {', '.join(sorted(groups))}", field="group"
        )
    table.check_covers(box.start, box.stop, group.block_size)
    table.check_ids(memory.num_blocks.get(group.name, 0))
    return memory, group


def _check_size(group: GroupSpec, box: Box, order: SlotOrder, max_bytes: int) -> None:
    """Refuse here what is far too large: only to describe it would take memory and time."""
    if box.parts[0] not in group.parts:
        raise GeometryError(f"group '{group.name}' has no part '{box.parts[0]}'", field="parts")
    positions = max(box.stop - box.start, order.block_size)
    heads = len(box.layers) * len(box.parts) * box.num_heads
    head_bytes = group.part_shape(box.parts[0]).head_dim * DTYPE_SIZES_BYTES[group.dtype]
    box_bytes = positions * heads * head_bytes
    if box_bytes > max_bytes:
        raise GeometryError(
            f"a box of {box_bytes} bytes or more is larger than a slot of {max_bytes} bytes: "
            "ask for a smaller one",
            box_bytes=box_bytes,
            slot_bytes=max_bytes,
        )
