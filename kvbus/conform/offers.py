"""Played prefill agent: it checks the tables and numbers of offers."""

import json
from functools import partial

from kvbus.conform.memory import LiveCell, covered
from kvbus.conform.played_agent import OK, Answer, PlayedAgent, refusal
from kvbus.conform.rules import PREFILL
from kvbus.conform.session import EngineRequest
from kvbus.conform.stage import MAX_BLOCKS, EngineStage, Job, Kept, ticket_of
from kvbus.errors import GeometryError
from kvbus.geometry import check_offered
from kvbus.protocol.commit_cell import NUM_CELLS
from kvbus.protocol.engine import (
    ExtendOffer,
    MakeOffer,
    Outcome,
    Released,
    Republished,
    SealOffer,
    WithdrawOffer,
)
from kvbus.protocol.message import Message


class OfferStage(EngineStage):
    op, end_line, rules = MakeOffer.op, "released", PREFILL

    def __init__(self, agent: PlayedAgent, patience_s: float, start_s: float) -> None:
        super().__init__(agent, patience_s, start_s)
        agent.answering |= {
            MakeOffer.op: self._on_offer,
            ExtendOffer.op: self._on_extend,
            SealOffer.op: self._on_seal,
            WithdrawOffer.op: self._on_withdraw,
            Republished.op: lambda *_: OK,
        }

    def send(self, job: Job) -> None:
        self.engine.send_line("offer", job.name, *job.counts)

    def name_of(self, body: Message | None) -> str:
        return body.request_id if isinstance(body, MakeOffer) else ""

    def finish(self, job: Job) -> None:
        self.release(job, Outcome.COMPLETED)

    def check_reported(self, job: Job) -> bool:
        ends, tickets = self.reported_over(job), self.engine.reported("ticket", job.name)
        seen = f"request {job.name}: {ends} instead of its outcome"
        ended = self.book.expect("offer.answered", bool(ends) and ends[0] in set(Outcome), seen)
        times = f"`ticket {job.name}` {len(tickets)} times"
        once = self.book.expect("offer.ticket", len(tickets) == 1, times)
        return ended and once and self._is_right(job, tickets[0])

    def release(self, job: Job, outcome: Outcome) -> None:
        for kept in job.kept:
            now = kept.place.read(kept.table, kept.start, kept.start + len(kept.kv))
            wrong = kept.place.difference(now, kept.kv, kept.start)
            self.book.expect("offer.unchanged", not wrong, f"request {job.name}: {wrong}")
        job.over = True
        body = Released(offer_id=job.handoff_id, request_id=str(job.name), outcome=outcome)
        self.agent.notify(Released.op, body)

    def _is_right(self, job: Job, ticket: str) -> bool:
        try:
            given = json.loads(ticket)
        except ValueError as error:
            return self.book.expect("offer.ticket", False, f"it is no JSON: {error}")
        differs = f"of request {job.name} came {ticket[:200]}"
        return self.book.expect("offer.ticket", given == ticket_of(job), differs)

    def _on_offer(self, request: EngineRequest, body: MakeOffer) -> Answer:
        job = self.jobs.get(int(body.request_id) if body.request_id.isdigit() else 0)
        named = f"request_id is {body.request_id!r}, which no line named"
        if not self.book.expect("offer.answered", job is not None, named) or job is None:
            return refusal("invalid", named)
        if body.left_s is not None:
            self._check_republished(job, body)
        job.tables, job.rights = dict(body.tables), (body.offer_id, body.secret)
        job.handoff_id = body.offer_id or f"offer-{job.name}"
        problem = self._tables_problem(job, body.num_tokens, sealed=body.sealed)
        wanted = f"request {job.name}: {body.num_tokens} tokens, the line has {job.counts}"
        self.book.expect("offer.tables", body.num_tokens in job.counts, wanted)
        if not self.book.expect("offer.tables", not problem, f"request {job.name}: {problem}"):
            return refusal("geometry", problem)
        if body.sealed:
            self._seal(job, body.num_tokens)
        self._open_cell(job, body)
        self._announce(job, body.num_tokens)
        return {"ok": {"offer_id": job.handoff_id, "ticket": ticket_of(job), "later": None}}

    # The engine may write to the blocks of an ended offer only after it has closed the cell. The
    # agent sees a violation when the blocks arrive in another offer: they hold new numbers by then.
    # The played agent closes no cell itself, like an agent that was killed.
    def _check_cells(self, job: Job) -> None:
        for other in self.jobs.values():
            if other.over and other.cell and _share_blocks(other, job):
                seen = f"that of request {other.name}, whose blocks request {job.name} has, is open"
                self.book.expect("offer.cell", not other.cell.is_open, seen)
                other.cell = None

    def _open_cell(self, job: Job, body: MakeOffer) -> None:
        page, number = self.agent.cells, body.cell % NUM_CELLS
        if not body.cell:
            return
        if page is None:
            self.book.expect("offer.cell", False, "a cell is named, and no page was passed")
            return
        named, found = body.cell << 2 | 3, page[number]
        seen = f"cell {number} of request {job.name} has {found:#x}, not {named:#x}"
        if self.book.expect("offer.cell", found == named, seen):
            page[number] = live = body.cell << 2 | 1
            job.cell = LiveCell(page, number, live)

    def lose(self, job: Job, *, same_memory: bool) -> None:
        super().lose(job, same_memory=same_memory)
        if not same_memory:
            job.cell = None

    # An engine ends the offers of a lost agent, or publishes them to the next one. A republished
    # offer is checked as a whole again, and completes.
    def settle_lost(self, job: Job) -> bool:
        self.wait(lambda: self.reported_over(job) or job.again)
        if not job.again:
            self.book.untried("offer.again", "the engine ends its offers with their agent")
            return bool(self.reported_over(job))
        is_reported = self.wait(lambda: self.agent.requests_of(Republished.op))
        violation = f"no `republished` after request {job.name}, which was published again"
        return self.book.expect("offer.again", is_reported, violation) and self.end_well(job)

    def _check_republished(self, job: Job, body: MakeOffer) -> None:
        same = bool(body.offer_id) and (body.offer_id, body.secret) == job.rights
        seen = f"request {job.name} has another offer_id or secret than before"
        self.book.expect("offer.again", same, seen)
        whole = (body.num_tokens, body.sealed) == (job.num_ready, job.sealed)
        seen = f"request {job.name} has {body.num_tokens} tokens, it had {job.num_ready}"
        self.book.expect("offer.again", whole, seen)
        job.over, job.again = False, True

    def _on_extend(self, request: EngineRequest, body: ExtendOffer) -> Answer:
        job = self._job(body.offer_id)
        if job is None:
            return refusal("offer_unknown", f"no offer {body.offer_id!r}")
        grows = f"request {job.name}: {body.num_tokens} tokens after {job.num_ready}"
        self.book.expect("offer.extend", body.num_tokens >= job.num_ready, grows)
        problem = self._extension_problem(job, body)
        if not self.book.expect("offer.extend", not problem, f"request {job.name}: {problem}"):
            return refusal("geometry", problem)
        self._announce(job, body.num_tokens)
        return OK

    def _extension_problem(self, job: Job, body: ExtendOffer) -> str:
        try:
            for group, more in body.tables.items():
                if len(more) or group not in job.tables:
                    job.tables[group] = job.tables[group].extended(more)
        except (GeometryError, KeyError) as error:
            return str(error)
        return self._tables_problem(job, body.num_tokens, sealed=False)

    def _on_seal(self, request: EngineRequest, body: SealOffer) -> Answer:
        job = self._job(body.offer_id)
        if job is None:
            return refusal("offer_unknown", "no such offer")
        problem = self._tables_problem(job, job.num_ready, sealed=True)
        if not self.book.expect("offer.tables", not problem, f"request {job.name}: {problem}"):
            return refusal("geometry", problem)
        self._seal(job, job.num_ready)
        self._announce(job, job.num_ready)  # again, now with states
        return OK

    def _seal(self, job: Job, num_tokens: int) -> None:
        early = f"request {job.name} is sealed at {num_tokens} of {job.num_tokens} tokens"
        self.book.expect("offer.sealed", num_tokens == job.num_tokens, early)
        job.sealed = True

    def _on_withdraw(self, request: EngineRequest, body: WithdrawOffer) -> Answer:
        return OK if self._job(body.offer_id) else refusal("offer_unknown", "no such offer")

    def _job(self, offer_id: str) -> Job | None:
        return next((job for job in self.jobs.values() if job.handoff_id == offer_id), None)

    def _tables_problem(self, job: Job, num_tokens: int, *, sealed: bool) -> str:
        if self.agent.spec is None:
            return "nothing is registered"
        try:
            check_offered(
                *(self.agent.spec, job.tables, num_tokens), sealed=sealed, num_blocks=self.id_limit
            )
        except GeometryError as error:
            return error.message
        return ""

    def _announce(self, job: Job, num_tokens: int) -> None:
        self._check_cells(job)
        job.num_ready, job.kept = num_tokens, []
        for place, table, first, stop in covered(self.agent.places, job.tables, 0, num_tokens):
            if place.group.state and not job.sealed:
                continue
            start = max(first, table.first_block * place.group.block_size)
            kv = place.read(table, start, stop)
            wrong = place.difference(kv, place.numbers(job.name, start, stop), start)
            self.book.expect("offer.numbers", not wrong, f"request {job.name}: {wrong}")
            job.kept.append(Kept(place, table, start, kv))


