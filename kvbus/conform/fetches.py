"""Played decode agent: it checks fetches, and fills their blocks.

It writes wrong numbers until a fetch is over, to detect early use and foreign writes.
"""

import json
from collections.abc import Iterator

from kvbus.conform.memory import RegionView, covered
from kvbus.conform.played_agent import OK, Answer, PlayedAgent, refusal
from kvbus.conform.rules import DECODE
from kvbus.conform.session import EngineRequest
from kvbus.conform.stage import EngineStage, Job, ticket_of
from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable, check_fetched
from kvbus.protocol.engine import (
    BlocksFreed,
    CancelFetch,
    Fetched,
    Landed,
    Outcome,
    StartFetch,
)
from kvbus.protocol.message import Message, to_body

EARLY_S, NUM_SPOILT = 0.5, 3
NUM_TOKENS = 20
WRONG_BY = 89
"""Makes every number wrong: not a multiple of 251."""


class FetchStage(EngineStage):
    op, end_line, rules = StartFetch.op, "fetched", DECODE

    def __init__(self, agent: PlayedAgent, patience_s: float, start_s: float) -> None:
        super().__init__(agent, patience_s, start_s)
        self.cancelled: set[str] = set()
        self._fetch_ids: set[str] = set()
        self._lost: list[tuple[str, Job]] = []
        agent.answering |= {StartFetch.op: self._on_fetch, CancelFetch.op: self._on_cancel}

    def send(self, job: Job) -> None:
        ticket = json.dumps(ticket_of(job))
        self.engine.send_line("fetch", job.name, job.first_token, job.num_tokens, ticket)

    def name_of(self, body: Message | None) -> str:
        return str(body.ticket.get("request_id")) if isinstance(body, StartFetch) else ""

    def finish(self, job: Job) -> None:
        self.land(job)
        self.end(job, Outcome.COMPLETED)

    def check_reported(self, job: Job) -> bool:
        ends = self.reported_over(job)[:1]
        seen = f"request {job.name}: {ends} instead of `completed 0`"
        return self.book.expect("fetch.numbers", ends == ["completed 0"], seen)

    def lose(self, job: Job, *, same_memory: bool) -> None:
        super().lose(job, same_memory=same_memory)
        self.book.expect("fetch.lost_blocks", True)
        if same_memory:
            self._lost.append((self.agent.boot, job))

    def settle_lost(self, job: Job) -> bool:
        self.wait(lambda: self.reported_over(job) or job.again)
        return self.end_well(job) if job.again else bool(self.reported_over(job))

    def land(self, job: Job) -> None:
        if job.written == job.name:
            return
        self.check_untouched(job)
        self._write(job, job.name)
        body = job.request.body if job.request else None
        if isinstance(body, StartFetch) and body.chunk_tokens:
            landed = Landed(fetch_id=job.handoff_id, num_tokens=job.num_tokens)
            self.agent.notify(landed.op, landed)

    def end(self, job: Job, outcome: Outcome, *, blocks_free: bool = True, code: str = "") -> None:
        if job.request is None:
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
        self.agent.reply(job.request, {"ok": to_body(fetched)})

    def free(self, job: Job) -> None:
        self.check_untouched(job)
        job.over = True
        self.agent.notify(BlocksFreed.op, BlocksFreed(fetch_id=job.handoff_id))

    def spoil(self, job: Job) -> int:
        for place, table, start, _ in self._covered(job):
            kv = place.read(table, start, start + 1)
            row = kv[0, 0, 0, 0].reshape(-1)
            row[:NUM_SPOILT] ^= 0xFF
            place.write(table, start, kv)
            return min(NUM_SPOILT, int(row.size))
        return 0

    def check_untouched(self, job: Job) -> None:
        for place, table, start, stop in self._covered(job):
            want = place.numbers(job.written, start, stop)
            wrong = place.difference(place.read(table, start, stop), want, start)
            seen = f"request {job.name}, written over: {wrong}"
            self.book.expect("fetch.blocks", not wrong, seen)

    def expect_outcome(self, job: Job, rule: str, outcome: Outcome) -> None:
        self.wait(lambda: self.reported_over(job))
        ends = self.reported_over(job)
        right = len(ends) == 1 and ends[0].startswith(outcome)
        self.book.expect(rule, right, f"request {job.name}: {ends} instead of `{outcome}`")

    def _write(self, job: Job, name: int) -> None:
        for place, table, start, stop in self._covered(job):
            place.write(table, start, place.numbers(name, start, stop))
        job.written = name

    def _covered(self, job: Job) -> Iterator[tuple[RegionView, BlockTable, int, int]]:
        return covered(self.agent.places, job.tables, job.first_token, job.num_tokens)

    def _on_fetch(self, request: EngineRequest, body: StartFetch) -> Answer | None:
        name = self.name_of(body)
        job = next((one for one in self.jobs.values() if str(one.name) == name), None)
        same = job is not None and body.ticket == ticket_of(job)
        self.book.expect("fetch.ticket", same, f"the ticket came as {str(dict(body.ticket))[:200]}")
        if job is None:
            return refusal("invalid", "no such ticket was given")
        again = f"fetch id {body.fetch_id!r} was used before"
        if body.repeated and body.fetch_id == job.handoff_id:
            job.over, job.again = False, True
        else:
            self.book.expect("fetch.id", body.fetch_id not in self._fetch_ids, again)
        tokens = (body.first_token, body.num_tokens)
        wanted = f"tokens {tokens}, not {(job.first_token, job.num_tokens)}"
        self.book.expect("fetch.tokens", tokens == (job.first_token, job.num_tokens), wanted)
        problem = self._tables_problem(body)
        if not self.book.expect("fetch.tables", not problem, f"request {job.name}: {problem}"):
            return refusal("geometry", problem)
        self.book.expect("fetch.answered", True)
        self._fetch_ids.add(body.fetch_id)
        job.handoff_id, job.tables, job.request = body.fetch_id, dict(body.tables), request
        self._check_blocks(job)
        self._write(job, job.name + WRONG_BY)
        return None

    def _tables_problem(self, body: StartFetch) -> str:
        if self.agent.spec is None:
            return "nothing is registered"
        tokens = body.first_token, body.num_tokens
        try:
            check_fetched(self.agent.spec, body.tables, *tokens, num_blocks=self.id_limit)
        except GeometryError as error:
            return error.message
        return ""

    def _check_blocks(self, new: Job) -> None:
        for job in self.jobs.values():
            both = "" if job.over or job is new else _common(new, job)
            seen = f"request {new.name}: {both} are those of request {job.name}"
            self.book.expect("fetch.blocks", not both, seen)
        for boot, lost in self._lost:
            both = _common(new, lost) if boot == self.agent.boot else ""
            seen = f"request {new.name} uses {both}, which request {lost.name} had"
            self.book.expect("fetch.lost_blocks", not both, seen)

    def _on_cancel(self, request: EngineRequest, body: CancelFetch) -> Answer:
        if body.fetch_id not in self._fetch_ids:
            return refusal("fetch_unknown", "no such fetch")
        self.cancelled.add(body.fetch_id)
        return OK


