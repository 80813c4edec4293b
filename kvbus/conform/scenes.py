"""Scenes of both roles, and their sequence."""

import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbus.conform import fetches, offers
from kvbus.conform.engine_process import EngineCommand
from kvbus.conform.fetches import FetchStage
from kvbus.conform.offers import OfferStage
from kvbus.conform.played_agent import PlayedAgent
from kvbus.conform.rules import BOTH, Book, RuleOutcome
from kvbus.conform.session import EngineRequest
from kvbus.conform.stage import EngineStage, Job, SceneEndedError
from kvbus.protocol.engine import AgentRole, Ping

Scene = Callable[[Any], None]

PATIENCE_S, START_S = 10.0, 60.0
LATE_S, SILENT_S, AWAY_S = 3.0, 4.0, 0.5
RETRY_AFTER_S, CONCURRENT_S = 0.5, 3.0
NUM_MANY = 5_000


def late(stage: EngineStage) -> None:
    job, request = _held(stage)
    stage.agent.play(LATE_S)
    stage.agent.answer(request)
    ended = stage.completes(job)
    stage.book.expect("requests.late_answer", ended, f"request {job.name} did not complete")
    _requested_once(stage, job)


def other_order(stage: EngineStage) -> None:
    with stage.agent.holding(stage.op):
        first, second = stage.begin(20), stage.begin(30)
        stage.agent.until(lambda: stage.requests(first) and stage.requests(second), CONCURRENT_S)
        requests = stage.requests(first) + stage.requests(second)
    for one in requests[1:]:
        stage.agent.refuse(one, "draining")
    for one in requests[:1]:
        stage.agent.answer(one)
    ended = stage.completes(first)
    seen = f"request {first.name} did not complete: its answer had unknown fields"
    stage.book.expect("requests.unknown_field", ended, seen)
    if len(requests) < 2:
        stage.book.untried("requests.order", "the engine has one request at a time")
        stage.completes(second)
        return
    refused = stage.wait(lambda: stage.engine.reported("refused", second.name))
    others = stage.engine.reported("refused", first.name)
    seen = "the answer to one of two requests was taken for that of the other"
    stage.book.expect("requests.order", ended and refused and not others, seen)


def unknown_code(stage: EngineStage) -> None:
    job, request = _held(stage)
    stage.agent.refuse(request, "moon_phase", phase=0.25)
    refused = stage.wait(lambda: stage.engine.reported("refused", job.name))
    stage.book.expect("requests.unknown_code", refused, f"no line `refused {job.name} ...`")
    ended = stage.completes(stage.begin(20))
    stage.book.expect("requests.unknown_code", ended, "the next request did not complete")


def busy(stage: EngineStage) -> None:
    job, request = _held(stage)
    refused_at = time.monotonic()
    stage.agent.refuse(request, "busy", retry_after_s=RETRY_AFTER_S)
    again = stage.wait(lambda: len(stage.requests(job)) > 1)
    if not stage.book.expect("requests.busy", again, f"request {job.name} was not sent again"):
        return
    pause_s = stage.requests(job)[1].at - refused_at
    early = f"sent again after {pause_s:.2f} s, `retry_after_s` is {RETRY_AFTER_S:g}"
    stage.book.expect("requests.busy", pause_s >= RETRY_AFTER_S / 2, early)
    ended = stage.completes(job)
    stage.book.expect("requests.busy", ended, f"request {job.name} did not complete")


def many(stage: EngineStage) -> None:
    job = stage.taken(stage.begin(20))
    for number in range(NUM_MANY):
        stage.agent.notify("weather", {"number": number, "wind": "a later version's"})
    seen = f"request {job.name} did not complete after {NUM_MANY:,} unknown notices"
    stage.book.expect("notices.unknown", stage.end_well(job), seen)


def silence(stage: EngineStage) -> None:
    before = len(stage.agent.log)
    stage.agent.silent = True
    job = stage.begin(20)
    stage.agent.play(SILENT_S)
    pings = stage.agent.requests_of(Ping.op, before)
    stage.book.expect("requests.ping", bool(pings), f"no `ping` in {SILENT_S:g} s of silence")
    _requested_once(stage, job)
    stage.agent.silent = False
    ended = stage.completes(job)
    stage.book.expect("ends.silence", ended, f"request {job.name} did not complete")


