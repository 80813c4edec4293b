"""Whose turn it is to begin, in plain lists: what the fetch table's places must come to.

Refuses to look into the table: only what it asks for counts.
"""

from dataclasses import dataclass, field


@dataclass
class WatchedTurns:
    """Fetches that wait for their turn by prefill agent, and who has a place until when."""

    num_places: int
    patience_s: float
    queues: dict[str, list[str]] = field(default_factory=dict)
    places: dict[str, float] = field(default_factory=dict)
    waits_since: dict[str, int] = field(default_factory=dict)
    """By agent, the turn since which it has waited without one."""
    last_turn: dict[str, int] = field(default_factory=dict)
    num_turns: int = 0

    def wait(self, agent: str, fetch_id: str) -> None:
        self.queues.setdefault(agent, []).append(fetch_id)
        self.waits_since.setdefault(agent, self.num_turns)

    def waits(self, fetch_id: str) -> bool:
        return any(fetch_id in queue for queue in self.queues.values())

    def is_full(self) -> bool:
        return len(self.places) == self.num_places

    def begin(self, agent: str, fetch_id: str, now: float) -> None:
        """The table has let a fetch begin: its agent's first, and no other agent waited longer."""
        assert self.queues[agent][0] == fetch_id, "not in the order of arrival"
        for other, since in self.waits_since.items():
            if other != agent:
                assert since >= self.last_turn.get(agent, 0), "twice, while another agent waited"
        self.num_turns += 1
        self.last_turn[agent] = self.num_turns
        self._remove(agent, fetch_id)
        if agent in self.waits_since:
            self.waits_since[agent] = self.num_turns
        self.places[fetch_id] = now + self.patience_s

    def leave(self, agent: str, fetch_id: str) -> None:
        """It has ended; while it waited, those behind it move up before anybody begins."""
        if fetch_id in self.queues.get(agent, ()):
            self._remove(agent, fetch_id)

    def settle(self, now: float, *, active: set[str]) -> None:
        """What is not ``active`` has no place any more."""
        kept = {f: until for f, until in self.places.items() if f in active and now < until}
        self.places = kept

    def check(self) -> None:
        """No more than may have begun, and nobody waits without need."""
        assert len(self.places) <= self.num_places, "too many have begun"
        assert self.is_full() or not self.queues, "a place is free, and somebody waits"

    def _remove(self, agent: str, fetch_id: str) -> None:
        self.queues[agent].remove(fetch_id)
        if not self.queues[agent]:
            del self.queues[agent], self.waits_since[agent]
