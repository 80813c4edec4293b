"""Path selection and predicted times of fetches."""

from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.service import Agent
from kvbus.errors import ConfigError, ErrorCode, KVBusError, LocalError, TransferFailed
from kvbus.planning import (
    Learned,
    Path,
    SpanMap,
    Spans,
    bytes_by_group,
    choose_path,
    span_bytes,
    usual_tile_bytes,
)
from kvbus.protocol.tools import Cost, Predicted
from kvbus_decode.chunk import Chunk
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch.events import Requested, SpeculativeRead
from kvbus_decode.route import PathChoice, Route
from kvbus_decode.route_book import RouteBook

HANDSHAKE_S = 0.1
"""Estimated time for two engines to connect."""

UNPACKED = (Path.DIRECT, Path.STAGED, Path.MAPPED)
"""Paths that request nothing of the prefill agent under an epoch."""


class PathChooser:
    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._staging, self._wanted = agent.staging, config.path

    def choose(self, route: Route, first_token: int, num_tokens: int) -> PathChoice | None:
        """Return a path, or None where `path_of` raises."""
        try:
            paths = self._open_paths(route)
            if Path.MAPPED in paths:
                return PathChoice(Path.MAPPED)
            spans = route.spans.whole(first_token, num_tokens)
            return self._choose(route, paths, spans, replica_index=0)
        except KVBusError:
            return None

    def path_of(self, chunk: Chunk) -> PathChoice:
        """Return the path of the fetch, or another if its mapped memory has closed."""
        route, fetch, request, leased = (
            chunk.route,
            chunk.fetch,
            chunk.request,
            chunk.wanted.epoch > 0,
        )
        choice = fetch.choice or self.choose(route, request.first_token, request.num_tokens)
        if choice is not None:
            fetch.choice = choice
            is_open = choice.path is not Path.MAPPED or route.is_mapped
            if is_open and (leased or choice.path in UNPACKED):
                return choice
        paths = self._open_paths(route)
        if not leased:
            paths = _unpacked(paths)
        return self._choose(route, paths, chunk.spans, fetch.replica_index)

    def _choose(
        self, route: Route, paths: tuple[Path, ...], spans: Spans, replica_index: int
    ) -> PathChoice:
        if Path.MAPPED in paths:
            return PathChoice(Path.MAPPED)
        num_bytes = route.num_bytes(spans)
        if not num_bytes or paths == (Path.DIRECT,):  # only a tail to zero
            return PathChoice(paths[0])
        # A tile must fit the slots of both sides, or `cut_into_tiles` raises.
        slot_bytes, least = self._slot_bytes(route), route.least_tile_bytes
        plans = route.plans(replica_index)
        staged = [one for plan in plans for one in plan.staged]
        path = choose_path(
            tuple(one for one in paths if one is not Path.PACKED or least <= slot_bytes) or paths,
            num_bytes=num_bytes,
            num_runs=sum(plan.direct.num_runs(spans) for plan in plans if plan.direct),
            repeated_bytes=route.repeated_bytes(spans),
            num_staged_runs=sum(plan.num_runs(spans) for plan in staged),
        )
        if path in (Path.DIRECT, Path.MAPPED):
            return PathChoice(path)
        if path is Path.STAGED:
            slot_bytes, least = self._staging.slot_bytes, 1
        tile_bytes = usual_tile_bytes(num_bytes, least=least, slot_bytes=slot_bytes)
        return PathChoice(path, tile_bytes)

    def _open_paths(self, route: Route) -> tuple[Path, ...]:
        """Return the open paths; only mapped memory may close while the route is used."""
        if route.paths and (route.is_mapped or Path.MAPPED not in route.paths):
            return route.paths
        closed = _closed(route, packs_here=self._staging.packs)
        paths = tuple(
            path for path in Path if self._wanted in ("auto", path) and path not in closed
        )
        if paths:
            route.paths = paths
            return paths
        if any(source.nixl is None for source in route.sources):
            raise TransferFailed(_unmapped(route))
        if self._wanted != "auto":
            why = closed[Path(self._wanted)]
            message = f"key 'path' of the configuration forces '{self._wanted}', but {why}"
            raise ConfigError(message, key="path")
        reasons = "; ".join(f"not {path}: {why}" for path, why in closed.items())
        raise ConfigError(f"the KV can take no path: {reasons}", key="staging_bytes")

    def _slot_bytes(self, route: Route) -> int:
        slots = [source.slot_bytes for source in route.sources]
        return min([*slots, self._staging.slot_bytes] if self._staging.packs else slots)


