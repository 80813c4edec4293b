"""An agent that is stopped for a while, hangs up, dies and comes back; and the engine's own end."""

import time

from kvbus.conform.desk import Job
from kvbus.conform.fetches import FetchDesk
from kvbus.conform.offers import OfferDesk
from kvbus.conform.stage import Stage
from kvbus.protocol.engine import Ping

SILENT_S = 4.0
AWAY_S = 0.5


def silence(stage: Stage) -> None:
    """The agent is stopped, and goes on: as the same process, with all that it had."""
    before = len(stage.agent.log)
    stage.agent.silent = True
    job = stage.desk.begin(20)
    stage.agent.play(SILENT_S)
    pings = stage.agent.asked(Ping.op, before)
    stage.book.expect("requests.ping", bool(pings), f"no `ping` in {SILENT_S:g} s of silence")
    for asked in stage.desk.requests(job):
        early = asked.bad_repeat()
        stage.book.expect("requests.repeats", not early, early)
    stage.agent.answer_silence()
    ended = stage.accepted(job) and stage.over(job)
    stage.book.expect("ends.silence", ended, f"request {job.name} did not go on")


def hang_up(stage: Stage) -> None:
    """The agent ends all attach connections, and lives on."""
    job = stage.desk.begin(20)
    if not _begun(stage, job):
        return
    files = stage.agent.files
    stage.agent.hang_up()
    if _comes_back(stage, job, "ends.hang_up", files) and isinstance(stage.desk, FetchDesk):
        stage.use_all_blocks("fetch.lost_blocks")


def new_agent(stage: Stage) -> None:
    """The agent dies, and is started again."""
    job = stage.desk.begin(20)
    if not _begun(stage, job):
        return
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


def _begun(stage: Stage, job: Job) -> bool:
    """Wait until the engine has the reply: a request whose reply is lost began nothing."""
    if not stage.accepted(job):
        stage.never_asked(job)
        return False
    if isinstance(stage.desk, OfferDesk):
        stage.wait(lambda: stage.engine.told("ticket", job.name))
    stage.agent.play(AWAY_S)
    return True


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
    works = stage.accepted(after) and stage.over(after)
    stage.book.expect(rule, works, "the next request did not go on")
    return True
