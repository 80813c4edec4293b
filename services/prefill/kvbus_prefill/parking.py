"""Parking: blocks of offers with late readers move into a pool, and engines reuse theirs."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import structlog

from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.loop import guarded
from kvbus.agent.service import Agent
from kvbus.data import messages as wire
from kvbus.data.client import StartedJob
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.engine import Park
from kvbus.protocol.tools import EngineEvent, PoolStatus
from kvbus.table.events import EngineLost
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferEntry
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.pool import Pool, open_pool

log = structlog.get_logger()

COPIES_AT_ONCE = 16
LOOKS_EVERY_S = 0.01
MAX_POOLS = 16
RETRY_S = 1.0
"""Pause after a copy that failed."""


# An offer is a candidate from its seal, and again when a lease of it ends without a commit:
#
#     candidate ── park_after_s, a request, or an engine that is short of blocks ──▶ due
#     due       ── the pool has room ──▶ copying ──┬─ no lease, no commit ──▶ parked
#        ▲                                         └─ else: nothing has happened
#        └── the copy failed; `RETRY_S` ◀──────────┘
#
# The least urgent of the due offers come first: those with the most time left.
class Parking:
    """Chooses and copies; the offer table decides whether the offer is parked."""

    def __init__(
        self,
        agent: Agent,
        config: PrefillConfig,
        offers: OfferTable,
        dispatch: Callable[[ev.Event | EngineLost], None],
        on_closed: Callable[[LocalEngine], None],
    ) -> None:
        self._agent, self._config, self._offers = agent, config, offers
        self._dispatch, self._on_closed = dispatch, on_closed
        self._pools: list[Pool] = []
        self._opening: set[LocalEngine] = set()
        self._one_opens = asyncio.Lock()
        self._short: set[LocalEngine] = set()
        self._warned: set[LocalEngine] = set()
        self._waiting: dict[str, float] = {}
        """Candidates, by the time at which they are due, which ascends."""
        self._due: dict[str, None] = {}
        self._copying: dict[str, StartedJob] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(pool.used_bytes for pool in self._pools)

    @property
    def size_bytes(self) -> int:
        return sum(pool.size_bytes for pool in self._pools)

    def statuses(self) -> dict[str, PoolStatus]:
        return {pool.local.engine_id: pool.status() for pool in self._pools}

    # Pools.

    def on_engine_ready(self, engine: LocalEngine) -> None:
        if not self._config.park_bytes or engine.remote_ranks or self._pool_of(engine.engine_id):
            return
        for pool in self._pools:
            if pool.engine is None and pool.fits(engine):
                pool.attach(engine)
                return
        self._opening.add(engine)
        step = partial(self._open, engine)
        self._agent.tasks.start_soon(guarded, step, partial(self._note_refused, engine))

    def on_engine_lost(self, engine: LocalEngine) -> None:
        self._short.discard(engine)
        self._warned.discard(engine)
        for pool in [one for one in self._pools if one.engine is engine]:
            pool.detach()
            self._close_unused(pool)

    async def _open(self, engine: LocalEngine) -> None:
        async with self._one_opens:  # else two would count the same free memory
            if len(self._pools) >= MAX_POOLS:
                message = f"{MAX_POOLS} pools are open, which is the limit"
                raise LocalError(message, code=ErrorCode.BUSY)
            pool = await open_pool(
                self._agent,
                engine,
                self._config.park_bytes,
                ticket_blocks=self._config.ticket_blocks,
            )
        self._opening.discard(engine)
        self._pools.append(pool)
        self._agent.engines.pools[pool.local.engine_id] = pool.local
        names = {"engine_id": engine.engine_id, "pool": pool.local.engine_id}
        log.info("pool.opened", **names, size_bytes=pool.size_bytes)
        self._publish("engine.ready", pool)
        if engine.lost:
            pool.detach()
            self._close_unused(pool)
        self._look_at(self._agent.loop.time())

    def _note_refused(self, engine: LocalEngine, error: KVBusError) -> None:
        self._opening.discard(engine)
        if not engine.lost:
            log.error("pool.refused", engine_id=engine.engine_id, reason=error.message)

    def _close_unused(self, pool: Pool) -> None:
        if pool.engine is not None or pool.num_taken or pool not in self._pools:
            return
        self._pools.remove(pool)
        local = pool.local
        del self._agent.engines.pools[local.engine_id]
        local.lost = True
        pool.close_cells()
        self._publish("engine.lost", pool)
        self._on_closed(local)
        log.info("pool.closed", pool=local.engine_id)
        self._agent.tasks.start_soon(guarded, partial(self._release, pool), lambda _: None)

    def _publish(self, event: str, pool: Pool) -> None:
        body = EngineEvent(pool.local.engine_id, pool.local.instance)
        self._agent.publisher.publish(event, body)

    async def _release(self, pool: Pool) -> None:
        try:
            await pool.segments.discard()
            await asyncio.sleep(self._config.late_read_s if pool.local.is_direct else 0)
        finally:
            pool.segments.remove()
        for engine in self._agent.engines.engines.values():  # the memory is free now
            if engine.ready and engine not in self._opening:
                self.on_engine_ready(engine)

    def stop(self) -> None:
        for pool in self._pools:
            pool.close_cells()

    def check_memory(self) -> None:
        """End the offers of pools that the new data process cannot map."""
        for pool in self._pools:
            end = partial(self._lose, pool)
            self._agent.tasks.start_soon(guarded, pool.segments.check, end)

    def _lose(self, pool: Pool, error: KVBusError) -> None:
        if pool in self._pools:
            log.error("pool.unmapped", pool=pool.local.engine_id, reason=error.message)
            pool.detach()
            self._dispatch(EngineLost(pool.local.engine_id))
            self._close_unused(pool)

    # Candidates.

    def note(self, offer_id: str) -> None:
        """Consider an offer that was sealed, or of which a lease has ended."""
        offer = self._offers.live.get(offer_id)
        if self._config.park_bytes and offer is not None and offer.may_be_parked:
            self._waiting.pop(offer_id, None)
            now, after_s = self._agent.loop.time(), self._config.park_after_s
            if offer.park is Park.ALWAYS or not after_s:
                self._due[offer_id] = None
                self._look_at(now)
            else:
                self._due.pop(offer_id, None)
                self._waiting[offer_id] = now + after_s
                self._look_at(now if self._is_short(offer) else now + after_s)

    def park(self, command: ev.ParkSoon) -> None:
        self.note(command.offer_id)

    def forget(self, offer_id: str) -> None:
        self._waiting.pop(offer_id, None)
        self._due.pop(offer_id, None)
        if (job := self._copying.get(offer_id)) is not None:
            job.abort()

    def check_may_park(self, engine: LocalEngine) -> None:
        """Raise `LocalError` if no offer of the engine is ever parked."""
        if not self._config.park_bytes:
            message = "this agent parks no offers (park_bytes = 0)"
            raise LocalError(message, code=ErrorCode.CONFIG, key="park_bytes")
        if engine.remote_ranks:
            message = "offers of an engine with ranks at other agents cannot be parked"
            raise LocalError(message, code=ErrorCode.CONFIG)

    def warn_if_never(self, engine: LocalEngine) -> None:
        """Log once that the engine wants to park its offers, and that this agent does not."""
        try:
            self.check_may_park(engine)
        except LocalError as error:
            if engine not in self._warned:
                log.warning("park.unavailable", engine_id=engine.engine_id, reason=error.message)
            self._warned.add(engine)

    def report_blocks(self, engine: LocalEngine, *, short: bool) -> None:
        (self._short.add if short else self._short.discard)(engine)
        self._look_at(self._agent.loop.time())

    def free(self, command: ev.FreePooled) -> None:
        pool: Pool = command.pooled.place
        pool.free(command.pooled)
        self._close_unused(pool)
        if self._due or self._short:
            self._look_at(self._agent.loop.time())

    # One look serves all offers that became due since the last: thousands may be sealed in a
    # second, and most are read before they are due.
    def _look_at(self, when: float) -> None:
        when = max(when, self._looked_at + LOOKS_EVERY_S)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._agent.loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer, self._looked_at = None, self._agent.loop.time()
        if len(self._copying) >= COPIES_AT_ONCE:
            return  # the end of a copy looks again
        full: set[str] = set()
        for offer in sorted(self._parkable(), key=lambda one: one.expires_at, reverse=True):
            if offer.engine_id not in full and not self._start(offer):
                full.add(offer.engine_id)
            if len(self._copying) >= COPIES_AT_ONCE:
                return
        if self._waiting:
            self._look_at(next(iter(self._waiting.values())))

    def _parkable(self) -> Iterator[OfferEntry]:
        while self._waiting:
            offer_id, due_at = next(iter(self._waiting.items()))
            if due_at > self._looked_at:
                break
            del self._waiting[offer_id]
            self._due[offer_id] = None
        live = self._offers.live
        early = [one for one in self._waiting if self._is_short(live.get(one))]
        for offer_id in dict.fromkeys((*self._due, *early)):
            offer = live.get(offer_id)
            if offer is None or not offer.may_be_parked:
                self._due.pop(offer_id, None)
            elif offer_id not in self._copying:
                yield offer

    def _is_short(self, offer: OfferEntry | None) -> bool:
        return offer is not None and any(one.engine_id == offer.engine_id for one in self._short)

    def _pool_of(self, engine_id: str) -> Pool | None:
        attached = (one for one in self._pools if one.engine is not None)
        return next((one for one in attached if one.engine_id == engine_id), None)

    def _start(self, offer: OfferEntry) -> bool:
        """Start the copy; return False if there is no pool, or no room in it."""
        pool = self._pool_of(offer.engine_id)
        pooled = None if pool is None else pool.take(offer)
        if pool is None or pooled is None:
            return False
        copy, plan = pool.copy_job(offer, pooled)
        end = partial(self._end, offer.offer_id, pooled)
        try:
            self._copying[offer.offer_id] = self._agent.data.start(copy, end, uses=(plan,))
        except KVBusError as error:
            self._fail(offer.offer_id, pooled, error)
        return True

    def _end(self, offer_id: str, pooled: ev.Pooled, reply: wire.DataReply) -> None:
        del self._copying[offer_id]
        if (error := reply.failure()) is not None:
            self._fail(offer_id, pooled, error)
            return
        offer = self._offers.live.get(offer_id)
        if offer is not None:  # before it writes to its blocks, an engine hangs up
            self._agent.engines.end_if_left(offer.engine_id)
            self._agent.engines.find_cuts(offer.engine_id)
        self._due.pop(offer_id, None)
        self._waiting.pop(offer_id, None)
        cell = pooled.place.commit_cell(offer.ticket, pooled) if offer is not None else None
        self._dispatch(ev.Copied(offer_id, pooled, cell))
        self._look_at(self._agent.loop.time())

    def _fail(self, offer_id: str, pooled: ev.Pooled, error: KVBusError) -> None:
        self.free(ev.FreePooled(pooled))
        self._due.pop(offer_id, None)
        self._waiting.pop(offer_id, None)
        if offer_id in self._offers.live:
            log.warning("offer.not_parked", offer_id=offer_id, reason=error.message)
            self._agent.loop.call_later(RETRY_S, self.note, offer_id)
        self._look_at(self._agent.loop.time())
