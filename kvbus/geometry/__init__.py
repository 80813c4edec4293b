"""What KV memory means: engines, ranks, groups and regions, and where each token's bytes lie.

Refuses to move, map or plan anything: it only describes memory and says when a description is
impossible.
"""

from kvbus.geometry.blocks import BlockTable, num_blocks_for
from kvbus.geometry.layouts import KvLayout, held_heads, lay_out_rank
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
    head_interval,
)
from kvbus.geometry.validation import validate_engine, validate_rank

__all__ = [
    "DTYPE_SIZES_BYTES",
    "Axis",
    "AxisName",
    "BlockTable",
    "EngineSpec",
    "GroupSpec",
    "KvLayout",
    "KvPart",
    "RankSpec",
    "Region",
    "Segment",
    "head_interval",
    "held_heads",
    "lay_out_rank",
    "num_blocks_for",
    "validate_engine",
    "validate_rank",
]
