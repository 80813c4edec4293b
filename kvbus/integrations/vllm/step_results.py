"""What the scheduler's side tells the workers in each step, by pickle: ids only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepResults:
    """Ids of requests: whose blocks were read, whose load is over, whose load has failed.

    ``started`` are the loads that began in this step, by request, and their fetch ids.
    """

    started: tuple[tuple[str, str], ...] = ()
    sent: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


NOTHING = StepResults()


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker's memory is: at the agent of ``peer_endpoint``, empty while there is none."""

    rank: int
    peer_endpoint: str