def _share_blocks(one: Job, other: Job) -> bool:
    pairs = (
        (one.tables[name], table) for name, table in other.tables.items() if name in one.tables
    )
    return any(set(ours.array()) & set(theirs.array()) for ours, theirs in pairs)


def sizes(stage: OfferStage) -> None:
    block = stage.block_size
    for num_tokens in (1, block - 1 or 1, block, 2 * block + 1, stage.window + 2 * block + 3, 0):
        stage.end_well(stage.taken(stage.begin(num_tokens)))


def grows(stage: OfferStage) -> None:
    block = stage.block_size
    for counts in ((0, 2, block + 1, block + 2, 3 * block), (block, 2 * block)):
        job = stage.taken(stage.begin(*counts))
        sealed = stage.wait(partial(getattr, job, "sealed"))
        stage.book.expect("offer.sealed", sealed, f"request {job.name} of {counts} was not sealed")
        have, of = job.num_ready, job.num_tokens
        grown = f"request {job.name}: {have} tokens were announced of {of}"
        stage.book.expect("offer.extend", have == of, grown)
        stage.end_well(job)


def blocks(stage: OfferStage) -> None:
    """An offer is withdrawn. All blocks stay in use until `released`."""
    block, before = stage.block_size, len(stage.agent.log)
    first, *others = stage.begin(block + 1), stage.begin(block), stage.begin(2 * block)
    stage.taken(first, *others)
    stage.wait(lambda: stage.engine.reported("ticket", first.name))
    stage.engine.send_line("withdraw", first.name)
    withdrawn = stage.wait(lambda: stage.agent.requests_of(WithdrawOffer.op, before))
    stage.book.expect("offer.answered", withdrawn, f"no `withdraw` for request {first.name}")
    stage.use_all_blocks("offer.reused")
    stage.release(first, Outcome.WITHDRAWN)
    stage.seen_over(first)
    stage.end_well(*others)
    stage.use_all_blocks("offer.reused")


def cells(stage: OfferStage) -> None:
    """The agent crashes while an offer's cell is open. Then all blocks are used."""
    job = stage.taken(stage.begin(stage.block_size))
    if job.cell is None:
        stage.book.untried("offer.cell", "the engine names no cells")
        stage.end_well(job)
        return
    files = stage.agent.files
    stage.agent.close()
    stage.agent.open()
    if stage.registered():
        stage.lose(job, same_memory=bool(files & stage.agent.files))
        stage.settle_lost(job)
        caches = [stage.num_blocks(group.name) or 0 for group in stage.groups]
        others = [stage.begin(stage.block_size) for _ in range(min([*caches, MAX_BLOCKS]))]
        if others:
            stage.taken(*others)
            stage.end_well(*others)
