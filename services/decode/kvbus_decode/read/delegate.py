"""Reads chunks into the ranks that are here, for an engine whose home is another agent.

Refuses to answer before nothing of the chunk is in flight any more.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial

import anyio

from kvbus.agent.engines.local_engine import LocalEngine, engine_lost
from kvbus.agent.process.guard import guarded
from kvbus.agent.process.service import Agent
from kvbus.bus import Call
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.remote_ranks import AbortDelegate, Aborted, Delegate, Delegated
from kvbus.protocol.rights import check_right
from kvbus.protocol.ticket import Ticket
from kvbus_decode.peer.directory import Peer, PeerAddress
from kvbus_decode.peer.lease_client import LeaseClient
from kvbus_decode.peer.memory_check import check_memory
from kvbus_decode.peer.route import Route
from kvbus_decode.read import events as ev
from kvbus_decode.read.chunk import Chunk, check_tables, make_chunk
from kvbus_decode.read.entry import DelegatedKey
from kvbus_decode.read.reader import Reader
from kvbus_decode.tickets import TicketGate

PROGRESS_S = 3.0
ABORTED_FOR_S, MOST_ABORTED = 600.0, 4096
"""For how long, and how many, aborted leases are remembered: a `delegate` may come after that."""


@dataclass(slots=True, eq=False)
class _Delegated:
    """A chunk that is read for a home elsewhere; ``error`` is why it was stopped from outside.

    What is done for it can fail in any way once ``engine`` is lost, whose memory is gone then.
    """

    asked: Delegate
    call: Call
    deadline: float
    abort: Call | None = None
    peers: list[Peer] = field(default_factory=list)
    engine: LocalEngine | None = None
    chunk: Chunk | None = None
    ended: ev.ChunkEnded | None = None
    error: KVBusError | None = None

    @property
    def key(self) -> DelegatedKey:
        """Names the read in the table."""
        return DelegatedKey(self.asked.engine_id, self.asked.fetch_id)


class DelegateServer:
    """The asked side."""

    def __init__(
        self, agent: Agent, tickets: TicketGate, leases: LeaseClient, reader: Reader
    ) -> None:
        self._agent, self._tickets, self._reader = agent, tickets, reader
        self._peers, self._routes = leases.peers, leases.routes
        self._delegated: dict[str, _Delegated] = {}
        self._aborted: OrderedDict[str, float] = OrderedDict()
        """Until when, by the token of the lease, as is what is delegated."""
        self._idle = anyio.Event()

    @property
    def num_reads(self) -> int:
        """Chunks that are read for others now."""
        return len(self._delegated)

    def story(self, fetch_id: str) -> list[str]:
        """What happened to the chunks that were read for a fetch of another agent."""
        return [line for one in self._reader.stories_for_others(fetch_id) for line in one.lines()]

    def delegate(self, asked: Delegate, call: Call) -> None:
        """Read a chunk; the reply comes when nothing of it is in flight any more."""
        if asked.token in self._aborted:
            raise LocalError("the fetch was aborted", code=ErrorCode.CANCELLED)
        if asked.token in self._delegated:
            raise LocalError("a chunk of this fetch is being read", fetch_id=asked.fetch_id)
        work = _Delegated(asked, call, deadline=self._agent.loop.time() + asked.timeout_s)
        self._delegated[asked.token] = work
        self._agent.tasks.start_soon(self._begin, work)

    def abort(self, asked: AbortDelegate, call: Call) -> None:
        """Stop the reading under a lease; both calls are answered when that is so."""
        work = self._delegated.get(asked.token)
        if work is not None:
            check_right(asked.access, work.asked.access)
        self._refuse_later(asked.token)
        if work is None or work.ended is not None:
            call.reply(Aborted(ended=True))
            return
        if work.abort is not None:
            work.abort.reply(Aborted())
        work.abort = call
        self._stop(work, LocalError("the fetch was aborted", code=ErrorCode.CANCELLED))

    def _refuse_later(self, token: str) -> None:
        """A `Delegate` may be under way on another connection: it must not begin any more."""
        now = self._agent.loop.time()
        self._aborted.setdefault(token, now + ABORTED_FOR_S)
        while (until := next(iter(self._aborted.values()), None)) is not None and (
            until <= now or len(self._aborted) > MOST_ABORTED
        ):
            self._aborted.popitem(last=False)

    async def drained(self) -> None:
        """Return when nothing is read for others."""
        while self._delegated:
            await self._idle.wait()

    def stop(self) -> None:
        """The agent ends: so does what is read."""
        for work in list(self._delegated.values()):
            self._stop(work, LocalError("the decode agent stops", code=ErrorCode.DRAINING))

    def _stop(self, work: _Delegated, error: KVBusError) -> None:
        work.error = work.error or error
        if work.chunk is not None:
            self._reader.stop_read(work.key, error)

    async def _begin(self, work: _Delegated) -> None:
        async def start() -> None:
            chunk = await self._chunk(work)
            if work.error is not None:
                raise work.error
            if chunk.route.engine.lost:
                raise engine_lost()
            work.chunk = chunk
            self._hold_progress(work, chunk.route)
            on_end = partial(self._check, work, chunk)
            self._reader.start(work.key, chunk, on_end, deadline=work.deadline)

        await guarded(start, lambda error: self._end(work, error))

    async def _chunk(self, work: _Delegated) -> Chunk:
        asked, ticket = work.asked, self._tickets.read(work.asked.ticket)
        engine = self._agent.engines.part(asked.engine_id, asked.ranks, access=asked.access)
        work.engine = engine
        check_tables(engine, asked.target, asked.first_token, asked.num_tokens)
        route = await self._route(work, ticket, engine)
        return make_chunk(
            route,
            offer_id=ticket.offer_id,
            epoch=asked.epoch,
            token=asked.token,
            source=asked.source,
            target=asked.target,
            whole=(asked.first_token, asked.num_tokens),
            part=(asked.start, asked.stop),
            last=asked.last,
            zero_tail=asked.zero_tail,
            replica_index=route.next_replica_index(),
            deadline=work.deadline,
            secret=ticket.secret,
            one_in=asked.one_in,
            priority=asked.priority,
        )

    async def _route(self, work: _Delegated, ticket: Ticket, engine: LocalEngine) -> Route:
        """The route, all of its peers held until the chunk has ended.

        A process of the prefill engine may have come back since ours was made.
        """
        home = self._peers.acquire(PeerAddress.of(ticket))
        work.peers.append(home)
        asked = work.asked
        route = await self._routes.route(home, ticket, engine, timeout_s=asked.timeout_s)
        if route.memory_ids != asked.memory_ids:
            self._routes.forget(route)
            left_s = max(1e-3, work.deadline - self._agent.loop.time())
            route = await self._routes.route(home, ticket, engine, timeout_s=left_s)
        for source in route.sources[1:]:
            work.peers.append(self._peers.acquire(source.peer.address))
        return route

    def _hold_progress(self, work: _Delegated, route: Route) -> None:
        """Have the sources serve our READs until the chunk is over.

        The home of our engine may be gone, and with it the lease that they would serve it for.
        """
        if work.ended is not None:
            return

        def on_checked(error: KVBusError | None) -> None:
            if error is not None and error.code is not ErrorCode.TIMEOUT:
                self._stop(work, error)

        check_memory(
            route,
            route.sources,
            Ticket.from_json(work.asked.ticket).offer_id,
            progress_s=PROGRESS_S,
            timeout_s=PROGRESS_S,
            on_end=on_checked,
        )
        self._agent.loop.call_later(PROGRESS_S / 3, self._hold_progress, work, route)

    def _check(self, work: _Delegated, chunk: Chunk, ended: ev.ChunkEnded) -> None:
        """The chunk is over; our route may be older than the one that the home checks.

        A failure is answered at once: the sources are asked all the same, as that ends their
        serving of our READs.
        """
        work.ended = ended
        if ended.error is not None:
            self._end(work, ended.error)
        check_memory(
            chunk.route,
            chunk.route.sources,
            chunk.offer_id,
            timeout_s=max(1e-3, work.deadline - self._agent.loop.time()),
            on_end=lambda error: None if ended.error else self._end(work, error),
        )

    def _end(self, work: _Delegated, error: KVBusError | None) -> None:
        """Answer; a route that failed is made again."""
        del self._delegated[work.asked.token]
        if work.abort is not None:
            work.abort.reply(Aborted(ended=True))
        if not self._delegated:
            self._idle.set()
            self._idle = anyio.Event()
        for peer in work.peers:
            self._peers.release(peer)
        if error is not None and work.chunk is not None:
            route = work.chunk.route
            self._routes.forget(route)
            if error.code is ErrorCode.PEER_LOST:
                self._routes.forget_connection(route.home.agent_boot)
        if work.engine is not None and work.engine.lost:
            error = engine_lost()
        if error is not None or work.ended is None:
            error = work.error or error or LocalError("nothing was read")
            work.call.refuse(error)
        else:
            ended, one_in = work.ended, work.asked.one_in
            done = Delegated(num_bytes=ended.num_bytes, path=ended.path, one_in=one_in)
            work.call.reply(done)
