"""The fetches that are under way, and what each of them uses; how far each is, the table knows."""

from collections import defaultdict
from dataclasses import dataclass, field

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus_decode.fetch import events as ev
from kvbus_decode.peer.directory import Peer
from kvbus_decode.peer.route import Route


@dataclass(slots=True, eq=False)
class ActiveFetch:
    """One fetch that is under way, and what it uses; ``peers`` are held until its end."""

    requested: ev.Requested
    engine: LocalEngine
    deadline: float
    peers: list[Peer] = field(default_factory=list)
    route: Route | None = None
    replica_index: int = 0

    @property
    def fetch_id(self) -> str:
        """The key of the fetch in the table."""
        return self.requested.fetch_id


class ActiveFetches:
    """All fetches under way, by id and by the offer that they read."""

    def __init__(self) -> None:
        self._active: dict[str, ActiveFetch] = {}
        self._by_offer: dict[str, set[str]] = defaultdict(set)

    def __getitem__(self, fetch_id: str) -> ActiveFetch:
        return self._active[fetch_id]

    def begin(self, fetch: ActiveFetch) -> None:
        """The fetch is under way from now on."""
        self._active[fetch.fetch_id] = fetch
        self._by_offer[fetch.requested.ticket.offer_id].add(fetch.fetch_id)

    def find(self, fetch_id: str) -> ActiveFetch | None:
        """The fetch, if it is under way."""
        return self._active.get(fetch_id)

    def end(self, fetch_id: str) -> ActiveFetch | None:
        """Nothing more will be asked for this fetch; returns it, if it was under way."""
        fetch = self._active.pop(fetch_id, None)
        if fetch is not None:
            offer_id = fetch.requested.ticket.offer_id
            self._by_offer[offer_id].discard(fetch_id)
            if not self._by_offer[offer_id]:
                del self._by_offer[offer_id]
        return fetch

    def of_offer(self, offer_id: str) -> tuple[str, ...]:
        """Ids of the fetches that read an offer."""
        return tuple(self._by_offer.get(offer_id, ()))

    def of_boot(self, agent_boot: str) -> list[str]:
        """Ids of the fetches that read from one process of a prefill agent."""
        return [
            fetch.fetch_id
            for fetch in self._active.values()
            if fetch.requested.ticket.agent_boot == agent_boot
        ]
