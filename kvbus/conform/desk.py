"""What a role adds to a played agent: its operations, what it says to the engine, how it ends one.

A *job* is one request of a scene: an offer of a prefill engine, a fetch of a decode engine. It has
a name, a number that no other job of this run has.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from kvbus.conform.agent import PlayedAgent
from kvbus.conform.engine_process import EngineProcess
from kvbus.conform.frames import Asked
from kvbus.conform.rules import Book
from kvbus.geometry import BlockTable

Tables = dict[str, BlockTable]


@dataclass(slots=True, eq=False)
class Job:
    """One offer or fetch: ``over`` once the blocks are the engine's.

    ``asked`` is the request that was taken, ``written`` whose numbers a fetch's blocks have now.
    """

    name: int
    first_token: int
    counts: tuple[int, ...]
    handoff_id: str = ""
    tables: Tables = field(default_factory=dict)
    asked: Asked | None = None
    written: int = 0
    over: bool = False

    @property
    def num_tokens(self) -> int:
        """All tokens that the request has in the end."""
        return self.counts[-1]


class Desk(ABC):
    """The jobs of one engine."""

    op: str
    """The request that begins a job."""
    over_word: str
    """The word of the line with which the engine says that a job is over."""

    def __init__(self, agent: PlayedAgent, engine: EngineProcess, book: Book) -> None:
        self.agent, self.engine, self.book = agent, engine, book
        self.jobs: dict[int, Job] = {}

    @abstractmethod
    def say(self, job: Job) -> None:
        """Tell the engine to begin."""

    @abstractmethod
    def is_about(self, asked: Asked, job: Job) -> bool:
        """Whether a request of the role's first operation is that of this job."""

    @abstractmethod
    def finish(self, job: Job) -> None:
        """Do what is left of a job, and end it well."""

    @abstractmethod
    def check_told(self, job: Job) -> bool:
        """Whether what the engine said of a job that ended well is right."""

    def begin(self, *counts: int, first_token: int = 0) -> Job:
        """Have the engine begin a job with so many tokens, or with so many at first and later."""
        job = Job(len(self.jobs) + 1, first_token, counts or (1,))
        self.jobs[job.name] = job
        self.say(job)
        return job

    def lost(self, job: Job, *, same_memory: bool) -> None:
        """The agent has hung up on the engine, which is back, with the same memory or with new."""
        job.over = True

    def requests(self, job: Job) -> list[Asked]:
        """The requests that began this job, or tried to."""
        return [asked for asked in self.agent.asked(self.op) if self.is_about(asked, job)]

    def told_over(self, job: Job) -> list[str]:
        """What the engine said of the end of this job."""
        return self.engine.told(self.over_word, job.name)

    def block_size(self) -> int:
        """Tokens of a block of the first group that has more than one."""
        memory = self.agent.registering.memory
        sizes = [group.block_size for group in memory.engine.groups] if memory else []
        return next((size for size in sizes if size > 1), 1)

    def windows(self) -> list[int]:
        """Tokens of each sliding window."""
        memory = self.agent.registering.memory
        return [group.window for group in memory.engine.groups if group.window] if memory else []

    def num_blocks(self) -> int:
        """Blocks of the cache, of the group that has the fewest of those that tokens fill."""
        memory = self.agent.registering.memory
        groups = [group for group in memory.engine.groups if not group.state] if memory else []
        if memory is None or not memory.places:
            return 0
        return min((memory.num_blocks(group.name) for group in groups), default=0)