def _common(one: Job, other: Job) -> str:
    for group in one.tables.keys() & other.tables.keys():
        both = set(one.tables[group].array().tolist()) & set(other.tables[group].array().tolist())
        if both:
            return f"blocks {sorted(both)} of group {group}"
    return ""


def shapes(stage: FetchStage) -> None:
    block, window = stage.block_size, stage.window
    wanted = (
        (0, 1),
        (0, block),
        (0, 2 * block + 1),
        (block + block // 4, 2 * block + block // 2),
        (block // 4, block // 2 + 1),
        (0, window + 2 * block + 3),
        (block, window + 2 * block - 1),
        (block, block),
    )
    for first_token, num_tokens in wanted:
        stage.end_well(stage.taken(stage.begin(num_tokens, first_token=first_token)))


def counts(stage: FetchStage) -> None:
    job = stage.taken(stage.begin(2 * stage.block_size))
    stage.agent.play(EARLY_S)
    stage.land(job)
    stage.agent.play(EARLY_S)
    early = f"`fetched {job.name}` before the answer came"
    stage.book.expect("fetch.completed", not stage.reported_over(job), early)
    ended = stage.end_well(job) and stage.reported_over(job)[0] == "completed 0"
    stage.book.expect("fetch.completed", ended, f"the engine reported {stage.reported_over(job)}")
    spoilt = stage.taken(stage.begin(stage.block_size))
    stage.land(spoilt)
    wrong = f"completed {stage.spoil(spoilt)}"
    stage.end(spoilt, Outcome.COMPLETED)
    stage.wait(lambda: stage.reported_over(spoilt))
    reported = stage.reported_over(spoilt)
    seen = f"the engine reported {reported}, not `{wrong}`: it does not read its memory"
    stage.book.expect("fetch.numbers", reported == [wrong], seen)


def failed(stage: FetchStage) -> None:
    for code in ("peer_lost", "moon_phase"):
        job = stage.taken(stage.begin(NUM_TOKENS))
        stage.land(job)
        stage.end(job, Outcome.FAILED, code=code)
        stage.expect_outcome(job, "fetch.failed", Outcome.FAILED)


def blocks(stage: FetchStage) -> None:
    """A transfer still writes into blocks of ended fetches. They stay unused until free."""
    job, cancelled = stage.begin(NUM_TOKENS), stage.begin(NUM_TOKENS)
    stage.taken(job, cancelled)
    stage.end(job, Outcome.FAILED, blocks_free=False, code="timeout")
    stage.expect_outcome(job, "fetch.failed", Outcome.FAILED)
    stage.engine.send_line("cancel", cancelled.name)
    is_cancelled = stage.wait(lambda: cancelled.handoff_id in stage.cancelled)
    stage.book.expect("fetch.cancel", is_cancelled, f"no `cancel` for request {cancelled.name}")
    stage.end(cancelled, Outcome.CANCELLED, blocks_free=False, code="cancelled")
    stage.expect_outcome(cancelled, "fetch.cancel", Outcome.CANCELLED)
    stage.use_all_blocks("fetch.blocks")
    stage.free(job)
    stage.free(cancelled)
    stage.use_all_blocks("fetch.reused")
