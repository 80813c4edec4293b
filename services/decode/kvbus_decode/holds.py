"""Offers that engines hold while their requests are queued."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.service import Agent
from kvbus.errors import KVBusError
from kvbus.fair import Permits
from kvbus.protocol.peer import MAX_HELD, HeldOffer, KeepOffers, OffersKept
from kvbus.protocol.ticket import Rendezvous, Ticket
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch.entry import FetchEntry, FetchState
from kvbus_decode.peers import PeerDirectory
from kvbus_decode.remote_agent import PeerAddress

log = structlog.get_logger()

KEEP_S, INTERVAL_S, LEAST_INTERVAL_S = 15.0, 5.0, 0.5
"""An offer is kept for `KEEP_S` after this agent or its engine crashed."""
BATCH_S = 0.05
"""Holds that begin within this time are sent together."""
LATE_S = 1.0
WITHOUT_LEASE = (FetchState.RESOLVING, FetchState.QUEUED, FetchState.RETRYING)


@dataclass(slots=True, eq=False)
class Hold:
    """``name`` is the id of the offer, or the name of a rendezvous."""

    engine: LocalEngine
    name: str = field(repr=False)
    offer: HeldOffer
    address: PeerAddress


Place = tuple[LocalEngine, PeerAddress]


class OfferHolds:
    """The holds of all engines; each engine has a fair share of them.

    It has a fair share of the connections, too, and half of these are never for holds. So an engine
    that holds offers of many places, which forged tickets may name, stops no other engine's fetch.
    """

    def __init__(self, agent: Agent, config: DecodeConfig, peers: PeerDirectory) -> None:
        self._agent, self._peers = agent, peers
        self._permits: Permits[Hold] = Permits(config.max_handoffs)
        self._places: Permits[Place] = Permits(max(1, config.max_peers // 2))
        self._num_at: Counter[Place] = Counter()
        self._by_engine: dict[LocalEngine, dict[str, Hold]] = {}
        self._keepers: dict[PeerAddress, OfferKeeper] = {}

    def __len__(self) -> int:
        return len(self._permits)

    def begin(self, engine: LocalEngine, ticket: Ticket | Rendezvous) -> None:
        """Hold an offer, unless the engine does. Raises `LocalError` or `RemoteError`."""
        address = PeerAddress(ticket.endpoint, ticket.server_key)
        if isinstance(ticket, Rendezvous):
            hold = Hold(engine, ticket.transfer_id, HeldOffer(ticket.transfer_id), address)
        else:
            offer = HeldOffer(ticket.secret, ticket.offer_id)
            hold = Hold(engine, ticket.offer_id, offer, address)
        if hold.name in self._by_engine.get(engine, ()):
            return
        if (lost := self._permits.acquire(engine, hold)) is not None:
            self._remove(lost)
        try:
            self._acquire_place((engine, address))
            self._keeper_at(address).add(hold)
        except KVBusError:
            self._permits.release(hold)
            self._release_place((engine, address))
            raise
        self._num_at[engine, address] += 1
        self._by_engine.setdefault(engine, {})[hold.name] = hold

    def end(self, engine: LocalEngine, name: object) -> None:
        hold = self._by_engine.get(engine, {}).get(name) if isinstance(name, str) else None
        if hold is not None:
            self._remove(hold)

    def end_engine(self, engine: LocalEngine) -> None:
        for hold in list(self._by_engine.get(engine, {}).values()):
            self._remove(hold)

    def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.close()

    def _acquire_place(self, place: Place) -> None:
        if place not in self._places and (lost := self._places.acquire(place[0], place)):
            engine, address = lost
            for hold in list(self._by_engine[engine].values()):
                if hold.address == address:
                    self._remove(hold)

    def _release_place(self, place: Place) -> None:
        if not self._num_at[place]:
            del self._num_at[place]
            self._places.release(place)

    def _keeper_at(self, address: PeerAddress) -> "OfferKeeper":
        if address not in self._keepers:
            keeper = OfferKeeper(self._agent.loop, self._peers, address, self._remove)
            self._keepers[address] = keeper
        return self._keepers[address]

    def _remove(self, hold: Hold) -> None:
        self._permits.release(hold)
        held, keeper = self._by_engine[hold.engine], self._keepers[hold.address]
        del held[hold.name]
        if not held:
            del self._by_engine[hold.engine]
        self._num_at[hold.engine, hold.address] -= 1
        self._release_place((hold.engine, hold.address))
        keeper.remove(hold)
        if not keeper.num_held:
            keeper.close()
            del self._keepers[hold.address]


class LateFetches:
    """Holds the offers of fetches that wait for a lease: a busy agent is a queue, too."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        holds: OfferHolds,
        live: Callable[[], Iterable[FetchEntry]],
    ) -> None:
        self._loop, self._holds, self._live = loop, holds, live
        self._waiting: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look at all fetches every `LATE_S` while there are any."""
        if self._timer is None:
            self._timer = self._loop.call_later(LATE_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer, before, self._waiting = None, self._waiting, set()
        for fetch in list(self._live()):
            self.watch()
            is_part = bool(fetch.requested.rank_secret)  # its home holds the offer
            if fetch.state in WITHOUT_LEASE and not is_part:
                self._waiting.add(fetch.key)
                if fetch.key in before:
                    self._hold(fetch)

    def _hold(self, fetch: FetchEntry) -> None:
        requested = fetch.requested
        with suppress(KVBusError):  # the fetch goes on
            self._holds.begin(requested.resources.engine, requested.rendezvous or requested.ticket)


# Offers of one prefill agent are renewed together, whatever their number:
#
#     holds      a b c             d
#     requests        abc           d             abcd              abcd
#                ├───┤ BATCH_S                     ├──── interval ──┤
#
# If a request fails, the next one renews the same offers: three of them fit into `KEEP_S`.
class OfferKeeper:
    """The holds at one prefill agent; ``on_over`` gets those that it does not keep."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peers: PeerDirectory,
        address: PeerAddress,
        on_over: Callable[[Hold], None],
    ) -> None:
        self._loop, self._peers, self._on_over = loop, peers, on_over
        self._peer = peers.acquire(address)
        self._held: dict[Hold, None] = {}
        self._fresh: dict[Hold, None] = {}
        self._batch: asyncio.TimerHandle | None = None
        self._interval_s = INTERVAL_S
        self._alarm = loop.call_later(INTERVAL_S, self._renew)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def add(self, hold: Hold) -> None:
        self._held[hold] = self._fresh[hold] = None
        if self._batch is None:
            self._batch = self._loop.call_later(BATCH_S, self._send_fresh)

    def remove(self, hold: Hold) -> None:
        del self._held[hold]
        self._fresh.pop(hold, None)

    def close(self) -> None:
        self._alarm.cancel()
        if self._batch is not None:
            self._batch.cancel()
        self._peers.release(self._peer)

    def _renew(self) -> None:
        if not self._peers.has(self._peer):  # its key is not trusted any more
            for hold in list(self._held):
                self._on_over(hold)
            return
        self._alarm = self._loop.call_later(self._interval_s, self._renew)
        self._send(list(self._held))

    def _send_fresh(self) -> None:
        fresh, self._fresh, self._batch = list(self._fresh), {}, None
        self._send(fresh)

    def _send(self, holds: list[Hold]) -> None:
        for first in range(0, len(holds), MAX_HELD):
            some = holds[first : first + MAX_HELD]
            request = KeepOffers(tuple(hold.offer for hold in some), KEEP_S)
            self._peer.request(request, INTERVAL_S, partial(self._on_reply, some))

    def _on_reply(self, holds: list[Hold], reply: OffersKept | KVBusError) -> None:
        if isinstance(reply, KVBusError):
            log.debug("holds.refused", peer=self._peer.endpoint, code=reply.code.value)
            return
        over = [holds[index] for index in reply.over if index < len(holds)]
        for hold in over:
            if hold in self._held:
                self._on_over(hold)
        interval_s = max(LEAST_INTERVAL_S, min(INTERVAL_S, reply.keep_s / 3))
        if interval_s < self._interval_s and self._held:
            self._alarm.cancel()
            self._alarm = self._loop.call_later(interval_s, self._renew)
        self._interval_s = interval_s
