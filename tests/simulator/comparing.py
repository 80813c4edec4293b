"""The legs that compare: what a decode agent has read with what the prefill agent has.

What it does follows `kvbus_decode.read.compare` and `kvbus_prefill.digests`. The digest of a block
is what stands in it.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.protocol import Message
from kvbus_decode.read import events as ev
from kvbus_prefill.offer.entry import OfferedBox
from tests.simulator.checker import check
from tests.simulator.fabric import Box, aborted
from tests.simulator.network import Outcome

if TYPE_CHECKING:
    from tests.simulator.prefill import PrefillAgent
    from tests.simulator.reading import Reading


@dataclass(frozen=True, slots=True)
class Digest:
    """A reader wants to know what stands in blocks."""

    offered: OfferedBox
    blocks: tuple[int, ...]
    reply_to: Any


class Digests(Message, frozen=True):
    """Reply to `Digest`."""

    found: list[int]


def digest(agent: "PrefillAgent", asked: Digest) -> None:
    """Reply a little later; raises what the offer table has against it."""
    agent.table.check_read(asked.offered, agent.engine_id)
    memory = agent.memory

    def reply() -> None:
        asked.reply_to.reply(Digests([memory.cells[block] for block in asked.blocks]))

    agent.process.after(2e-4 * agent.world.random.random(), reply)


class Comparison:
    """Threads that make digests for one leg."""

    __slots__ = ("aborted",)

    def __init__(self) -> None:
        self.aborted = False


class Comparing:
    """All legs of one decode agent that compare."""

    def __init__(self, reading: "Reading") -> None:
        self._reading, self._agent = reading, reading.agent

    def ask(self, command: ev.AskDigests) -> None:
        """Ask the holder."""
        box: Box = command.leg.work
        fetch, offered = box.fetch, self._reading.offered(command.key, box)
        timeout_s = max(1e-3, fetch.deadline - self._agent.process.time())
        on_reply = partial(self._on_digests, command)
        client, sources = self._agent.client(fetch.offer.agent), tuple(s for s, _ in box.pairs)
        client.ask(fetch.offer.boot, timeout_s, on_reply, Digest, offered, sources)

    def start(self, command: ev.StartCompare) -> None:
        """Digest what has landed."""
        box: Box = command.leg.work
        check(not box.fetch.in_flight, 2, "compared before all has landed", box.fetch)
        comparison = box.job = Comparison()
        elapsed_s = 3e-4 * self._agent.world.random.random()
        self._agent.process.after(elapsed_s, self._end, command, comparison)

    def _on_digests(self, command: ev.AskDigests, answer: Outcome) -> None:
        if isinstance(answer, Digests):
            command.leg.work.expected = answer.found
            self._reading.tell(ev.DigestsCame(command.key, command.leg))
        elif isinstance(answer, KVBusError):
            self._reading.tell(ev.CompareEnded(command.key, command.leg, answer))

    def _end(self, command: ev.StartCompare, comparison: Comparison) -> None:
        box: Box = command.leg.work
        box.job = None
        found = [box.fetch.memory.cells[target] for _, target in box.pairs]
        error: KVBusError | None = aborted() if comparison.aborted else None
        if error is None and found != box.expected:
            self._agent.world.counts["differences"] += 1
            error = RemoteError("other bytes", code=ErrorCode.DIGEST_MISMATCH)
        self._reading.tell(ev.CompareEnded(command.key, command.leg, error))
