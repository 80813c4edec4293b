"""Where scenes are played: the agent, the engine, the desk, and how long is waited."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbus.conform.agent import PlayedAgent
from kvbus.conform.desk import Desk, Job
from kvbus.conform.engine_process import EngineProcess
from kvbus.conform.fetches import FetchDesk
from kvbus.conform.frames import Asked
from kvbus.conform.offers import OfferDesk
from kvbus.conform.rules import Book
from kvbus.protocol.engine import AgentRole

START_S = 60.0
MAX_BLOCKS = 64
NUM_ROUNDS = 4


class SceneEndedError(Exception):
    """The engine did not do what the rest of the scene needs; the book has that."""


@dataclass(slots=True)
class Stage:
    """``patience_s`` is how long an engine may take to do one thing, ``start_s`` to register."""

    agent: PlayedAgent
    engine: EngineProcess
    desk: Desk
    book: Book
    patience_s: float
    start_s: float

    def wait(self, condition: Callable[[], object]) -> bool:
        """Play until the condition holds, or for as long as the engine may take."""
        return self.agent.until(condition, self.patience_s)

    def start(self) -> bool:
        """Start the engine; False when it does not register in time."""
        self.engine.start()
        return self.registered()

    def registered(self) -> bool:
        """Wait until the engine is complete."""
        registering = self.agent.registering
        self.agent.until(lambda: registering.is_complete or not self.engine.is_alive, self.start_s)
        return registering.is_complete

    def asked(self, job: Job) -> Asked:
        """The request of a job; the scene ends when it does not come in time."""
        self.wait(lambda: self.desk.requests(job))
        self._require(job, came=bool(self.desk.requests(job)))
        return self.desk.requests(job)[0]

    def taken(self, *jobs: Job) -> Job:
        """The first of these jobs; the scene ends when not all are asked for in time, and right."""
        self.accepted(*jobs)
        for job in jobs:
            self._require(job, came=bool(job.handoff_id))
        return jobs[0]

    def accepted(self, *jobs: Job) -> bool:
        """Whether the requests of these jobs come in time, and are right."""
        return self.wait(lambda: all(job.handoff_id for job in jobs))

    def goes_on(self, job: Job) -> bool:
        """Whether a job is asked for, and the engine says in time that it is over."""
        return self.accepted(job) and self.over(job)

    def _require(self, job: Job, *, came: bool) -> None:
        seen = f"no `{self.desk.op}` came for {job.name} within {self.patience_s:g} s"
        if not self.book.expect(f"{self.desk.op}.answered", came, seen):
            raise SceneEndedError

    def over(self, *jobs: Job) -> bool:
        """Finish these jobs; whether the engine says in time that they are over, once each."""
        for job in jobs:
            self.desk.finish(job)
        return self.seen_over(*jobs)

    def seen_over(self, *jobs: Job) -> bool:
        """Whether the engine says in time that these jobs are over."""
        in_time = self.wait(lambda: all(self.desk.told_over(job) for job in jobs))
        missing = [job.name for job in jobs if not self.desk.told_over(job)]
        word = self.desk.over_word
        self.book.expect(f"{self.desk.op}.told", not missing, f"no `{word}` line for {missing}")
        right = [self.desk.check_told(job) for job in jobs]
        return in_time and all(right)

    def use_all_blocks(self, rule: str) -> None:
        """Have jobs of one block, one after the other, until they had every block that is free.

        A stack comes to a block that is wrongly free at once, a queue in the last of as many turns
        as it has blocks, and who chooses at random misses two blocks in four rounds once in 3,000.
        """
        num_blocks = self.desk.num_blocks()
        if not 0 < num_blocks < MAX_BLOCKS:
            why = f"the cache has {num_blocks} blocks, not 1 to {MAX_BLOCKS - 1}"
            self.book.untried(rule, why)
            return
        for _ in range(NUM_ROUNDS * num_blocks):
            job = self.desk.begin(self.desk.block_size())
            again = self.goes_on(job)
            if not self.book.expect(rule, again, f"request {job.name} got no block"):
                return

    def check_once(self) -> None:
        """No job was told over twice."""
        for job in self.desk.jobs.values():
            told = self.desk.told_over(job)
            seen = f"`{self.desk.over_word} {job.name}` {len(told)} times"
            self.book.expect(f"{self.desk.op}.told", len(told) <= 1, seen)


@contextmanager
def open_stage(
    role: AgentRole,
    command: Sequence[str],
    book: Book,
    *,
    log: Path,
    patience_s: float,
    start_s: float,
) -> Iterator[Stage]:
    """An agent of this role, and the engine that is not started yet."""
    with tempfile.TemporaryDirectory(prefix="kvbus-conform-") as name:
        folder = Path(name)
        with PlayedAgent(folder, role, book) as agent:
            engine = EngineProcess(command, agent.attach_path, role, log)
            agent.engine = engine
            kind = OfferDesk if role is AgentRole.PREFILL else FetchDesk
            try:
                yield Stage(agent, engine, kind(agent, engine, book), book, patience_s, start_s)
            finally:
                engine.stop()
