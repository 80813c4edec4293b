"""Plays a decode agent: checks tables of fetches, and writes into their blocks as transfers do.

What it writes before a fetch is over is wrong on purpose: an engine that uses it, or writes into
blocks that are not its own yet, is seen.
"""

import json
from collections.abc import Iterator

from kvbus.conform.agent import PlayedAgent
from kvbus.conform.desk import Desk, Job
from kvbus.conform.door import OK, Answer, body_of, refusal
from kvbus.conform.engine_process import EngineProcess
from kvbus.conform.frames import Asked
from kvbus.conform.memory import Place, where_different
from kvbus.conform.offers import LATER_FIELDS
from kvbus.conform.rules import Book
from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import (
    BlocksFreed,
    CancelFetch,
    Fetched,
    Landed,
    Outcome,
    StartFetch,
)
from kvbus.protocol.message import to_body

WRONG_BY = 89
"""Added to a job's name it gives numbers of which none is right: no multiple of 251."""


class FetchDesk(Desk):
    """The fetches of one decode engine."""

    op, over_word = StartFetch.op, "fetched"

    def __init__(self, agent: PlayedAgent, engine: EngineProcess, book: Book) -> None:
        super().__init__(agent, engine, book)
        self._fetch_ids: set[str] = set()
        self.cancelled: set[str] = set()
        self._lost: list[tuple[str, Job]] = []
        agent.answering |= {StartFetch.op: self._on_fetch, CancelFetch.op: self._on_cancel}

    def say(self, job: Job) -> None:
        ticket = json.dumps(self.ticket(job))
        self.engine.say("fetch", job.name, job.first_token, job.num_tokens, ticket)

    def is_about(self, asked: Asked, job: Job) -> bool:
        body = asked.body
        return isinstance(body, StartFetch) and body.ticket.get("request_id") == str(job.name)

    def finish(self, job: Job) -> None:
        """The right numbers land, and the fetch is completed."""
        self.land(job)
        self.end(job, Outcome.COMPLETED)

    def land(self, job: Job) -> None:
        """The right numbers are there; the engine is told, if it asked for that."""
        if job.written == job.name:
            return
        self.write(job, job.name)
        if job.asked is not None and body_of(job.asked, StartFetch).chunk_tokens:
            landed = Landed(fetch_id=job.handoff_id, num_tokens=job.num_tokens)
            self.agent.notify(landed.op, landed)

    def end(self, job: Job, outcome: Outcome, *, blocks_free: bool = True, code: str = "") -> None:
        """Answer that a fetch has ended so."""
        if job.asked is None:
            return
        job.over |= blocks_free
        fetched = Fetched(
            fetch_id=job.handoff_id,
            request_id=str(job.name),
            outcome=outcome,
            stage="completed" if outcome is Outcome.COMPLETED else "reading",
            blocks_free=blocks_free,
            code=code,
            message="as kvbus conform has it" if code else "",
        )
        self.agent.reply(job.asked, {"ok": to_body(fetched)})
        self.agent.notify_ranks(fetched)

    def free(self, job: Job) -> None:
        """Nothing writes into the blocks any more; nobody else did until now."""
        self.check_untouched(job)
        job.over = True
        self.agent.notify(BlocksFreed.op, BlocksFreed(fetch_id=job.handoff_id))

    def lost(self, job: Job, *, same_memory: bool) -> None:
        """In the same memory the blocks are not free: the agent's process has not ended."""
        super().lost(job, same_memory=same_memory)
        self.book.expect("fetch.lost_blocks", True, "")
        if same_memory:
            self._lost.append((self.agent.boot, job))

    def check_told(self, job: Job) -> bool:
        told = self.told_over(job)[:1]
        seen = f"request {job.name}: {told} instead of `completed 0`"
        return self.book.expect("fetch.numbers", told == ["completed 0"], seen)

    def ticket(self, job: Job) -> dict[str, object]:
        """The ticket of a request, with fields that no version has."""
        return {
            "agent_id": "elsewhere",
            "agent_boot": "of the prefill agent",
            "endpoint": "tcp://127.0.0.1:1",
            "engine_id": "prefill",
            "engine_boot": "of the prefill engine",
            "offer_id": f"offer-{job.name}",
            "request_id": str(job.name),
            "num_tokens": job.num_tokens,
            "kvbus": 1,
            **LATER_FIELDS,
        }

    def write(self, job: Job, name: int) -> None:
        """Write the numbers of this name; what was there was not changed by anybody else."""
        self.check_untouched(job)
        for place, table, start, stop in self._covered(job):
            place.write(table, start, place.numbers(name, start, stop))
        job.written = name

    def spoil(self, job: Job, num_bytes: int) -> int:
        """Change so many bytes of the first row of a fetch; returns how many it had."""
        for place, table, start, _ in self._covered(job):
            kv = place.read(table, start, start + 1)
            row = kv[0, 0, 0, 0].reshape(-1)
            row[:num_bytes] ^= 0xFF
            place.write(table, start, kv)
            return min(num_bytes, int(row.size))
        return 0

    def check_untouched(self, job: Job) -> None:
        """The blocks of a fetch have what was written from here, and nothing else."""
        for place, table, start, stop in self._covered(job):
            have, want = place.read(table, start, stop), place.numbers(job.written, start, stop)
            same = bool((have == want).all())
            where = "" if same else where_different(place, have, want, start)
            self.book.expect("fetch.blocks", same, f"request {job.name}, written over: {where}")

    def _covered(self, job: Job) -> Iterator[tuple[Place, BlockTable, int, int]]:
        memory = self.agent.registering.memory
        if memory is not None:
            yield from memory.covered(job.tables, job.first_token, job.num_tokens)

    def _on_fetch(self, asked: Asked) -> Answer | None:
        body = body_of(asked, StartFetch)
        job = next((one for one in self.jobs.values() if self.is_about(asked, one)), None)
        same = job is not None and body.ticket == self.ticket(job)
        self.book.expect("fetch.ticket", same, f"the ticket came as {str(dict(body.ticket))[:200]}")
        if job is None:
            return refusal("invalid", "no such ticket was given")
        again = f"fetch id {body.fetch_id!r} was used before"
        self.book.expect("fetch.id", body.fetch_id not in self._fetch_ids, again)
        tokens = (body.first_token, body.num_tokens)
        wanted = f"tokens {tokens}, not {(job.first_token, job.num_tokens)}"
        self.book.expect("fetch.tokens", tokens == (job.first_token, job.num_tokens), wanted)
        problem = self._wrong_tables(body)
        if not self.book.expect("fetch.tables", not problem, f"request {job.name}: {problem}"):
            return refusal("geometry", problem)
        self.book.expect("fetch.answered", True, "")
        self._fetch_ids.add(body.fetch_id)
        job.handoff_id, job.tables, job.asked = body.fetch_id, dict(body.tables), asked
        used = self._used_blocks(job)
        self.book.expect("fetch.blocks", not used, f"request {job.name}: {used}")
        self._check_lost(job)
        for place, table, start, stop in self._covered(job):
            place.write(table, start, place.numbers(job.name + WRONG_BY, start, stop))
        job.written = job.name + WRONG_BY
        return None

    def _wrong_tables(self, body: StartFetch) -> str:
        memory = self.agent.registering.memory
        for group in memory.engine.groups if memory else ():
            table = body.tables.get(group.name)
            if table is None:
                return f"group {group.name} has no table"
            start, stop = group.positions(body.first_token, body.num_tokens)
            if group.state and body.num_tokens and len(table):  # it may be wanted alone
                start, stop = 0, 1
            try:
                table.check_covers(start, stop, group.block_size)
                if memory and memory.places:
                    table.check_ids(memory.num_blocks(group.name))
            except GeometryError as error:
                return f"group {group.name}: {error.message}"
        return ""

    @staticmethod
    def common_blocks(one: Job, other: Job) -> str:
        """Which blocks two fetches have both, in words; empty when none."""
        for group in one.tables.keys() & other.tables.keys():
            both = set(_ids(one, group)) & set(_ids(other, group))
            if both:
                return f"blocks {sorted(both)} of group {group}"
        return ""

    def _check_lost(self, new: Job) -> None:
        for boot, lost in self._lost:
            both = self.common_blocks(new, lost) if boot == self.agent.boot else ""
            seen = f"request {new.name} uses {both}, which request {lost.name} had"
            self.book.expect("fetch.lost_blocks", not both, seen)

    def _used_blocks(self, new: Job) -> str:
        """Which blocks of a new fetch are still those of another."""
        for job in self.jobs.values():
            if not job.over and job is not new and (both := self.common_blocks(new, job)):
                return f"{both} are those of request {job.name}"
        return ""

    def _on_cancel(self, asked: Asked) -> Answer:
        fetch_id = body_of(asked, CancelFetch).fetch_id
        if fetch_id not in self._fetch_ids:
            return refusal("fetch_unknown", "no such fetch")
        self.cancelled.add(fetch_id)
        return OK


def _ids(job: Job, group: str) -> list[int]:
    ids: list[int] = job.tables[group].array().tolist()
    return ids
