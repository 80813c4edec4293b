"""What the scheduler's process and the workers tell each other, step by step, by pickle: ids only.

scheduler: build_connector_meta ──StepResults──▶ worker: get_transfer_results
scheduler: update_connector_output ◀──StepDone── worker: build_connector_worker_meta
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from kvbus.engine import AgentRanks
from kvbus.protocol.engine import Fetched, Outcome

if TYPE_CHECKING:
    from vllm.v1.request import Request

CLOSE_WITHIN_S = 3.0
"""How long the end of a process waits for the end of a link."""
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


NOTHING = StepResults()


@dataclass(frozen=True, slots=True)
class StepDone:
    """A worker has computed this step, and all before it."""

    step: int

    def aggregate(self, other: "StepDone") -> "StepDone":
        """What each of several workers has done."""
        return StepDone(min(self.step, other.step))


class WorkerPlaces(NamedTuple):
    """The agents that have a worker's memory, in the order of the options, each with its rank.

    ``endpoint`` of one is empty while there is no agent.
    """

    places: tuple[AgentRanks, ...]


def ranks_elsewhere(workers: Sequence[AgentRanks]) -> list[AgentRanks]:
    """The ranks whose agent is not that of the first; one access to an agent does for all.

    None while the first has no agent yet.
    """
    home = workers[0].endpoint if workers else ""
    found: dict[str, AgentRanks] = {}
    for worker in workers if home else ():
        if worker.endpoint not in ("", home):
            before = found.get(worker.endpoint)
            ranks = (*(before.ranks if before else ()), *worker.ranks)
            found[worker.endpoint] = replace(before or worker, ranks=ranks)
    return list(found.values())


class Growing:
    """The requests that others may read while they are computed; for the scheduler's thread.

    Their tokens are ready when vLLM says that the step is done. That holds for those of its prefix
    cache, too: vLLM counts in them what other requests compute in the same step.
    """

    def __init__(self) -> None:
        self._planned: dict[str, tuple[Request, deque[tuple[int, int]]]] = {}
        """After which steps how many tokens of a prompt are computed."""
        self._step = 0

    def begin(self, request: "Request") -> None:
        """Follow a request to its prompt's end: what is behind that is in no offer."""
        self._planned.setdefault(request.request_id, (request, deque()))

    def end(self, request_id: str) -> None:
        """It is over, or its blocks are another's."""
        self._planned.pop(request_id, None)

    def schedule(self, num_scheduled_tokens: Mapping[str, int]) -> int:
        """A step computes so many tokens of each request; its number, 0 if it is of no interest."""
        if not self._planned:
            return 0
        self._step += 1
        for request_id, (request, planned) in self._planned.items():
            num_tokens = request.num_computed_tokens
            if request_id in num_scheduled_tokens and num_tokens < request.num_prompt_tokens:
                num_tokens += num_scheduled_tokens[request_id]
                planned.append((self._step, min(num_tokens, request.num_prompt_tokens)))
        return self._step

    def done(self, step: int) -> Iterator[tuple[str, int]]:
        """The requests of which more is ready after ``step``, and how many tokens in all."""
        for request_id, (_, planned) in self._planned.items():
            num_tokens = 0
            while planned and planned[0][0] <= step:
                _, num_tokens = planned.popleft()
            if num_tokens:
                yield request_id, num_tokens


class EarlyCompletions:
    """A worker hears of loads itself, too, so that vLLM learns of them a step earlier.

    Pairs what the agent says of fetches with what the scheduler's side says of requests. Each load
    is reported once, whichever way was faster; failures come from the scheduler's side alone.
    """

    def __init__(self) -> None:
        self._told: deque[str] = deque()
        self._unmatched: dict[str, None] = {}
        self._fetch_ids: dict[str, str] = {}
        self._reported: set[str] = set()

    def tell(self, fetched: Fetched) -> None:
        """A fetch has ended; called in the link's thread."""
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
