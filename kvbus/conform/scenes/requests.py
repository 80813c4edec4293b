"""Replies that are lost, late, twice, out of order, refused: one job each, of either role."""

import time

from kvbus.conform.desk import Job
from kvbus.conform.stage import Stage
from kvbus.protocol.engine import Outcome

NUM_TIMES = 4
RETRY_AFTER_S = 0.5
CONCURRENT_S = 3.0


def lost_reply(stage: Stage) -> None:
    """No reply comes until the fourth time that it is asked, and then three."""
    with stage.agent.holding(stage.desk.op):
        job = stage.desk.begin(20)
        asked = stage.asked(job)
        if asked is None:
            stage.never_asked(job)
            return
        stage.wait(lambda: len(asked.times) >= NUM_TIMES)
    came = f"`{asked.op}` came {len(asked.times)} times in {stage.patience_s:g} s without a reply"
    stage.book.expect("requests.repeats", len(asked.times) >= NUM_TIMES, came)
    early = asked.bad_repeat()
    stage.book.expect("requests.repeats", not early, early)
    stage.agent.answer(asked)
    stage.agent.reply_again(asked)
    stage.agent.reply_again(asked)
    ended = stage.accepted(job) and stage.over(job)
    stage.book.expect("requests.late_reply", ended, f"request {job.name} did not go on")
    again = f"request {job.name} was asked for {len(stage.desk.requests(job))} times"
    stage.book.expect("requests.late_reply", len(stage.desk.requests(job)) == 1, again)


def ended_first(stage: Stage) -> None:
    """The reply is lost, and comes again when the job is over."""
    with stage.agent.holding(stage.desk.op):
        job = stage.desk.begin(20)
        asked = stage.asked(job)
    if asked is None:
        stage.never_asked(job)
        return
    answer = stage.agent.answering[asked.op](asked)
    stage.desk.finish(job)
    stage.wait(stage.agent.are_acknowledged)
    if answer is not None:
        stage.agent.reply(asked, answer)
    stage.wait(lambda: stage.desk.told_over(job))
    told = stage.desk.told_over(job)
    right = len(told) == 1 and told[0].startswith(Outcome.COMPLETED)
    seen = f"request {job.name}: {told} instead of `completed`"
    stage.book.expect("notices.before_reply", right, seen)
    _goes_on(stage, "notices.before_reply")


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
    ended = stage.accepted(first) and stage.over(first)
    seen = f"request {first.name} did not go on, whose reply had more fields"
    stage.book.expect("requests.unknown_field", ended, seen)
    if len(asked) < len(jobs):
        stage.book.untried("requests.order", "the engine has one request at a time")
        if stage.accepted(second):
            stage.over(second)
        return
    told = stage.wait(lambda: stage.engine.told("refused", second.name))
    others = stage.engine.told("refused", first.name)
    seen = "the reply to one of two requests was taken for that of the other"
    stage.book.expect("requests.order", ended and told and not others, seen)


def unknown_code(stage: Stage) -> None:
    """A refusal that this version does not know ends that request, and no other."""
    with stage.agent.holding(stage.desk.op):
        job = stage.desk.begin(20)
        asked = stage.asked(job)
    if asked is None:
        stage.never_asked(job)
        return
    stage.agent.refuse(asked, "moon_phase", phase=0.25)
    told = stage.wait(lambda: stage.engine.told("refused", job.name))
    stage.book.expect("requests.unknown_code", told, f"no line `refused {job.name} ...`")
    _goes_on(stage, "requests.unknown_code")


def busy(stage: Stage) -> None:
    """A busy agent is asked again, when it said, with a new id."""
    with stage.agent.holding(stage.desk.op):
        job = stage.desk.begin(20)
        asked = stage.asked(job)
    if asked is None:
        stage.never_asked(job)
        return
    refused_at = time.monotonic()
    stage.agent.refuse(asked, "busy", retry_after_s=RETRY_AFTER_S)
    again = stage.wait(lambda: len(stage.desk.requests(job)) > 1)
    if not stage.book.expect("requests.busy", again, f"request {job.name} was not asked again"):
        return
    pause_s = stage.desk.requests(job)[1].times[0] - refused_at
    early = f"asked again after {pause_s:.2f} s, `retry_after_s` is {RETRY_AFTER_S:g}"
    stage.book.expect("requests.busy", pause_s >= RETRY_AFTER_S / 2, early)
    stage.book.expect("requests.busy", stage.over(job), f"request {job.name} did not go on")


def _goes_on(stage: Stage, rule: str) -> Job:
    """The next request is done as if nothing had been."""
    job = stage.desk.begin(20)
    ended = stage.accepted(job) and stage.over(job)
    stage.book.expect(rule, ended, "the next request did not go on")
    return job
