"""Says whether the KV of one engine can become the KV of another.

Refuses, with code ``incompatible``, the field and both values, what would give wrong tokens:
another model, other groups, layers, heads or dtypes. Tensor and pipeline parallelism, block sizes
and layouts may differ.
"""

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import EngineSpec, GroupSpec

GROUP_FIELDS = ("layers", "dtype", "num_kv_heads", "head_dim", "parts", "window", "state")


def check_compatible(prefill: EngineSpec, decode: EngineSpec) -> None:
    """Raise `GeometryError` (``incompatible``) at the first field in which the two sides differ.

    The error's detail has ``field``, ``prefill`` and ``decode``.
    """
    _refuse_difference("model", prefill.model, decode.model)
    read, held = ({group.name for group in side.groups} for side in (decode, prefill))
    offered = tuple(one for one in prefill.groups if one.name in read or not one.optional)
    wanted = tuple(one for one in decode.groups if one.name in held or not one.optional)
    _refuse_difference("groups", _names(offered), _names(wanted))
    for ours in offered:
        theirs = decode.group(ours.name)
        for field in GROUP_FIELDS:
            _refuse_difference(
                f"{ours.name}.{field}", _shown(getattr(ours, field)), _shown(getattr(theirs, field))
            )


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


def _shown(value: object) -> str:
    """As text; layers and parts in any order are the same."""
    if not isinstance(value, tuple):
        return str(value)
    ordered = sorted(value, key=lambda one: (one if isinstance(one, int) else 0, str(one)))
    return ",".join(map(str, ordered))
