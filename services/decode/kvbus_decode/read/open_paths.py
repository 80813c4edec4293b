"""Which paths a route can take, with what the configuration wants and what both sides have.

Refuses a route without any, and says which key of which side has closed them.
"""

from kvbus.errors import ConfigError, TransferFailed
from kvbus.planning import Path
from kvbus_decode.peer.route import Route


def open_paths(route: Route, wanted: str, *, packs_here: bool) -> tuple[Path, ...]:
    """The paths that are ``wanted`` (one, or ``auto``) and can be taken, in the order of `Path`.

    ``packs_here`` says whether this agent has slots. Raises `ConfigError` when there is none, and
    `TransferFailed` when there was one, to memory that is not mapped any more.
    """
    closed = _closed(route, packs_here=packs_here)
    found = tuple(path for path in Path if wanted in ("auto", path) and path not in closed)
    if found:
        return found
    if any(source.nixl is None for source in route.sources):
        raise TransferFailed(_unmapped(route))
    if wanted != "auto":
        raise ConfigError(
            f"key 'path' of the configuration forces '{wanted}', but {closed[Path(wanted)]}",
            key="path",
        )
    unregistered = _unregistered(route)
    raise ConfigError(
        f"{unregistered}, so that its KV goes through staging slots alone, but "
        f"{closed[Path.PACKED]}: raise it there",
        key="staging_bytes",
    )


def no_common_order(wanted: str) -> ConfigError:
    """The refusal of the reordered path, when it is the one that is left."""
    if wanted == "auto":
        return ConfigError(
            "key 'staging_bytes' is 0 at the decode agent, and without slots of its own it cannot "
            "read an engine that is unregistered into regions of different orders: raise it",
            key="staging_bytes",
        )
    return ConfigError(
        f"key 'path' of the configuration forces '{wanted}', which cannot be taken: the decode "
        "engine's regions have different orders",
        key="path",
    )


def _closed(route: Route, *, packs_here: bool) -> dict[Path, str]:
    """Why paths cannot be taken."""
    closed: dict[Path, str] = {}
    if not route.is_mapped:
        closed[Path.MAPPED] = _unmapped(route)
    if not (route.prefill_direct and route.decode_direct):
        closed[Path.DIRECT] = _unregistered(route)
    if not route.decode_direct:
        closed[Path.REORDERED] = "the memory of the decode engine is unregistered"
    if not packs_here:
        closed[Path.PACKED] = "key 'staging_bytes' is 0 at the decode agent"
    for source in route.sources:
        if source.nixl is None:
            for path in (Path.DIRECT, Path.REORDERED, Path.PACKED):
                closed[path] = "the memory of the prefill engine is mapped, and not known to NIXL"
            break
        if not source.slot_bytes:
            reason = f"key 'staging_bytes' is 0 at the prefill agent ({source.peer.endpoint})"
            closed[Path.PACKED] = closed[Path.REORDERED] = reason
    return closed


def _unmapped(route: Route) -> str:
    if not route.decode_mapped:
        return "the memory of the decode engine is on a GPU"
    for source in route.sources:
        if source.mapped is None or not source.mapped.is_open:
            where = source.peer.endpoint
            why = source.unmapped if source.mapped is None else source.mapped.closed
            return f"the memory of the prefill engine ({where}) is not mapped here: {why}"
    return "it ended"


def _unregistered(route: Route) -> str:
    side = "decode" if not route.decode_direct else "prefill"
    return f"the memory of the {side} engine is unregistered"