def hang_up(stage: EngineStage) -> None:
    """The agent closes all attach connections but may still write into the memory."""
    job, files = _begun(stage), stage.agent.files
    stage.agent.hang_up()
    if _reconnects(stage, job, "ends.hang_up", files) and isinstance(stage, FetchStage):
        stage.use_all_blocks("fetch.lost_blocks")


def new_agent(stage: EngineStage) -> None:
    job = _begun(stage)
    stage.agent.close()
    time.sleep(AWAY_S)
    stage.agent.open()
    _reconnects(stage, job, "ends.new_agent", set())


def stop(stage: EngineStage) -> None:
    stage.engine.request_end()
    in_time = stage.wait(lambda: not stage.engine.is_alive)
    status = stage.engine.stop(0.0)
    seen = f"exit status {status}" if in_time else f"it still runs after {stage.patience_s:g} s"
    stage.book.expect("ends.stop", in_time and status == 0, seen)


def _held(stage: EngineStage) -> tuple[Job, EngineRequest]:
    with stage.agent.holding(stage.op):
        job = stage.begin(20)
        return job, stage.request_of(job)


def _requested_once(stage: EngineStage, job: Job) -> None:
    num_sent = len(stage.requests(job))
    seen = f"request {job.name} was sent {num_sent} times"
    stage.book.expect("requests.once", num_sent <= 1, seen)


def _begun(stage: EngineStage) -> Job:
    job = stage.taken(stage.begin(20))
    if isinstance(stage, OfferStage):
        stage.wait(lambda: stage.engine.reported("ticket", job.name))
    stage.agent.play(AWAY_S)
    return job


def _reconnects(stage: EngineStage, job: Job, rule: str, files: set[tuple[int, int]]) -> bool:
    """Restart an engine that exits, as a supervisor would."""
    back = stage.registered()
    ended = not back and not stage.engine.is_alive
    if ended:
        stage.engine.stop()
        back = stage.start()
    if not stage.book.expect(rule, back, "it did not register again in time"):
        return False
    stage.lose(job, same_memory=bool(files & stage.agent.files))
    if not ended:
        settled = stage.settle_lost(job)
        missing = f"no line `{stage.end_line} {job.name} ...` though its agent is gone"
        stage.book.expect("ends.told", settled, missing)
    works = stage.completes(stage.begin(20))
    stage.book.expect(rule, works, "the next request did not complete")
    return True


_STAGES: Mapping[AgentRole, type[EngineStage]] = {
    AgentRole.PREFILL: OfferStage,
    AgentRole.DECODE: FetchStage,
}
_OF_ROLE: Mapping[AgentRole, tuple[Scene, ...]] = {
    AgentRole.PREFILL: (offers.sizes, offers.grows, offers.blocks, offers.cells),
    AgentRole.DECODE: (fetches.shapes, fetches.counts, fetches.failed, fetches.blocks),
}
_OF_BOTH = (late, other_order, unknown_code, busy, many, silence, hang_up, new_agent, stop)


def scenes_of(role: AgentRole) -> dict[str, Scene]:
    return {scene.__name__: scene for scene in (*_OF_ROLE[role], *_OF_BOTH)}


def play(
    role: AgentRole,
    command: Sequence[str],
    *,
    log: Path | None = None,
    patience_s: float = PATIENCE_S,
    start_s: float = START_S,
    only: Collection[str] = (),
    on_scene: Callable[[str], None] = lambda _: None,
) -> list[RuleOutcome]:
    book, kind = Book(), _STAGES[role]
    with tempfile.TemporaryDirectory(prefix="kvbus-conform-") as path:
        folder = Path(path)
        log = log or folder / "engine.log"
        engine = EngineCommand(command, folder / "attach.sock", role, log)
        with PlayedAgent(folder, engine, role, book) as agent:
            stage = kind(agent, patience_s, start_s)
            try:
                for name, scene in scenes_of(role).items():
                    if not only or name in only:
                        on_scene(name)
                        if not _play_scene(stage, scene):
                            break
            finally:
                engine.stop()
            stage.check_once()
    return book.outcomes((*BOTH, *kind.rules))


def _play_scene(stage: EngineStage, scene: Scene) -> bool:
    """Return False if the engine does not register. Restart it after a violation."""
    if not stage.engine.is_alive:
        stage.engine.stop()
        started = stage.start()
        late = f"not all sessions registered: {stage.engine.silence_reason()}"
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
