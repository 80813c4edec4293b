"""Where scenes are played: the agent, the engine, the jobs, and how long is waited.

A *job* is one request of a scene: an offer of a prefill engine, a fetch of a decode engine. What a
role adds to the agent is in `offers` and in `fetches`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from kvbus.conform.agent import PlayedAgent
from kvbus.conform.memory import Bytes, LiveWord, RegionView
from kvbus.conform.rules import Rule
from kvbus.conform.session import EngineRequest
from kvbus.geometry import BlockTable, GroupSpec
from kvbus.protocol.message import Message

MAX_BLOCKS = 64
NUM_ROUNDS = 4


class SceneEndedError(Exception):
    """The engine did not do what the rest of the scene needs; the book has that."""


@dataclass(frozen=True, slots=True)
class Kept:
    """KV of an offer as it was when it was announced."""

    place: RegionView
    table: BlockTable
    start: int
    kv: Bytes


@dataclass(slots=True, eq=False)
class Job:
    """One offer or fetch, named by a number that no other job of this run has.

    It has a ``handoff_id`` once its request was taken, and is ``over`` once the blocks are the
    engine's. Of an offer ``num_ready`` tokens are announced, and ``kept`` is their KV; the blocks
    of a fetch have the numbers of ``written`` now. ``word`` is that of an offer that has one. An
    offer may be published ``again`` after its agent was lost.
    """

    name: int
    first_token: int
    counts: tuple[int, ...]
    handoff_id: str = ""
    tables: dict[str, BlockTable] = field(default_factory=dict)
    asked: EngineRequest | None = None
    over: bool = False
    num_ready: int = 0
    sealed: bool = False
    kept: list[Kept] = field(default_factory=list)
    written: int = 0
    word: LiveWord | None = None
    rights: tuple[str, str | None] = "", None
    again: bool = False

    @property
    def num_tokens(self) -> int:
        """All tokens that the request has in the end."""
        return self.counts[-1]


def ticket_of(job: Job) -> dict[str, object]:
    """The ticket of a job, with fields that no version has."""
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


class Stage(ABC):
    """``patience_s`` is how long an engine may take to do one thing, ``start_s`` to register."""

    op: ClassVar[str]
    """The request that begins a job."""
    over_word: ClassVar[str]
    """The word of the line with which the engine says that a job is over."""
    rules: ClassVar[tuple[Rule, ...]]

    def __init__(self, agent: PlayedAgent, patience_s: float, start_s: float) -> None:
        self.agent, self.engine, self.book = agent, agent.engine, agent.book
        self.patience_s, self.start_s = patience_s, start_s
        self.jobs: dict[int, Job] = {}

    @abstractmethod
    def say(self, job: Job) -> None:
        """Tell the engine to begin."""

    @abstractmethod
    def name_of(self, body: Message | None) -> str:
        """The name of the job that a request of `op` is about, as the engine has it."""

    @abstractmethod
    def finish(self, job: Job) -> None:
        """Do what is left of a job, and end it well."""

    @abstractmethod
    def check_told(self, job: Job) -> bool:
        """Whether what the engine said of a job that ended well is right."""

    def lose(self, job: Job, *, same_memory: bool) -> None:
        """The agent has hung up on the engine, which is back, with the same memory or with new."""
        job.over = not job.again  # the engine was quick

    def settle_lost(self, job: Job) -> bool:
        """Whether the engine says in time that the lost job is over."""
        return self.wait(lambda: self.told_over(job))

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The engine's groups; empty when it is not registered."""
        return self.agent.spec.groups if self.agent.spec else ()

    @property
    def block_size(self) -> int:
        """Tokens of a block of the first group that has more than one."""
        return next((group.block_size for group in self.groups if group.block_size > 1), 1)

    @property
    def window(self) -> int:
        """Tokens of the largest sliding window; those of a block when there is none."""
        return max((group.window for group in self.groups if group.window), default=self.block_size)

    def num_blocks(self, group: str) -> int | None:
        """Blocks of the cache of a group; None where its memory cannot be mapped."""
        views = [place.view for place in self.agent.places if place.group.name == group]
        return min((int(view.shape[0]) for view in views), default=None)

    def wait(self, condition: Callable[[], object]) -> bool:
        """Play until the condition holds, or for as long as the engine may take."""
        return self.agent.until(condition, self.patience_s)

    def start(self) -> bool:
        """Start the engine; False when it does not register in time."""
        self.engine.start()
        return self.registered()

    def registered(self) -> bool:
        """Wait until the engine is complete."""
        agent, engine = self.agent, self.engine
        agent.until(lambda: agent.is_complete or not engine.is_alive, self.start_s)
        return agent.is_complete

    def begin(self, *counts: int, first_token: int = 0) -> Job:
        """Have the engine begin a job with so many tokens, or with so many at first and later."""
        job = Job(len(self.jobs) + 1, first_token, counts)
        self.jobs[job.name] = job
        self.say(job)
        return job

    def requests(self, job: Job) -> list[EngineRequest]:
        """The requests that began this job, or tried to."""
        name = str(job.name)
        return [asked for asked in self.agent.asked(self.op) if self.name_of(asked.body) == name]

    def told_over(self, job: Job) -> list[str]:
        """What the engine said of the end of this job."""
        return self.engine.told(self.over_word, job.name)

    def asked(self, job: Job) -> EngineRequest:
        """The request of a job; the scene ends when it does not come in time."""
        self._require(job, self.wait(lambda: self.requests(job)))
        return self.requests(job)[0]

    def taken(self, *jobs: Job) -> Job:
        """The first of these jobs; the scene ends when not all are asked for in time, and right."""
        self.wait(lambda: all(job.handoff_id for job in jobs))
        for job in jobs:
            self._require(job, bool(job.handoff_id))
        return jobs[0]

    def _require(self, job: Job, came: bool) -> None:
        seen = f"no `{self.op}` came for {job.name} within {self.patience_s:g} s"
        if not self.book.expect(f"{self.op}.answered", came, seen):
            raise SceneEndedError

    def goes_on(self, job: Job) -> bool:
        """Whether a job is asked for, and the engine says in time that it is over."""
        return self.wait(lambda: job.handoff_id) and self.end_well(job)

    def end_well(self, *jobs: Job) -> bool:
        """Finish these jobs; whether the engine says in time that they are over, once each."""
        for job in jobs:
            self.finish(job)
        return self.seen_over(*jobs)

    def seen_over(self, *jobs: Job) -> bool:
        """Whether the engine says in time that these jobs are over."""
        in_time = self.wait(lambda: all(map(self.told_over, jobs)))
        missing = [job.name for job in jobs if not self.told_over(job)]
        self.book.expect(
            f"{self.op}.told", not missing, f"no `{self.over_word}` line for {missing}"
        )
        right = [self.check_told(job) for job in jobs]
        return in_time and all(right)

    def use_all_blocks(self, rule: str) -> None:
        """Have jobs of one block, one after the other, until they had every block that is free.

        A stack comes to a block that is wrongly free at once, a queue in the last of as many turns
        as it has blocks, and who chooses at random misses two blocks in four rounds once in 3,000.
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
            again = self.goes_on(job)
            if not self.book.expect(rule, again, f"request {job.name} got no block"):
                return

    def check_once(self) -> None:
        """No job was told over twice."""
        for job in self.jobs.values():
            told = self.told_over(job)
            seen = f"`{self.over_word} {job.name}` {len(told)} times"
            self.book.expect(f"{self.op}.told", len(told) <= 1, seen)