def speculative_read_of(
    requested: Requested, route: Route, choice: PathChoice
) -> SpeculativeRead | None:
    """Return the read that needs no lease, if any. Raises `ProtocolError` for invalid blocks."""
    if choice.path not in UNPACKED or not _names_all(requested):
        return None
    if route.remote_sources or requested.remote_ranks or requested.rank_secret:
        return None  # other agents drive a read only on request
    # A READ over TCP, or with a new connection, needs progress at the prefill agent. The lease
    # makes that agent drive it. A copy needs no progress there, whether this process or the kernel
    # (CMA) makes it.
    is_copied = choice.path is Path.MAPPED or route.home.is_undriven
    return SpeculativeRead(requested.source.tables(), acquires=not is_copied)


def _names_all(requested: Requested) -> bool:
    ticket, num_tokens = requested.source, requested.request.num_tokens
    if not ticket.blocks or requested.request.chunk_tokens or ticket.num_tokens < num_tokens:
        return False
    return ticket.num_tokens == num_tokens or not requested.has_state


def _unpacked(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    found = tuple(path for path in paths if path in UNPACKED)
    if not found:
        message = "the path that needs no lease has closed while the fetch waited"
        raise TransferFailed(message)
    return found


def _closed(route: Route, *, packs_here: bool) -> dict[Path, str]:
    closed: dict[Path, str] = {}
    if not route.is_mapped:
        closed[Path.MAPPED] = _unmapped(route)
    if not (route.prefill_direct and route.decode_direct):
        side = "decode" if not route.decode_direct else "prefill"
        closed[Path.DIRECT] = f"the memory of the {side} engine is unregistered"
    if not route.is_staged:
        closed[Path.STAGED] = _unstaged(route)
    if not packs_here:
        reason = "key 'staging_bytes' is 0 at the decode agent"
        closed[Path.STAGED] = closed[Path.PACKED] = reason
    for source in route.sources:
        if source.nixl is None:
            for path in (Path.DIRECT, Path.STAGED, Path.PACKED):
                closed[path] = "the memory of the prefill engine is mapped, and not known to NIXL"
            break
        if not source.slot_bytes:
            reason = f"key 'staging_bytes' is 0 at the prefill agent ({source.peer.endpoint})"
            closed[Path.PACKED] = reason
    return closed


def _unstaged(route: Route) -> str:
    if not route.prefill_direct:
        return "the memory of the prefill engine is unregistered"
    if not route.decode_on_host:
        return "the memory of the decode engine is on a GPU"
    if route.is_mapped:
        return "the memory of the prefill engine is mapped"
    return "a block of one layer is larger than a slot (key 'slot_bytes')"


def _unmapped(route: Route) -> str:
    for source in route.sources:
        if not source.is_mapped:
            where = source.peer.endpoint
            why = source.unmapped if source.mapped is None else source.mapped.closed
            return f"the memory of the prefill engine ({where}) is not mapped here: {why}"
    return "it ended"


class CostBook:
    def __init__(self, agent: Agent, routes: RouteBook, chooser: PathChooser) -> None:
        self._agent, self._routes, self._chooser = agent, routes, chooser

    def cost(self, request: Cost) -> Predicted:
        first, last = request.first_token, request.num_tokens
        if first > last:
            message = f"first_token {first} is behind num_tokens {last}"
            raise LocalError(message, field="first_token")
        engine = self._engine(request.decode_engine)
        route = self._routes.between(request.endpoint, request.prefill_engine, engine)
        choice = self._chooser.choose(route, first, last) if route else None
        path = choice.path.value if choice else ""
        learned = Learned()
        if route is not None:
            learned = route.home.remote.learned.get(path, learned)
        num_bytes = _num_bytes(engine, first, last)
        return Predicted(
            predicted_s=learned.predict_s(num_bytes) + (0.0 if path else HANDSHAKE_S),
            num_bytes=num_bytes,
            decode_engine=engine.engine_id,
            path=path,
            num_observed=learned.num_observed,
        )

    def _engine(self, wanted: str) -> LocalEngine:
        if wanted:
            return self._agent.engines.engine(wanted)
        engines = [one for one in self._agent.engines.engines.values() if one.ready]
        if len(engines) != 1:
            raise LocalError(
                f"{len(engines)} engines are ready here: name one (decode_engine)",
                code=ErrorCode.ENGINE_UNKNOWN,
                field="decode_engine",
            )
        return engines[0]


def _num_bytes(engine: LocalEngine, first_token: int, num_tokens: int) -> int:
    spans = SpanMap(engine.spec.groups, engine.spec.groups).whole(first_token, num_tokens)
    held = (region for rank in engine.ranks.values() for region in rank.rank.regions)
    return span_bytes(bytes_by_group(held, engine.spec), spans)
