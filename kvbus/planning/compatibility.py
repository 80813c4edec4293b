"""Says whether the KV of one engine can become the KV of another.

Refuses, with code ``incompatible``, the field and both values, what would give wrong tokens (model,
dtype, heads) and what this version cannot plan (other tensor parallelism, block size or layout).
"""

from collections.abc import Iterator

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import AxisName, EngineSpec, GroupSpec, RankSpec, Region

GROUP_FIELDS = (
    "layers",
    "dtype",
    "num_kv_heads",
    "head_dim",
    "parts",
    "window",
    "block_size",
)


def check_compatible(
    prefill: EngineSpec,
    prefill_ranks: tuple[RankSpec, ...],
    decode: EngineSpec,
    decode_ranks: tuple[RankSpec, ...],
) -> None:
    """Raise `GeometryError` (``incompatible``) at the first field in which the two sides differ.

    Ranks are ordered by number. The error's detail has ``field``, ``prefill`` and ``decode``.
    """
    _refuse_difference("model", prefill.model, decode.model)
    _refuse_difference("groups", _names(prefill.groups), _names(decode.groups))
    for ours in prefill.groups:
        theirs = decode.group(ours.name)
        for field in GROUP_FIELDS:
            _refuse_difference(
                f"{ours.name}.{field}", _shown(getattr(ours, field)), _shown(getattr(theirs, field))
            )
    _refuse_difference("tp_size", str(prefill.tp_size), str(decode.tp_size))
    _refuse_difference("ranks", _numbers(prefill_ranks), _numbers(decode_ranks))
    for one, other in zip(prefill_ranks, decode_ranks, strict=True):
        for group in prefill.groups:
            field = f"{group.name}.layout of rank {one.rank}"
            _refuse_difference(field, _layout(one, group.name), _layout(other, group.name))


def _refuse_difference(field: str, prefill: str, decode: str) -> None:
    if prefill != decode:
        raise GeometryError(
            f"engines differ in {field}: prefill has {prefill}, decode has {decode}",
            code=ErrorCode.INCOMPATIBLE,
            field=field,
            prefill=prefill[:512],
            decode=decode[:512],
        )


def _names(groups: tuple[GroupSpec, ...]) -> str:
    return ",".join(sorted(group.name for group in groups))


def _numbers(ranks: tuple[RankSpec, ...]) -> str:
    return ",".join(str(rank.rank) for rank in ranks)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _layout(rank: RankSpec, group: str) -> str:
    """The regions of a group as text: equal text means equal order of everything but padding."""
    regions = sorted(
        (region for region in rank.regions if region.group == group),
        key=lambda region: (region.layers, region.parts),
    )
    shapes: dict[str, int] = {}
    for region in regions:
        shape = "[" + ",".join(_axes(region)) + "]" + f"@{region.first_head}"
        shapes[shape] = shapes.get(shape, 0) + 1
    return " ".join(f"{count}x{shape}" for shape, count in shapes.items())


def _axes(region: Region) -> Iterator[str]:
    """Axes outermost first with their sizes; the block axis without, for caches differ in it."""
    for axis in sorted(region.axes, key=lambda axis: -axis.stride_bytes):
        if axis.name is AxisName.BLOCK:
            yield "block"
        elif axis.size > 1:
            yield f"{axis.name}:{axis.size}"
