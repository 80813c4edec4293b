"""Notices that come twice, before their turn, in thousands, and of unknown kinds."""

from kvbus.conform.sessions import Session
from kvbus.conform.stage import Stage
from kvbus.protocol.message import Message

NUM_MANY = 5_000
EARLY_S = 0.1


def twice(stage: Stage) -> None:
    """A notice whose acknowledgement was lost comes again, and is acknowledged again."""
    job = stage.desk.begin(20)
    if not (stage.accepted(job) and stage.over(job)):
        stage.never_asked(job)
        return
    for session in _receivers(stage):
        seq = session.outbox.last_seq
        session.outbox.pending.add(seq)
        for _ in range(3):
            stage.agent.send_notice(session, seq)
    stage.wait(stage.agent.are_acknowledged)
    silent = "one that came before was not acknowledged again"
    stage.book.expect("notices.ack", stage.agent.are_acknowledged(), silent)


def early(stage: Stage) -> None:
    """Of three notices the second comes first, then the third, then the first."""
    jobs = [stage.desk.begin(20) for _ in range(3)]
    if not stage.accepted(*jobs):
        stage.never_asked(*jobs)
        return
    notices = [stage.desk.over_notice(job) for job in jobs]
    seqs = [(session, _write_down(stage, session, notices)) for session in _receivers(stage)]
    for index in (1, 2):
        for session, written in seqs:
            stage.agent.send_notice(session, written[index])
    stage.agent.play(EARLY_S)
    told = [job.name for job in jobs if stage.desk.told_over(job)]
    stage.book.expect("notices.order", not told, f"{told} told before the notice before them came")
    for index in (0, 1, 2):
        for session, written in seqs:
            stage.agent.send_notice(session, written[index])
    stage.seen_over(*jobs)
    order = [int(line[1]) for line in stage.engine.lines if line[0] == stage.desk.over_word]
    names = [job.name for job in jobs]
    stage.book.expect(
        "notices.order", [one for one in order if one in names] == names, f"told in order {order}"
    )


def many(stage: Stage) -> None:
    """Thousands at once, of a kind that no version has; one that counts comes last."""
    job = stage.desk.begin(20)
    if not stage.accepted(job):
        stage.never_asked(job)
        return
    for number in range(NUM_MANY):
        stage.agent.notify("weather", {"number": number, "wind": "a later version's"})
    stage.over(job)


def _receivers(stage: Stage) -> list[Session]:
    return [session for session in stage.agent.sessions if session.gets_notices]


def _write_down(stage: Stage, session: Session, notices: list[tuple[str, Message]]) -> list[int]:
    return [session.outbox.add(stage.agent.boot, op, body) for op, body in notices]
