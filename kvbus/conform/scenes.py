"""The scenes that are played with an engine, and the play of all of them.

Of either role: answers that are late, refused or out of order; an agent that is stopped, hangs up,
dies and comes back. Of prefill engines: offers of all sizes, offers that grow. Of decode engines:
fetches of all shapes, KV that counts. Of both: blocks that come back.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvbus.conform.desk import Job
from kvbus.conform.fetches import FetchDesk
from kvbus.conform.frames import Asked
from kvbus.conform.offers import OfferDesk
from kvbus.conform.rules import BOTH, DECODE, PREFILL, Book
from kvbus.conform.rules import Outcome as RuleOutcome
from kvbus.conform.stage import START_S, SceneEndedError, Stage, open_stage
from kvbus.protocol.engine import AgentRole, Outcome, Ping, WithdrawOffer

Scene = Callable[[Stage], None]

LATE_S, SILENT_S, AWAY_S, EARLY_S = 3.0, 4.0, 0.5, 0.5
RETRY_AFTER_S, CONCURRENT_S = 0.5, 3.0
NUM_MANY, NUM_SPOILT = 5_000, 3


def scenes_of(role: AgentRole) -> dict[str, Scene]:
    """The scenes of a role by name, in the order in which they are played."""
    return {**(_OFFERING if role is AgentRole.PREFILL else _FETCHING), **_COMMON}


def play(
    role: AgentRole,
    command: Sequence[str],
    *,
    log: Path,
    patience_s: float = 10.0,
    start_s: float = START_S,
    only: Collection[str] = (),
    on_scene: Callable[[str], None] = lambda _: None,
) -> list[RuleOutcome]:
    """What came of each rule; ``only`` names the scenes that are played, all when it is empty.

    The engine's stderr goes to ``log``. Raises `ConfigError` when the command cannot be started.
    """
    book = Book()
    with open_stage(role, command, book, log=log, patience_s=patience_s, start_s=start_s) as stage:
        for name, scene in scenes_of(role).items():
            if not only or name in only:
                on_scene(name)
                if not _play_scene(stage, scene):
                    break
        stage.engine.stop()
        stage.check_once()
    own = PREFILL if role is AgentRole.PREFILL else DECODE
    return book.outcomes((*BOTH, *own))


def _play_scene(stage: Stage, scene: Scene) -> bool:
    """Play one; False when the engine does not even register.

    An engine that did something wrong is started anew, so that each scene stands alone.
    """
    if not stage.engine.is_alive:
        stage.engine.stop()
        started = stage.start()
        late = f"not all sessions registered: {stage.engine.last_words()}"
        if not stage.book.expect("register.sessions", started, late):
            return False
    before = stage.book.num_wrong
    with suppress(SceneEndedError):
        scene(stage)
    stage.check_once()
    if stage.book.num_wrong > before:
        stage.engine.stop()
        stage.agent.hang_up()
    return True


def late(stage: Stage) -> None:
    """The answer is late, and was asked for once all the same."""
    job, asked = _held(stage)
    stage.agent.play(LATE_S)
    stage.agent.answer(asked)
    ended = stage.goes_on(job)
    stage.book.expect("requests.late_answer", ended, f"request {job.name} did not go on")
    _asked_once(stage, job)


def _asked_once(stage: Stage, job: Job) -> None:
    num_asked = len(stage.desk.requests(job))
    seen = f"request {job.name} was asked for {num_asked} times"
    stage.book.expect("requests.once", num_asked <= 1, seen)


def other_order(stage: Stage) -> None:
    """Two requests wait at once; the second is answered first, with a refusal."""
    with stage.agent.holding(stage.desk.op):
        jobs = [stage.desk.begin(20), stage.desk.begin(30)]
        stage.agent.until(lambda: all(map(stage.desk.requests, jobs)), CONCURRENT_S)
        asked = [one for job in jobs for one in stage.desk.requests(job)]
    first, second = jobs
    for one in asked[1:]:
        stage.agent.refuse(one, "draining")
    for one in asked[:1]:
        stage.agent.answer(one)
    ended = stage.goes_on(first)
    seen = f"request {first.name} did not go on, whose answer had more fields"
    stage.book.expect("requests.unknown_field", ended, seen)
    if len(asked) < len(jobs):
        stage.book.untried("requests.order", "the engine has one request at a time")
        stage.goes_on(second)
        return
    told = stage.wait(lambda: stage.engine.told("refused", second.name))
    others = stage.engine.told("refused", first.name)
    seen = "the answer to one of two requests was taken for that of the other"
    stage.book.expect("requests.order", ended and told and not others, seen)


def unknown_code(stage: Stage) -> None:
    """A refusal that this version does not know ends that request, and no other."""
    job, asked = _held(stage)
    stage.agent.refuse(asked, "moon_phase", phase=0.25)
    told = stage.wait(lambda: stage.engine.told("refused", job.name))
    stage.book.expect("requests.unknown_code", told, f"no line `refused {job.name} ...`")
    after = stage.desk.begin(20)
    ended = stage.goes_on(after)
    stage.book.expect("requests.unknown_code", ended, "the next request did not go on")


def busy(stage: Stage) -> None:
    """A busy agent is asked again, when it said, with a new id."""
    job, asked = _held(stage)
    refused_at = time.monotonic()
    stage.agent.refuse(asked, "busy", retry_after_s=RETRY_AFTER_S)
    again = stage.wait(lambda: len(stage.desk.requests(job)) > 1)
    if not stage.book.expect("requests.busy", again, f"request {job.name} was not asked again"):
        return
    pause_s = stage.desk.requests(job)[1].at - refused_at
    early = f"asked again after {pause_s:.2f} s, `retry_after_s` is {RETRY_AFTER_S:g}"
    stage.book.expect("requests.busy", pause_s >= RETRY_AFTER_S / 2, early)
    ended = stage.goes_on(job)
    stage.book.expect("requests.busy", ended, f"request {job.name} did not go on")


def _held(stage: Stage) -> tuple[Job, Asked]:
    """A new job and its request, which is not answered yet."""
    with stage.agent.holding(stage.desk.op):
        job = stage.desk.begin(20)
        asked = stage.asked(job)
    return job, asked


def many(stage: Stage) -> None:
    """Thousands of notices at once, of a kind that no version has; what counts comes last."""
    job = stage.taken(stage.desk.begin(20))
    for number in range(NUM_MANY):
        stage.agent.notify("weather", {"number": number, "wind": "a later version's"})
    seen = f"request {job.name} did not go on after {NUM_MANY:,} unknown notices"
    stage.book.expect("notices.unknown", stage.over(job), seen)


def silence(stage: Stage) -> None:
    """The agent is stopped, and goes on: as the same process, with all that it had."""
    before = len(stage.agent.log)
    stage.agent.silent = True
    job = stage.desk.begin(20)
    stage.agent.play(SILENT_S)
    pings = stage.agent.asked(Ping.op, before)
    stage.book.expect("requests.ping", bool(pings), f"no `ping` in {SILENT_S:g} s of silence")
    _asked_once(stage, job)
    stage.agent.answer_silence()
    ended = stage.goes_on(job)
    stage.book.expect("ends.silence", ended, f"request {job.name} did not go on")


def hang_up(stage: Stage) -> None:
    """The agent ends all attach connections, and lives on."""
    job = _begun(stage)
    files = stage.agent.files
    stage.agent.hang_up()
    if _comes_back(stage, job, "ends.hang_up", files) and isinstance(stage.desk, FetchDesk):
        stage.use_all_blocks("fetch.lost_blocks")


def new_agent(stage: Stage) -> None:
    """The agent dies, and is started again."""
    job = _begun(stage)
    stage.agent.close()
    time.sleep(AWAY_S)
    stage.agent.open()
    _comes_back(stage, job, "ends.new_agent", set())


def stop(stage: Stage) -> None:
    """The engine is told to end."""
    stage.engine.hush()
    in_time = stage.wait(lambda: not stage.engine.is_alive)
    status = stage.engine.stop(0.0)
    seen = f"exit status {status}" if in_time else f"it runs on for {stage.patience_s:g} s"
    stage.book.expect("ends.stop", in_time and status == 0, seen)


def _begun(stage: Stage) -> Job:
    """A job that the engine has begun: an offer without its ticket may not be told."""
    job = stage.taken(stage.desk.begin(20))
    if isinstance(stage.desk, OfferDesk):
        stage.wait(lambda: stage.engine.told("ticket", job.name))
    stage.agent.play(AWAY_S)
    return job


def _comes_back(stage: Stage, job: Job, rule: str, files: set[tuple[int, int]]) -> bool:
    """The engine registers anew; one that ends instead is started again, as a supervisor does.

    ``files`` are those of its memory that the agent may still write into.
    """
    back = stage.registered()
    ended = not back and not stage.engine.is_alive
    if ended:
        stage.engine.stop()
        back = stage.start()
    if not stage.book.expect(rule, back, "it did not register again in time"):
        return False
    stage.desk.lost(job, same_memory=bool(files & stage.agent.files))
    if not ended:
        told = stage.wait(lambda: stage.desk.told_over(job))
        word = f"no line `{stage.desk.over_word} {job.name} ...` though its agent is gone"
        stage.book.expect("ends.told", told, word)
    after = stage.desk.begin(20)
    works = stage.goes_on(after)
    stage.book.expect(rule, works, "the next request did not go on")
    return True


def sizes(stage: Stage) -> None:
    """Sealed offers: one token, whole blocks, parts of blocks, none."""
    block, desk = stage.desk.block_size(), _offers(stage)
    window = max(desk.windows(), default=block)
    for num_tokens in (1, block - 1 or 1, block, 2 * block + 1, window + 2 * block + 3, 0):
        stage.over(stage.taken(desk.begin(num_tokens)))


def grows(stage: Stage) -> None:
    """Open offers: from nothing, within a block, over several blocks."""
    block, desk = stage.desk.block_size(), _offers(stage)
    for counts in ((0, 2, block + 1, block + 2, 3 * block), (block, 2 * block)):
        job = stage.taken(desk.begin(*counts))
        sealed = stage.wait(partial(desk.is_sealed, job))
        stage.book.expect("offer.sealed", sealed, f"request {job.name} of {counts} was not sealed")
        have = desk.num_ready.get(job.name)
        grown = f"request {job.name}: {have} tokens were announced of {job.num_tokens}"
        stage.book.expect("offer.extend", have == job.num_tokens, grown)
        stage.over(job)


def offered_blocks(stage: Stage) -> None:
    """Of several offers one is withdrawn: the blocks of all stay until `released`."""
    desk, block = _offers(stage), stage.desk.block_size()
    first, *others = (desk.begin(block + 1), desk.begin(block), desk.begin(2 * block))
    stage.taken(first, *others)
    stage.wait(lambda: stage.engine.told("ticket", first.name))
    before = len(stage.agent.log)
    stage.engine.say("withdraw", first.name)
    withdrawn = stage.wait(lambda: stage.agent.asked(WithdrawOffer.op, before))
    stage.book.expect("offer.answered", withdrawn, f"no `withdraw` for request {first.name}")
    stage.use_all_blocks("offer.reused")
    desk.release(first, Outcome.WITHDRAWN)
    stage.seen_over(first)
    stage.over(*others)
    stage.use_all_blocks("offer.reused")


def _offers(stage: Stage) -> OfferDesk:
    if not isinstance(stage.desk, OfferDesk):
        raise TypeError("a scene of prefill engines")
    return stage.desk


def shapes(stage: Stage) -> None:
    """From the first token and from within a block, over windows, none at all."""
    block = stage.desk.block_size()
    window = max(stage.desk.windows(), default=block)
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
        stage.over(stage.taken(stage.desk.begin(num_tokens, first_token=first_token)))


def counts(stage: Stage) -> None:
    """Wrong numbers lie there at first, then right ones land; of the next fetch some stay wrong."""
    desk, block = _fetches(stage), stage.desk.block_size()
    job = stage.taken(desk.begin(2 * block))
    stage.agent.play(EARLY_S)
    desk.land(job)
    stage.agent.play(EARLY_S)
    told = desk.told_over(job)
    stage.book.expect("fetch.completed", not told, f"`fetched {job.name}` before the answer came")
    ended = stage.over(job) and desk.told_over(job)[0] == "completed 0"
    stage.book.expect("fetch.completed", ended, f"told was {desk.told_over(job)}")
    _spoilt(stage)


def _spoilt(stage: Stage) -> None:
    desk = _fetches(stage)
    job = stage.taken(desk.begin(stage.desk.block_size()))
    desk.land(job)
    wrong = f"completed {desk.spoil(job, NUM_SPOILT)}"
    desk.end(job, Outcome.COMPLETED)
    stage.wait(lambda: desk.told_over(job))
    told = desk.told_over(job)
    seen = f"told was {told} where `{wrong}` is right: the engine does not read its memory"
    stage.book.expect("fetch.numbers", told == [wrong], seen)


def failed(stage: Stage) -> None:
    """Fetches that fail, with known and unknown codes."""
    desk = _fetches(stage)
    for code in ("peer_lost", "moon_phase"):
        job = stage.taken(desk.begin(20))
        desk.land(job)
        desk.end(job, Outcome.FAILED, code=code)
        _told(stage, job, "fetch.failed", "failed")


def fetched_blocks(stage: Stage) -> None:
    """Blocks that a transfer still writes into, while the engine needs blocks."""
    desk = _fetches(stage)
    job, cancelled = desk.begin(20), desk.begin(20)
    stage.taken(job, cancelled)
    desk.end(job, Outcome.FAILED, blocks_free=False, code="timeout")
    _told(stage, job, "fetch.failed", "failed")
    stage.engine.say("cancel", cancelled.name)
    came = stage.wait(lambda: cancelled.handoff_id in desk.cancelled)
    stage.book.expect("fetch.cancel", came, f"no `cancel` for request {cancelled.name}")
    desk.end(cancelled, Outcome.CANCELLED, blocks_free=False, code="cancelled")
    _told(stage, cancelled, "fetch.cancel", "cancelled")
    stage.use_all_blocks("fetch.blocks")
    desk.free(job)
    desk.free(cancelled)
    stage.use_all_blocks("fetch.reused")


def _told(stage: Stage, job: Job, rule: str, word: str) -> None:
    stage.wait(lambda: stage.desk.told_over(job))
    told = stage.desk.told_over(job)
    right = len(told) == 1 and told[0].startswith(word)
    stage.book.expect(rule, right, f"request {job.name}: {told} instead of `{word}`")


def _fetches(stage: Stage) -> FetchDesk:
    if not isinstance(stage.desk, FetchDesk):
        raise TypeError("a scene of decode engines")
    return stage.desk


_COMMON: Mapping[str, Scene] = {
    "late": late,
    "other_order": other_order,
    "unknown_code": unknown_code,
    "busy": busy,
    "many": many,
    "silence": silence,
    "hang_up": hang_up,
    "new_agent": new_agent,
    "stop": stop,
}
_OFFERING: Mapping[str, Scene] = {"sizes": sizes, "grows": grows, "blocks": offered_blocks}
_FETCHING: Mapping[str, Scene] = {
    "shapes": shapes,
    "counts": counts,
    "failed": failed,
    "blocks": fetched_blocks,
}
