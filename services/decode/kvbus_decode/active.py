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

    @property
    def home(self) -> Peer:
        """The agent that has the offer; held first."""
        return self.peers[0]


class ActiveFetches:
    """All fetches under way: ``by_id``, and by the offer that they read."""

    def __init__(self) -> None:
        self.by_id: dict[str, ActiveFetch] = {}
        self._by_offer: defaultdict[str, set[str]] = defaultdict(set)

    def begin(self, fetch: ActiveFetch) -> None:
        """The fetch is under way from now on."""
        self.by_id[fetch.fetch_id] = fetch
        self._by_offer[fetch.requested.ticket.offer_id].add(fetch.fetch_id)

    def end(self, fetch_id: str) -> ActiveFetch | None:
        """Nothing more will be asked for this fetch; returns it, if it was under way."""
        fetch = self.by_id.pop(fetch_id, None)
        if fetch is not None:
            offer_id = fetch.requested.ticket.offer_id
            self._by_offer[offer_id].discard(fetch_id)
            if not self._by_offer[offer_id]:
                del self._by_offer[offer_id]
        return fetch

    def of_offer(self, offer_id: object) -> list[str]:
        """Ids of the fetches that read an offer."""
        return list(self._by_offer.get(offer_id, ())) if isinstance(offer_id, str) else []

    def of_boot(self, agent_boot: str) -> list[str]:
        """Ids of the fetches that read from one process of a prefill agent."""
        tickets = {fetch_id: one.requested.ticket for fetch_id, one in self.by_id.items()}
        return [one for one, ticket in tickets.items() if ticket.agent_boot == agent_boot]
