"""Resources of a fetch, and its chunks: tokens that are read together."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbus.agent.local_engine import LocalEngine
from kvbus.data.messages import Turn
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.geometry import BlockTable, Tile, num_blocks_for
from kvbus.planning import Spans, tail_spans
from kvbus.protocol.engine import StartFetch
from kvbus.protocol.ticket import Ticket
from kvbus_decode.fetch.events import ReadChunk
from kvbus_decode.remote_agent import Peer, RemoteAgent
from kvbus_decode.route import PathChoice, Route, SourcePlan


@dataclass(slots=True, eq=False)
class FetchResources:
    """I/O resources of a fetch; all but ``key`` and ``engine`` belong to one ``attempt``.

    The first of ``peers`` has the offer.
    """

    key: str
    engine: LocalEngine
    route: Route | None = None
    choice: PathChoice | None = None
    attempt: int = 0
    deadline: float = math.inf
    offer_id: str = ""
    peers: list[Peer] = field(default_factory=list)
    replica_index: int = 0
    awaiting: tuple[int, Callable[[KVBusError], None]] | None = None
    """Pending `AwaitOffer`, and a function that ends its wait."""
    stop_parts: Callable[[], None] = lambda: None

    def fills_blocks(self, request: StartFetch) -> bool:
        """Return the value of `Fetched.whole_blocks`."""
        first_token, num_tokens = request.first_token, request.num_tokens
        return self.route is not None and self.route.spans.fills_blocks(first_token, num_tokens)

    def reads_from(self, remote: RemoteAgent) -> bool:
        sources = self.route.sources if self.route is not None else ()
        return any(one.remote is remote for one in sources) or remote.peer in self.peers[1:]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to read now; ``tail`` is zeroed afterwards.

    Then about 1 in ``one_in`` pieces is compared, or none if 0.
    """

    fetch: FetchResources
    wanted: ReadChunk
    route: Route
    request: StartFetch
    ticket: Ticket
    spans: Spans
    tail: Spans
    one_in: int

    @property
    def turn(self) -> Turn:
        return Turn(f"{self.ticket.offer_id} {self.wanted.epoch}", self.request.priority)

    @property
    def num_bytes(self) -> int:
        return self.route.num_bytes(self.spans)

    @property
    def plans(self) -> tuple[SourcePlan, ...]:
        return self.route.plans(self.fetch.replica_index)

    def time_left_s(self, now: float) -> float:
        return max(1e-3, self.fetch.deadline - now)

    def blocks_of(self, tile: Tile) -> BlockTable:
        table = self.wanted.tables[tile.group]
        size = self.route.prefill.group(tile.group).block_size
        first, end = tile.start // size, num_blocks_for(tile.stop, size)
        at = first - table.first_block
        return BlockTable(ids=table.ids[4 * at : 4 * (at + end - first)], first_block=first)


def make_chunk(wanted: ReadChunk, *, one_in: int) -> Chunk:
    fetch: FetchResources = wanted.requested.resources
    route, request = fetch.route, wanted.requested.request
    if route is None:
        raise LocalError("the fetch has no route", code=ErrorCode.INTERNAL)
    spans = route.spans.chunk(
        (request.first_token, request.num_tokens),
        (wanted.start, wanted.stop),
        last=wanted.last,
        tables=request.tables,
    )
    if missing := [name for name in route.missing if request.tables[name]]:
        raise GeometryError(
            f"the prefill engine has no group {', '.join(missing)}: give it no block",
            code=ErrorCode.INCOMPATIBLE,
        )
    route.check_tables(wanted.tables, spans)
    tail: Spans = {}
    if request.zero_tail and wanted.last:
        read = route.spans.whole(request.first_token, wanted.stop)
        tail = tail_spans(route.groups, read)
    return Chunk(fetch, wanted, route, request, wanted.requested.ticket, spans, tail, one_in)
