"""Stage of the scenes: agent, engine, jobs and time limits."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from kvbus.conform.memory import Bytes, LiveCell, RegionView
from kvbus.conform.played_agent import PlayedAgent
from kvbus.conform.rules import Rule
from kvbus.conform.session import EngineRequest
from kvbus.geometry import BlockTable, GroupSpec
from kvbus.protocol.message import Message

MAX_BLOCKS = 64
NUM_ROUNDS = 4


class SceneEndedError(Exception):
    """A scene cannot continue; the book has the violation."""


@dataclass(frozen=True, slots=True)
class Kept:
    place: RegionView
    table: BlockTable
    start: int
    kv: Bytes


@dataclass(slots=True, eq=False)
class Job:
    """An offer or a fetch; ``over`` means that the engine owns the blocks.

    A fetch's blocks hold the numbers of ``written``. ``again`` marks a job that was repeated after
    its agent was lost.
    """

    name: int
    first_token: int
    counts: tuple[int, ...]
    handoff_id: str = ""
    tables: dict[str, BlockTable] = field(default_factory=dict)
    request: EngineRequest | None = None
    over: bool = False
    num_ready: int = 0
    sealed: bool = False
    kept: list[Kept] = field(default_factory=list)
    written: int = 0
    cell: LiveCell | None = None
    rights: tuple[str, str | None] = "", None
    again: bool = False

    @property
    def num_tokens(self) -> int:
        return self.counts[-1]


def ticket_of(job: Job) -> dict[str, object]:
    """Return a ticket with fields of no version."""
    return {
        "agent_id": "elsewhere",
        "agent_boot": "of the prefill agent",
        "endpoint": "tcp://127.0.0.1:1",
        "engine_id": "prefill",
        "engine_boot": "of the prefill engine",
        "offer_id": f"offer-{job.name}",
        "request_id": str(job.name),
        "num_tokens": job.counts[0],
        "kvbus": 1,
        "a_later_field": 'say "it" \\ on: é ≠ \N{GRINNING FACE}',
        "a_later_number": 2**53 - 1,
    }


class EngineStage(ABC):
    """``patience_s`` limits one engine step, ``start_s`` registration."""

    op: ClassVar[str]
    end_line: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]]

    def __init__(self, agent: PlayedAgent, patience_s: float, start_s: float) -> None:
        self.agent, self.engine, self.book = agent, agent.engine, agent.book
        self.patience_s, self.start_s = patience_s, start_s
        self.jobs: dict[int, Job] = {}

    @abstractmethod
    def send(self, job: Job) -> None:
        """Send the engine the line that begins the job."""

    @abstractmethod
    def name_of(self, body: Message | None) -> str:
        """Return the job's name in a request of `op`."""

    @abstractmethod
    def finish(self, job: Job) -> None:
        """Complete the job."""

    @abstractmethod
    def check_reported(self, job: Job) -> bool:
        """Check the engine's lines about a completed job."""

    def lose(self, job: Job, *, same_memory: bool) -> None:
        job.over = not job.again  # the engine may have republished already

    def settle_lost(self, job: Job) -> bool:
        return self.wait(lambda: self.reported_over(job))

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return self.agent.spec.groups if self.agent.spec else ()

    @property
    def block_size(self) -> int:
        return next((group.block_size for group in self.groups if group.block_size > 1), 1)

    @property
    def window(self) -> int:
        return max((group.window for group in self.groups if group.window), default=self.block_size)

    def num_blocks(self, group: str) -> int | None:
        """None if the group is not mapped."""
        views = [place.view for place in self.agent.places if place.group.name == group]
        return min((int(view.shape[0]) for view in views), default=None)

    def id_limit(self, group: str) -> int:
        return self.num_blocks(group) or 2**32

    def wait(self, condition: Callable[[], object]) -> bool:
        return self.agent.until(condition, self.patience_s)

    def start(self) -> bool:
        self.engine.start()
        return self.registered()

    def registered(self) -> bool:
        agent, engine = self.agent, self.engine
        agent.until(lambda: agent.is_complete or not engine.is_alive, self.start_s)
        return agent.is_complete

    def begin(self, *counts: int, first_token: int = 0) -> Job:
        job = Job(len(self.jobs) + 1, first_token, counts)
        self.jobs[job.name] = job
        self.send(job)
        return job

    def requests(self, job: Job) -> list[EngineRequest]:
        name = str(job.name)
        return [
            request
            for request in self.agent.requests_of(self.op)
            if self.name_of(request.body) == name
        ]

    def reported_over(self, job: Job) -> list[str]:
        return self.engine.reported(self.end_line, job.name)

    def request_of(self, job: Job) -> EngineRequest:
        self._require(job, self.wait(lambda: self.requests(job)))
        return self.requests(job)[0]

    def taken(self, *jobs: Job) -> Job:
        self.wait(lambda: all(job.handoff_id for job in jobs))
        for job in jobs:
            self._require(job, bool(job.handoff_id))
        return jobs[0]

    def _require(self, job: Job, came: bool) -> None:
        seen = f"no `{self.op}` came for {job.name} within {self.patience_s:g} s"
        if not self.book.expect(f"{self.op}.answered", came, seen):
            raise SceneEndedError

    def completes(self, job: Job) -> bool:
        return self.wait(lambda: job.handoff_id) and self.end_well(job)

    def end_well(self, *jobs: Job) -> bool:
        for job in jobs:
            self.finish(job)
        return self.seen_over(*jobs)

    def seen_over(self, *jobs: Job) -> bool:
        in_time = self.wait(lambda: all(map(self.reported_over, jobs)))
        missing = [job.name for job in jobs if not self.reported_over(job)]
        self.book.expect(f"{self.op}.told", not missing, f"no `{self.end_line}` line for {missing}")
        right = [self.check_reported(job) for job in jobs]
        return in_time and all(right)

    def use_all_blocks(self, rule: str) -> None:
        """Run jobs of one block in sequence, until they have used every free block.

        A stack that frees a block too early is caught at once, a queue after as many jobs as it has
        blocks. A random allocator misses two blocks in four rounds once in 3,000.
        """
        if not self.agent.is_complete:
            self.book.expect(rule, False, "the engine has gone")
            return
        caches = [self.num_blocks(group.name) for group in self.groups if not group.state]
        num_blocks = min((number for number in caches if number), default=0)
        if not 0 < num_blocks < MAX_BLOCKS:
            why = f"the cache has {num_blocks} blocks, not 1 to {MAX_BLOCKS - 1}"
            self.book.untried(rule, why)
            return
        for _ in range(NUM_ROUNDS * num_blocks):
            job = self.begin(self.block_size)
            completed = self.completes(job)
            if not self.book.expect(rule, completed, f"request {job.name} got no block"):
                return

    def check_once(self) -> None:
        for job in self.jobs.values():
            ends = self.reported_over(job)
            seen = f"`{self.end_line} {job.name}` {len(ends)} times"
            self.book.expect(f"{self.op}.told", len(ends) <= 1, seen)
