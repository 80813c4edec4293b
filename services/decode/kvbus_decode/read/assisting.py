"""Reads into the ranks that are here, for an engine whose home is another agent.

Refuses to answer before nothing of the piece is in flight any more.
"""

import asyncio
from dataclasses import dataclass, field

import anyio

from kvbus.agent.engines.local_engine import LocalEngine, engine_lost
from kvbus.agent.process.guard import guarded
from kvbus.agent.process.service import Agent
from kvbus.bus import Call
from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.planning import piece_spans, tail_spans, whole_spans
from kvbus.protocol.message import Empty
from kvbus.protocol.remote_ranks import AbortDelegate, Delegate, Delegated
from kvbus.protocol.ticket import Ticket
from kvbus_decode.peer import memory_check as checking
from kvbus_decode.peer.directory import Peer, PeerDirectory
from kvbus_decode.peer.handshake import RouteBook
from kvbus_decode.peer.route import Route
from kvbus_decode.read.piece import Piece, PieceRead
from kvbus_decode.read.pieces import PieceReader
from kvbus_decode.requests import check_tables

ATTEND_S = 3.0


class Assistant:
    """The asked side: reads pieces into the ranks that are here, for a home elsewhere."""

    def __init__(
        self, agent: Agent, peers: PeerDirectory, routes: RouteBook, pieces: PieceReader
    ) -> None:
        self._agent, self._peers, self._routes, self._pieces = agent, peers, routes, pieces
        self._assists: dict[str, _Assisting] = {}
        self._idle = anyio.Event()

    @property
    def num_reads(self) -> int:
        """Pieces that are read for others now."""
        return len(self._assists)

    def assist(self, asked: Delegate, call: Call) -> None:
        """Read a piece; the reply comes when nothing of it is in flight any more."""
        if asked.fetch_id in self._assists:
            raise LocalError("a piece of this fetch is being read", fetch_id=asked.fetch_id)
        assisting = _Assisting(asked, call, deadline=self._agent.loop.time() + asked.timeout_s)
        self._assists[asked.fetch_id] = assisting
        self._agent.tasks.start_soon(self._assist, assisting)

    def abort(self, asked: AbortDelegate, call: Call) -> None:
        """Stop the reading for a fetch; its `Delegate` is answered when that is so."""
        assisting = self._assists.get(asked.fetch_id)
        if assisting is not None:
            assisting.stop(LocalError("the fetch was aborted", code=ErrorCode.CANCELLED))
        call.reply(Empty())

    async def drained(self) -> None:
        """Return when nothing is read for others."""
        while self._assists:
            await self._idle.wait()

    def stop(self) -> None:
        """The agent ends: so does what is read."""
        for assisting in list(self._assists.values()):
            assisting.stop(LocalError("the decode agent stops", code=ErrorCode.DRAINING))

    async def _assist(self, assisting: "_Assisting") -> None:
        async def start() -> None:
            piece = await self._piece(assisting)
            if assisting.error is not None:
                raise assisting.error
            if piece.route.engine.lost:
                raise engine_lost()
            read = self._pieces.open(piece, lambda read: self._check(assisting, read))
            assisting.begin(read, self._agent.loop)
            self._attend(assisting, read)
            self._pieces.start(read)

        await guarded(start, lambda error: self._end(assisting, error))

    async def _piece(self, assisting: "_Assisting") -> Piece:
        asked, ticket = assisting.asked, Ticket.from_json(assisting.asked.ticket)
        engine = self._agent.engines.part(asked.engine_id, asked.ranks)
        assisting.engine = engine
        check_tables(engine, asked.target, asked.first_token, asked.num_tokens)
        route = await self._route(assisting, ticket, engine)
        spans = piece_spans(
            route.prefill.groups,
            (asked.first_token, asked.num_tokens),
            (asked.start, asked.stop),
            last=asked.last,
        )
        route.check_tables(asked.source, spans)
        groups = engine.spec.groups
        whole = whole_spans(groups, asked.first_token, asked.num_tokens)
        return Piece(
            route=route,
            offer_id=ticket.offer_id,
            epoch=asked.epoch,
            source=asked.source,
            target=asked.target,
            spans=spans,
            tail=tail_spans(groups, whole) if asked.zero_tail and asked.last else {},
            spread=route.next_replica_index(),
            deadline=assisting.deadline,
        )

    async def _route(self, assisting: "_Assisting", ticket: Ticket, engine: LocalEngine) -> Route:
        """The route, all of its peers held until the piece has ended.

        A process of the prefill engine may have come back since ours was made.
        """
        home = self._peers.acquire(ticket.endpoint)
        assisting.peers.append(home)
        asked = assisting.asked
        route = await self._routes.route(home, ticket, engine, timeout_s=asked.timeout_s)
        if route.memory_ids != asked.memory_ids:
            self._routes.forget(route)
            left_s = max(1e-3, assisting.deadline - self._agent.loop.time())
            route = await self._routes.route(home, ticket, engine, timeout_s=left_s)
        for source in route.sources[1:]:
            assisting.peers.append(self._peers.acquire(source.peer.endpoint))
        return route

    def _attend(self, assisting: "_Assisting", read: PieceRead) -> None:
        """Be served until the piece is over, be the home of ours gone, and the lease with it."""
        if read.ended:
            return

        def on_checked(error: KVBusError | None) -> None:
            if error is not None and error.code is not ErrorCode.TIMEOUT:
                assisting.stop(error)

        route, offer_id = read.piece.route, read.piece.offer_id
        checking.attend(
            route,
            route.sources,
            offer_id,
            progress_s=ATTEND_S,
            timeout_s=ATTEND_S,
            on_end=on_checked,
        )
        self._agent.loop.call_later(ATTEND_S / 3, self._attend, assisting, read)

    def _check(self, assisting: "_Assisting", read: PieceRead) -> None:
        """The piece is over; our route may be older than the one that the home checks."""
        failure = read.error
        if failure is not None:
            self._end(assisting, failure)
        checking.check(
            read.piece.route,
            read.piece.route.sources,
            read.piece.offer_id,
            timeout_s=max(1e-3, assisting.deadline - self._agent.loop.time()),
            on_end=lambda error: None if failure else self._end(assisting, error),
        )

    def _end(self, assisting: "_Assisting", error: KVBusError | None) -> None:
        """Answer; a route that failed is made again."""
        del self._assists[assisting.asked.fetch_id]
        if not self._assists:
            self._idle.set()
            self._idle = anyio.Event()
        assisting.end()
        for peer in assisting.peers:
            self._peers.release(peer)
        read = assisting.read
        if error is not None and read is not None:
            self._routes.forget(read.piece.route)
        if assisting.engine is not None and assisting.engine.lost:
            error = engine_lost()
        if error is not None or read is None:
            error = assisting.error or error or LocalError("nothing was read")
            assisting.call.refuse(error)
        else:
            assisted = Delegated(num_bytes=read.num_bytes, path=read.path)
            assisting.call.reply(assisted)


@dataclass(slots=True, eq=False)
class _Assisting:
    """A piece that is read for a home elsewhere; ``error`` is why it was stopped from outside.

    What is done for it can fail in any way once ``engine`` is lost, whose memory is gone then.
    """

    asked: Delegate
    call: Call
    deadline: float
    peers: list[Peer] = field(default_factory=list)
    engine: LocalEngine | None = None
    read: PieceRead | None = None
    error: KVBusError | None = None
    _alarm: asyncio.TimerHandle | None = None

    def begin(self, read: PieceRead, loop: asyncio.AbstractEventLoop) -> None:
        """From now on it is read, until the deadline at most."""
        late = RemoteError("the piece was not read within its deadline", code=ErrorCode.TIMEOUT)
        self.read, self._alarm = read, loop.call_at(self.deadline, self.stop, late)

    def stop(self, error: KVBusError) -> None:
        """Nobody wants it any more; it ends when nothing of it is in flight."""
        self.error = self.error or error
        if self.read is not None:
            self.read.fail(error)

    def end(self) -> None:
        """It has ended."""
        if self._alarm is not None:
            self._alarm.cancel()
