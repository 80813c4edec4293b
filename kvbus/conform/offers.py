"""Plays a prefill agent: checks tables and numbers of offers, and that they stay as they are."""

import json
from dataclasses import dataclass

from kvbus.conform.agent import PlayedAgent
from kvbus.conform.desk import Desk, Job
from kvbus.conform.door import OK, Answer, body_of, refusal
from kvbus.conform.engine_process import EngineProcess
from kvbus.conform.frames import Asked
from kvbus.conform.memory import Bytes, Place, where_different
from kvbus.conform.rules import Book
from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable, num_blocks_for
from kvbus.protocol.engine import (
    ExtendOffer,
    MakeOffer,
    Outcome,
    Released,
    SealOffer,
    WithdrawOffer,
)

LATER_FIELDS = {
    "a_later_field": 'say "it" \\ on: é ≠ \N{GRINNING FACE}',
    "a_later_number": 2**53 - 1,
}


@dataclass(slots=True)
class Kept:
    """KV of an offer as it was when it was announced."""

    place: Place
    table: BlockTable
    start: int
    kv: Bytes


class OfferDesk(Desk):
    """The offers of one prefill engine."""

    op, over_word = MakeOffer.op, "released"

    def __init__(self, agent: PlayedAgent, engine: EngineProcess, book: Book) -> None:
        super().__init__(agent, engine, book)
        self._kept: dict[int, list[Kept]] = {}
        self._sealed: set[int] = set()
        self.num_ready: dict[int, int] = {}
        agent.answering |= {
            MakeOffer.op: self._on_offer,
            ExtendOffer.op: self._on_extend,
            SealOffer.op: self._on_seal,
            WithdrawOffer.op: self._on_withdraw,
        }

    def say(self, job: Job) -> None:
        self.engine.say("offer", job.name, *job.counts)

    def is_about(self, asked: Asked, job: Job) -> bool:
        return isinstance(asked.body, MakeOffer) and asked.body.request_id == str(job.name)

    def finish(self, job: Job) -> None:
        self.release(job, Outcome.COMPLETED)

    def check_told(self, job: Job) -> bool:
        told, tickets = self.told_over(job), self.engine.told("ticket", job.name)
        seen = f"request {job.name}: {told} instead of how it ended"
        ended = self.book.expect("offer.answered", bool(told) and told[0] in set(Outcome), seen)
        times = f"`ticket {job.name}` {len(tickets)} times"
        once = self.book.expect("offer.ticket", len(tickets) == 1, times)
        return ended and once and self._is_right(job, tickets[0])

    def release(self, job: Job, outcome: Outcome) -> None:
        """Tell the engine that an offer has ended so; its blocks were unchanged until now."""
        self.check_unchanged(job)
        job.over = True
        body = Released(offer_id=job.handoff_id, request_id=str(job.name), outcome=outcome)
        self.agent.notify(Released.op, body)

    def is_sealed(self, job: Job) -> bool:
        """Whether the offer has all of its tokens."""
        return job.name in self._sealed

    def ticket(self, job: Job) -> dict[str, object]:
        """The ticket of an offer, with fields that no version has."""
        return {
            "agent_id": "conform",
            "agent_boot": self.agent.boot,
            "endpoint": "tcp://127.0.0.1:1",
            "engine_id": "engine",
            "engine_boot": "of the engine",
            "offer_id": job.handoff_id,
            "request_id": str(job.name),
            "num_tokens": job.counts[0],
            "kvbus": 1,
            **LATER_FIELDS,
        }

    def check_unchanged(self, job: Job) -> None:
        """The KV of an offer is what it was when it was announced."""
        for kept in self._kept.get(job.name, []):
            now = kept.place.read(kept.table, kept.start, kept.start + len(kept.kv))
            same = bool((now == kept.kv).all())
            where = "" if same else where_different(kept.place, now, kept.kv, kept.start)
            self.book.expect("offer.unchanged", same, f"request {job.name}: {where}")

    def _is_right(self, job: Job, told: str) -> bool:
        try:
            given = json.loads(told)
        except ValueError as error:
            return self.book.expect("offer.ticket", False, f"it is no JSON: {error}")
        differs = f"of request {job.name} came {told[:200]}"
        return self.book.expect("offer.ticket", given == self.ticket(job), differs)

    def _on_offer(self, asked: Asked) -> Answer:
        body = body_of(asked, MakeOffer)
        job = self.jobs.get(int(body.request_id) if body.request_id.isdigit() else 0)
        named = f"request_id is {body.request_id!r}, which was not told"
        if not self.book.expect("offer.answered", job is not None, named) or job is None:
            return refusal("invalid", named)
        job.tables, job.handoff_id = dict(body.tables), f"offer-{job.name}"
        problem = self._wrong_tables(job, job.tables, body.num_tokens)
        wanted = f"request {job.name}: {body.num_tokens} tokens where {job.counts} were told"
        self.book.expect("offer.tables", body.num_tokens in job.counts, wanted)
        if not self.book.expect("offer.tables", not problem, f"request {job.name}: {problem}"):
            return refusal("geometry", problem)
        if body.sealed:
            self._seal(job, body.num_tokens)
        self._announce(job, body.num_tokens)
        return {"ok": {"offer_id": job.handoff_id, "ticket": self.ticket(job), "later": None}}

    def _on_extend(self, asked: Asked) -> Answer:
        body = body_of(asked, ExtendOffer)
        job = self._job(body.offer_id)
        if job is None:
            return refusal("offer_unknown", f"no offer {body.offer_id!r}")
        before = self.num_ready.get(job.name, 0)
        grows = f"request {job.name}: {body.num_tokens} tokens after {before}"
        self.book.expect("offer.extend", body.num_tokens >= before, grows)
        problem = self._wrong_extension(job, body)
        if not self.book.expect("offer.extend", not problem, f"request {job.name}: {problem}"):
            return refusal("geometry", problem)
        self._announce(job, body.num_tokens)
        return OK

    def _wrong_extension(self, job: Job, body: ExtendOffer) -> str:
        try:
            for group, more in body.tables.items():
                if len(more) or group not in job.tables:
                    job.tables[group] = job.tables[group].extended(more)
        except (GeometryError, KeyError) as error:
            return str(error)
        return self._wrong_tables(job, job.tables, body.num_tokens)

    def _on_seal(self, asked: Asked) -> Answer:
        job = self._job(body_of(asked, SealOffer).offer_id)
        if job is None:
            return refusal("offer_unknown", "no such offer")
        num_tokens = self.num_ready.get(job.name, 0)
        self._seal(job, num_tokens)
        self._announce(job, num_tokens)  # states are those of the last token
        return OK

    def _seal(self, job: Job, num_tokens: int) -> None:
        early = f"request {job.name} is sealed at {num_tokens} of {job.num_tokens} tokens"
        self.book.expect("offer.sealed", num_tokens == job.num_tokens, early)
        self._sealed.add(job.name)

    def _on_withdraw(self, asked: Asked) -> Answer:
        job = self._job(body_of(asked, WithdrawOffer).offer_id)
        return OK if job is not None else refusal("offer_unknown", "no such offer")

    def _job(self, offer_id: str) -> Job | None:
        return next((job for job in self.jobs.values() if job.handoff_id == offer_id), None)

    def _wrong_tables(self, job: Job, tables: dict[str, BlockTable], num_tokens: int) -> str:
        memory = self.agent.registering.memory
        if memory is None:
            return "nothing is registered"
        for group in memory.engine.groups:
            start, stop = group.positions(0, num_tokens)
            table = tables.get(group.name)
            if table is None:
                if stop > start:
                    return f"group {group.name} has no table"
                continue
            try:
                table.check_ids(memory.num_blocks(group.name) if memory.places else 2**32)
            except GeometryError as error:
                return f"group {group.name}: {error.message}"
            last = num_blocks_for(stop, group.block_size) if stop > start else 0
            late = table.first_block > (start // group.block_size if group.window else 0)
            if (late and self.is_sealed(job)) or table.first_block + len(table) < last:
                return (
                    f"group {group.name}: blocks {table.first_block} to "
                    f"{table.first_block + len(table)} of the request do not hold positions "
                    f"{start} to {stop} in blocks of {group.block_size}"
                )
        return ""

    def _announce(self, job: Job, num_tokens: int) -> None:
        """Check the numbers of all tokens that are ready now, and keep them."""
        memory, kept = self.agent.registering.memory, list[Kept]()
        self.num_ready[job.name] = num_tokens
        for place, table, first, stop in (
            memory.covered(job.tables, 0, num_tokens) if memory else ()
        ):
            if place.group.state and not self.is_sealed(job):
                continue
            start = max(first, table.first_block * place.group.block_size)
            kv = place.read(table, start, stop)
            wanted = place.numbers(job.name, start, stop)
            right = bool((kv == wanted).all())
            where = "" if right else where_different(place, kv, wanted, start)
            self.book.expect("offer.numbers", right, f"request {job.name}: {where}")
            kept.append(Kept(place, table, start, kv))
        self._kept[job.name] = kept
