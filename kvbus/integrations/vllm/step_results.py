"""What the scheduler's side tells the workers in each step, by pickle: ids only.

A worker hears of loads itself, too, so that vLLM learns of them a step earlier.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbus.protocol.engine import Fetched, Outcome

MOST_UNMATCHED = 1024
"""Notices that are kept until the scheduler's side names their fetch; most came too late for it."""


class StepResults(NamedTuple):
    """Ids of requests: whose load is over, whose load has failed.

    ``started`` are the loads that began in this step, by request, and their fetch ids. A worker
    says so when it has done a ``step`` that is not 0.
    """

    started: tuple[tuple[str, str], ...] = ()
    received: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """What a worker tells the scheduler's side: it has computed this step, and all before it."""

    step: int

    def aggregate(self, other: "StepDone") -> "StepDone":
        """Of all workers: what each has done."""
        return StepDone(min(self.step, other.step))


NOTHING = StepResults()


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker's memory is: at the agent of ``peer_endpoint``, empty while there is none.

    Who shows ``access`` there may ask about it; ``server_key`` is the agent's, if it has one.
    """

    rank: int
    peer_endpoint: str
    access: str = field(repr=False)
    server_key: str = ""


@dataclass(frozen=True, slots=True)
class WorkerPlaces:
    """Where one worker's memory is, at each of its agents, in the order of the options."""

    places: tuple[WorkerPlace, ...]


class EarlyCompletions:
    """Pairs what the agent says of fetches with what the scheduler's side says of requests.

    Each load is reported once, whichever way was faster; failures come from the scheduler's side
    alone.
    """

    def __init__(self) -> None:
        self._told: deque[str] = deque()
        self._unmatched: dict[str, None] = {}
        self._fetch_ids: dict[str, str] = {}
        self._reported: set[str] = set()

    def tell(self, fetched: Fetched) -> None:
        """In the link's thread: a fetch has ended."""
        if fetched.outcome is Outcome.COMPLETED:
            self._told.append(fetched.fetch_id)

    def take(self, results: StepResults) -> StepResults:
        """What vLLM is to hear in this step, given what the scheduler's side says in it."""
        self._fetch_ids.update(results.started)
        early = self._take_early() if self._told or results.started else []
        received = [each for each in results.received if each not in self._reported]
        failed = tuple(each for each in results.failed if each not in self._reported)
        for request_id in results.received:
            self._reported.discard(request_id)
            self._fetch_ids.pop(request_id, None)
        return StepResults(received=(*received, *early), failed=failed)

    def _take_early(self) -> list[str]:
        """The requests whose fetch was completed; the scheduler's side will say so again."""
        while self._told:
            self._unmatched[self._told.popleft()] = None
        early = [each for each, fetch in self._fetch_ids.items() if fetch in self._unmatched]
        for request_id in early:
            del self._unmatched[self._fetch_ids.pop(request_id)]
            self._reported.add(request_id)
        while len(self._unmatched) > MOST_UNMATCHED:
            del self._unmatched[next(iter(self._unmatched))]
        return early
