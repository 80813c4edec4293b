"""What only a decode engine does: fetches of all shapes, KV that counts, blocks that come back."""

from kvbus.conform.desk import Job
from kvbus.conform.fetches import FetchDesk
from kvbus.conform.stage import Stage
from kvbus.protocol.engine import Outcome

EARLY_S = 0.5
NUM_SPOILT = 3


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
        job = stage.desk.begin(num_tokens, first_token=first_token)
        if not stage.accepted(job):
            stage.never_asked(job)
            return
        stage.over(job)


def counts(stage: Stage) -> None:
    """Wrong numbers lie there at first, and right ones at the end; of the next some stay wrong."""
    desk, block = _desk(stage), stage.desk.block_size()
    job = desk.begin(2 * block)
    if not stage.accepted(job):
        stage.never_asked(job)
        return
    stage.agent.play(EARLY_S)
    told = desk.told_over(job)
    stage.book.expect("fetch.completed", not told, f"`fetched {job.name}` before the notice came")
    ended = stage.over(job) and desk.told_over(job)[0] == "completed 0"
    stage.book.expect("fetch.completed", ended, f"told was {desk.told_over(job)}")
    _spoilt(stage)


def _spoilt(stage: Stage) -> None:
    desk = _desk(stage)
    job = desk.begin(stage.desk.block_size())
    if not stage.accepted(job):
        stage.never_asked(job)
        return
    notice = desk.over_notice(job)
    wrong = f"completed {desk.spoil(job, NUM_SPOILT)}"
    stage.agent.notify(*notice)
    stage.wait(lambda: desk.told_over(job))
    told = desk.told_over(job)
    seen = f"told was {told} where `{wrong}` is right: the engine does not read its memory"
    stage.book.expect("fetch.numbers", told == [wrong], seen)


def failed(stage: Stage) -> None:
    """Fetches that fail, with known and unknown codes."""
    desk = _desk(stage)
    for code in ("peer_lost", "moon_phase"):
        job = desk.begin(20)
        if not stage.accepted(job):
            stage.never_asked(job)
            return
        desk.write(job, job.name)
        stage.agent.notify(*desk.ended(job, Outcome.FAILED, blocks_free=True, code=code))
        _told(stage, job, "fetch.failed", "failed")


def blocks(stage: Stage) -> None:
    """Blocks that a transfer still writes into, while the engine needs blocks."""
    desk = _desk(stage)
    job, cancelled = desk.begin(20), desk.begin(20)
    if not stage.accepted(job, cancelled):
        stage.never_asked(job, cancelled)
        return
    stage.agent.notify(*desk.ended(job, Outcome.FAILED, blocks_free=False, code="timeout"))
    _told(stage, job, "fetch.failed", "failed")
    stage.engine.say("cancel", cancelled.name)
    came = stage.wait(lambda: cancelled.handoff_id in desk.cancelled)
    stage.book.expect("fetch.cancel", came, f"no `cancel` for request {cancelled.name}")
    stage.agent.notify(
        *desk.ended(cancelled, Outcome.CANCELLED, blocks_free=False, code="cancelled")
    )
    _told(stage, cancelled, "fetch.cancel", "cancelled")
    stage.use_all_blocks("fetch.blocks")
    stage.agent.notify(*desk.freed(job))
    stage.agent.notify(*desk.freed(cancelled))
    stage.wait(stage.agent.are_acknowledged)
    stage.use_all_blocks("fetch.reused")


def _told(stage: Stage, job: Job, rule: str, word: str) -> None:
    stage.wait(lambda: stage.desk.told_over(job))
    told = stage.desk.told_over(job)
    right = len(told) == 1 and told[0].startswith(word)
    stage.book.expect(rule, right, f"request {job.name}: {told} instead of `{word}`")


def _desk(stage: Stage) -> FetchDesk:
    if not isinstance(stage.desk, FetchDesk):
        raise TypeError("a scene of decode engines")
    return stage.desk
