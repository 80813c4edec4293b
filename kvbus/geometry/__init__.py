"""KV memory geometry: the address of each token's bytes."""

from kvbus.geometry.blocks import FEW_IDS, MAX_BLOCKS, NO_BLOCKS, BlockTable, num_blocks_for
from kvbus.geometry.layouts import (
    KvLayout,
    held_heads,
    held_layers,
    lay_out_rank,
    slot_bytes,
    slot_region,
    staged_regions,
)
from kvbus.geometry.resizing import ResizedRanks, Space, resize_ranks
from kvbus.geometry.spec import (
    DTYPE_SIZES_BYTES,
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    KvPart,
    RankSpec,
    Region,
    Segment,
    StatePart,
    Tile,
    state_group,
)
from kvbus.geometry.tables import check_exact, check_fetched, check_offered, check_readable
from kvbus.geometry.validation import check_axes, validate_engine, validate_rank, validate_ranks

__all__ = [
    "DTYPE_SIZES_BYTES",
    "FEW_IDS",
    "MAX_BLOCKS",
    "NO_BLOCKS",
    "Axis",
    "AxisName",
    "BlockTable",
    "EngineSpec",
    "GroupSpec",
    "KvLayout",
    "KvPart",
    "RankSpec",
    "Region",
    "ResizedRanks",
    "Segment",
    "Space",
    "StatePart",
    "Tile",
    "check_axes",
    "check_exact",
    "check_fetched",
    "check_offered",
    "check_readable",
    "held_heads",
    "held_layers",
    "lay_out_rank",
    "num_blocks_for",
    "resize_ranks",
    "slot_bytes",
    "slot_region",
    "staged_regions",
    "state_group",
    "validate_engine",
    "validate_rank",
    "validate_ranks",
]
