"""One fetch that is under way, and what it uses; how far it is, the fetch table knows."""

from dataclasses import dataclass, field

from kvbus.agent.engine import LocalEngine
from kvbus.planning import whole_spans
from kvbus.protocol.ticket import UNKNOWN
from kvbus_decode.fetch import events as ev
from kvbus_decode.peers import Peer
from kvbus_decode.route import Route


@dataclass(slots=True, eq=False)
class ActiveFetch:
    """One fetch that is under way, and what it uses; ``peers`` are held until its end."""

    requested: ev.Requested
    engine: LocalEngine
    deadline: float
    peers: list[Peer] = field(default_factory=list)
    route: Route | None = None
    choice: object = None
    """How it is read, chosen when its route is known."""
    replica_index: int = 0

    @property
    def fetch_id(self) -> str:
        """The key of the fetch in the table."""
        return self.requested.fetch_id

    @property
    def fills_blocks(self) -> bool:
        """Whether no window's first block has a gap once all is read, see `Fetched`."""
        if self.route is None:
            return False
        asked, groups = self.requested.asked, self.engine.spec.groups
        tokens = asked.first_token, asked.num_tokens
        read = whole_spans(groups, self.route.prefill.groups, *tokens)
        return read == whole_spans(groups, groups, *tokens)

    @property
    def home(self) -> Peer:
        """The agent that has the offer; held first."""
        return self.peers[0]

    def is_of_another(self, boot: str) -> bool:
        """Whether its offer is another process's than ``boot``, as far as both are known."""
        return bool(boot) and self.requested.ticket.agent_boot not in (boot, UNKNOWN)
