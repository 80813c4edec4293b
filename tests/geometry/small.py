"""A small engine and a rank of it that the tests of refusals change in one place each.

Two layers of K and V in one tensor each; 4 blocks of 2 tokens, 2 heads of 4 numbers, float16.
"""

from kvbus.geometry import (
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    KvPart,
    RankSpec,
    Region,
    Segment,
)

PARTS = (KvPart.KEY, KvPart.VALUE)
AXES = (
    Axis(AxisName.BLOCK, 4, 64),
    Axis(AxisName.KV, 2, 32),
    Axis(AxisName.TOKEN, 2, 16),
    Axis(AxisName.HEAD, 2, 8),
    Axis(AxisName.DIM, 4, 2),
)
ENGINE = EngineSpec("e", "m", 1, (GroupSpec("full", (0, 1), 2, 2, 4, "float16", PARTS),))
RANK = RankSpec(
    rank=0,
    segments=(Segment("kv", 512),),
    regions=tuple(
        Region("kv", 256 * layer, "full", (layer,), PARTS, 0, 2, AXES) for layer in (0, 1)
    ),
)
