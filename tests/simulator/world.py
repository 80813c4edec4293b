"""One world: its agents, what they have in common, and how it ends."""

from array import array
from collections import Counter
from itertools import count
from random import Random

from kvbus.protocol import Outcome, Ticket
from kvbus_decode.fetch.events import ReportFetched
from tests.simulator.checker import Violation, check
from tests.simulator.clock import Clock, Process
from tests.simulator.decode import DecodeAgent
from tests.simulator.faults import Faults
from tests.simulator.load import Load
from tests.simulator.memory import Fetch
from tests.simulator.network import Network
from tests.simulator.prefill import PrefillAgent
from tests.simulator.settings import Settings

ENDS_WITHIN_S = 400.0


class World:
    """All of one seed; `run` raises `Violation` where an invariant does not hold."""

    def __init__(self, settings: Settings, *, seed: int, num_handoffs: int) -> None:
        self.settings, self.seed = settings, seed
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self.clock = Clock()
        self.network = Network(self.clock, self.random, settings.network, self.counts)
        self.writes = count(1)
        self.took_s = array("d")
        self.is_ending = False
        self.load = Load(self, num_handoffs)
        self.prefill = [PrefillAgent(self, f"p{i}") for i in range(settings.agents)]
        self.decode = [DecodeAgent(self, f"d{i}") for i in range(settings.agents)]
        self._sources = {agent.name: agent for agent in self.prefill}

    def process(self, name: str) -> Process:
        """A process with a clock of its own."""
        drift = self.settings.faults.clock_drift
        rate = 1 + self.random.uniform(-drift, drift)
        return Process(name, self.clock, offset=self.random.uniform(0, 1e4), rate=rate)

    def source_of(self, ticket: Ticket) -> PrefillAgent:
        """The prefill agent that made a ticket."""
        return self.source(ticket.agent_id)

    def source(self, name: str) -> PrefillAgent:
        """The prefill agent of this name."""
        return self._sources[name]

    def note_end(self, fetch: Fetch, report: ReportFetched) -> None:
        """Count how a fetch ended."""
        self.counts[f"fetches {report.outcome}"] += 1
        if report.outcome is Outcome.COMPLETED:
            self.took_s.append(self.clock.now - fetch.asked_at)
            self.counts[f"read {report.path}{' ahead' if report.ahead else ''}"] += 1
        elif report.error is not None:
            self.counts[f"failed in {report.stage}: {report.error.code}"] += 1

    def run(self) -> None:
        """Everything, until all handoffs have ended and nothing is left of them."""
        try:
            self.load.start()
            Faults(self).start()
            self.clock.run(is_over=lambda: not self.load.num_left)
            self._end()
        except Exception as error:
            violation = error
            if not isinstance(error, Violation):
                violation = Violation(4, f"a table ended with an error: {error!r}")
            violation.add_note(f"at {self.clock.now:.6f} s, step {self.clock.num_steps}")
            for line in getattr(violation, "stories", ()):
                violation.add_note(line)
            raise violation from error

    def _end(self) -> None:
        """Nothing goes wrong any more; all that was begun comes to its end."""
        self.is_ending = self.network.is_good = True
        for agent in (*self.prefill, *self.decode):
            if agent.process.stopped:
                agent.resume()
        self.clock.run(self.clock.now + ENDS_WITHIN_S, is_over=lambda: False)
        for source in self.prefill:
            check(not source.table.live, 4, f"offers are left at {source.name}")
            check(not source.meetings.live, 6, f"names are left at {source.name}")
            check(not source.gathering.table.live, 6, f"boxes are left at {source.name}")
            check(not source.gathering.table.num_slots_in_use, 6, f"slots at {source.name}")
            check(not source.num_progress, 10, f"{source.name} drives without end")
            free = len(source.memory.free), len(source.memory.cells)
            check(free[0] == free[1], 4, f"{source.name} has lost blocks: {free}")
        for reader in self.decode:
            check(not reader.table.live, 4, f"fetches are left at {reader.name}")
            check(not reader.reading.table.live, 4, f"reads are left at {reader.name}")
            check(not reader.reading.table.num_slots_in_use, 6, f"slots at {reader.name}")
            free = len(reader.memory.free), len(reader.memory.cells)
            check(free[0] == free[1], 3, f"{reader.name} has lost blocks: {free}")
