"""A plan as plain values, for ``--json``.

Refuses to leave a key out: what is not known, or not so, is null.
"""

from dataclasses import asdict
from typing import Any

from kvbus.geometry import GroupSpec
from kvbus.plan.paths import PathPlan
from kvbus.plan.plan import Plan, Read
from kvbus.plan.reason import reason
from kvbus.plan.spec import Side
from kvbus.planning.fetch_shape import ALL_PATHS


def as_values(plan: Plan) -> dict[str, Any]:
    """What `json` can write; seconds, bytes, and half-open intervals as lists of two."""
    request, means = plan.request, plan.means
    return {
        "from": _side(plan.prefill),
        "to": _side(plan.decode),
        "tokens": [request.first_token, request.num_tokens],
        "bytes": plan.num_bytes,
        "reads": [_read(read) for read in plan.reads],
        "unread_ranks": list(plan.unread_ranks),
        "paths": {path.value: _path(plan.path(path)) for path in ALL_PATHS},
        "choice": {
            "path": plan.chosen.path.value,
            "is_forced": request.path is not None,
            "reason": reason(plan),
        },
        "slot_bytes": means.slot_bytes,
        "rates_from": means.rates_from,
        "rates": asdict(means.rates),
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "model": side.engine.model,
        "tp": side.engine.tp_size,
        "pp": side.engine.pp_size,
        "axes": [axis.value for axis in side.layout.axes],
        "groups": [_group(group) for group in side.engine.groups],
    }


def _group(group: GroupSpec) -> dict[str, Any]:
    return {
        "name": group.name,
        "layers": list(group.layers),
        "block": group.block_size,
        "kv_heads": group.num_kv_heads,
        "head": group.head_dim,
        "dtype": group.dtype,
        "parts": [str(part) for part in group.parts],
        "window": group.window,
        "state": [[one.name, one.num_units, one.unit_bytes] for one in group.state],
    }


def _read(read: Read) -> dict[str, Any]:
    share = read.share
    return {
        "prefill_rank": share.holder,
        "decode_rank": share.reader,
        "group": share.group,
        "layers": list(share.layers),
        "parts": [str(part) for part in share.parts],
        "heads": [share.first_head, share.first_head + share.num_heads],
        "positions": list(read.positions),
        "bytes": read.num_bytes,
    }


def _path(path: PathPlan | None) -> dict[str, Any] | None:
    if path is None:
        return None
    stages = path.prediction.stages
    return {
        "seconds": path.prediction.seconds,
        "gather_s": stages.gather_s,
        "read_s": stages.read_s,
        "scatter_s": stages.scatter_s,
        "descriptors": path.num_descriptors,
        "bytes": path.num_bytes,
        "over_read_bytes": path.over_read_bytes,
        "slot_bytes": path.slot_bytes,
        "boxes": path.num_boxes,
        "box_bytes": path.box_bytes,
    }
