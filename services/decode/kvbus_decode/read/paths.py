"""Which paths a route can take, and which of them a fetch takes: `kvbus.planning.choose_path`."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from kvbus.agent.service import Agent
from kvbus.errors import ConfigError, ErrorCode, LocalError, TransferFailed
from kvbus.planning import Path, Spans, choose_path, usual_box_bytes
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import Ahead
from kvbus_decode.fetch.events import Requested
from kvbus_decode.peer.route import Route
from kvbus_decode.read.chunk import Chunk

WITHOUT_BOXES = (Path.DIRECT, Path.MAPPED)
"""Paths that need nothing of the prefill agent that is asked for under an epoch."""


@dataclass(frozen=True, slots=True)
class PathChoice:
    """A path, and the size of its boxes in bytes (0 without)."""

    path: Path
    box_bytes: int = 0


class PathChooser:
    """Knows which paths are open on each route."""

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent, self._config = agent, config
        self._paths: WeakKeyDictionary[Route, tuple[Path, ...]] = WeakKeyDictionary()

    def choose(
        self, route: Route, spans: Spans, replica_index: int, *, leased: bool = True
    ) -> PathChoice:
        """The path of a chunk, which `Chunk` describes; one of `WITHOUT_BOXES` if not ``leased``.

        A box has to fit the slots of both sides; where no path has boxes that do, that is for
        `cut_into_boxes` to refuse. Raises `ConfigError` when no path is open.
        """
        paths = self._paths.get(route)
        if paths is None or (Path.MAPPED in paths and not route.is_mapped):
            # the others stay open, or closed, for as long as the route is used
            packs_here = self._agent.staging.packs
            paths = open_paths(route, self._config.path, packs_here=packs_here)
            self._paths[route] = paths
        if not leased:
            paths = _without_boxes(paths)
        num_bytes = route.num_bytes(spans)
        if not num_bytes or paths == (Path.DIRECT,) or Path.MAPPED in paths:  # or it zeroes a tail
            return PathChoice(Path.MAPPED if Path.MAPPED in paths else paths[0])
        slot_bytes, work = self._slot_bytes(route), route.work
        if not work.can_reorder:
            paths = tuple(path for path in paths if path is not Path.REORDERED)
        if not paths:
            raise no_common_order(self._config.path)
        fits = (one for one in paths if work.least_box_bytes(one) <= slot_bytes)
        path = choose_path(
            tuple(fits) or paths,
            num_bytes=num_bytes,
            num_runs=_num_runs(route, spans, replica_index),
            repeated_bytes=work.repeated_bytes(spans),
        )
        if path in WITHOUT_BOXES:
            return PathChoice(path)
        least = work.least_box_bytes(path)
        usual = usual_box_bytes(num_bytes, slot_bytes=slot_bytes)
        return PathChoice(path, min(slot_bytes, max(usual, least)))

    def still(self, choice: object, chunk: Chunk) -> PathChoice:
        """``choice``, or another for this chunk: memory that was mapped may be closed by now."""
        route, leased = chunk.route, chunk.epoch > 0
        if isinstance(choice, PathChoice):
            is_open = choice.path is not Path.MAPPED or route.is_mapped
            if is_open and (leased or choice.path in WITHOUT_BOXES):
                return choice
        return self.choose(route, chunk.spans, chunk.replica_index, leased=leased)

    def _slot_bytes(self, route: Route) -> int:
        """The smallest slot on the way."""
        slots = [source.slot_bytes for source in route.sources]
        if self._agent.staging.packs:
            slots.append(self._agent.staging.slot_bytes)
        return min(slots)


def ahead_of(requested: Requested, route: Route, choice: PathChoice) -> Ahead | None:
    """What the fetch can read by the blocks that its ticket names, before there is a lease.

    None when it has to claim first: a box is packed under an epoch, and agents that have no lease
    to look at are asked to drive their part of a read as long as it lasts. Raises `ProtocolError`
    when the ticket's blocks are none.
    """
    if choice.path not in WITHOUT_BOXES or not _names_all(requested):
        return None
    if route.others or requested.others or requested.access:
        return None
    # Only the prefill agent's progress ends a READ over TCP, or one that has to connect first: the
    # lease makes it drive. A copy here needs nobody.
    return Ahead(requested.ticket.tables(), claims=choice.path is Path.DIRECT)


def _names_all(requested: Requested) -> bool:
    """Whether the ticket names blocks, and they hold all that is wanted, in one chunk."""
    ticket, num_tokens = requested.ticket, requested.asked.num_tokens
    if not ticket.blocks or requested.asked.chunk_tokens or ticket.num_tokens < num_tokens:
        return False
    return ticket.num_tokens == num_tokens or not requested.has_state


def _num_runs(route: Route, spans: Spans, replica_index: int) -> int:
    plans = route.plans(replica_index)
    return sum(plan.direct.num_descriptors(spans) for plan in plans if plan.direct)


def _without_boxes(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Those of ``paths`` that need no lease; raises `LocalError` when they have closed."""
    found = tuple(path for path in paths if path in WITHOUT_BOXES)
    if not found:
        message = "the path that needs no lease has closed while the fetch waited"
        raise LocalError(message, code=ErrorCode.ENGINE_LOST)
    return found


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
