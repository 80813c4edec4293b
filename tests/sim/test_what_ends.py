"""What is decided when an agent, a connection or an engine fails at one moment, on virtual time.

The services are the product's own; each world ends with nothing held anywhere, as its engines see.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvbus.protocol import AgentRole, Outcome
from tests.sim.cluster import Cluster, Fault, FaultKind, Settings, cluster_of
from tests.sim.handoffs import Handoff, Plan

P, D = AgentRole.PREFILL, AgentRole.DECODE
LEASE_S, DRAIN_S, QUARANTINE_S = 3.0, 5.0, 20.0
FAULT_S, LONG_S = 10.0, 60.0
NUM_TRIED = 8
SOON_S = 1.0
PART_S = 0.5
"""So long takes each part of a read."""
GROWS = Plan(num_tokens=16, num_pieces=2, gap_s=2 * LONG_S, timeout_s=20.0, ttl_s=30.0)
"""Its second half comes so late that a fetch of it waits."""
COMMON = {"heartbeat_s": 1.0, "drain_timeout_s": DRAIN_S}
PREFILL = {**COMMON, "late_read_s": 5.0}
DECODE = {
    **COMMON,
    "lease_s": LEASE_S,
    "request_timeout_s": 2.0,
    "quarantine_timeout_s": QUARANTINE_S,
}

pytestmark = pytest.mark.parametrize("seed", range(3))


@contextmanager
def world_of(seed: int, *, part_s: float = 300e-6, **decode: float) -> Iterator[Cluster]:
    """A prefill and a decode agent with an engine each; in the end nothing is held anywhere."""
    settings = Settings(prefill_config=PREFILL, decode_config={**DECODE, **decode}, part_s=part_s)
    with cluster_of(settings, seed) as cluster:
        yield cluster
        cluster.settle()


def happen(cluster: Cluster, kind: FaultKind, role: AgentRole = P, lasts_s: float = SOON_S) -> None:
    """Now, and for so long."""
    cluster.suffer([Fault(kind=kind, role=role, lasts_s=lasts_s)])


def count(cluster: Cluster, role: AgentRole, name: str) -> int:
    """What an agent has of something."""
    return int(cluster.agent(role).service.counts()[name])


def time_until(cluster: Cluster, holds: Callable[[], bool]) -> float:
    """How long it takes until it holds."""
    began = cluster.world.now
    cluster.until(holds)
    return cluster.world.now - began


def end_of(cluster: Cluster, handoff: Handoff) -> tuple[str, float]:
    """How its fetch ends, and after how long."""
    took_s = time_until(cluster, lambda: handoff.is_ended)
    return f"{handoff.ended_as} {handoff.code}".strip(), took_s


def works(cluster: Cluster) -> bool:
    """Whether a handoff completes."""
    return end_of(cluster, cluster.give(Plan()))[0] == "completed"


def read(cluster: Cluster) -> Handoff:
    """A handoff whose bytes are on their way."""
    handoff = cluster.give(Plan(num_tokens=64, timeout_s=30.0))
    cluster.until(lambda: cluster.agent(D).agent.transport.stats().outstanding_reads > 0)
    return handoff


WAITING = {
    "prefill agent frozen": (FaultKind.FREEZE_AGENT, P, "failed lease_expired", Outcome.EXPIRED),
    "prefill agent crashed": (FaultKind.CRASH_AGENT, P, "failed peer_lost", None),
    "prefill agent drained": (FaultKind.DRAIN_AGENT, P, "failed draining", Outcome.WITHDRAWN),
    "prefill engine crashed": (FaultKind.CRASH_ENGINE, P, "failed engine_lost", None),
    "decode agent frozen": (FaultKind.FREEZE_AGENT, D, "failed lease_expired", Outcome.EXPIRED),
    "decode agent crashed": (FaultKind.CRASH_AGENT, D, "lost", Outcome.EXPIRED),
    "decode agent drained": (FaultKind.DRAIN_AGENT, D, "failed draining", Outcome.EXPIRED),
    "decode engine crashed": (FaultKind.CRASH_ENGINE, D, "lost", Outcome.EXPIRED),
    "the way between them cut": (FaultKind.CUT, P, "failed lease_expired", Outcome.EXPIRED),
}
"""What happens to whom while a fetch waits for tokens: how that ends, and the offer after it."""
ENDS_BY_S = {
    FaultKind.CRASH_AGENT: SOON_S,
    FaultKind.CRASH_ENGINE: SOON_S,
    FaultKind.DRAIN_AGENT: DRAIN_S + SOON_S,
    FaultKind.FREEZE_AGENT: FAULT_S + SOON_S,
    FaultKind.CUT: LEASE_S + SOON_S,
}


@pytest.mark.parametrize("fault", WAITING)
def test_what_fails_while_a_fetch_waits_ends_it_by_name_and_all_works_after(
    seed: int, fault: str
) -> None:
    kind, role, ends, offer = WAITING[fault]
    with world_of(seed) as world:
        assert works(world)
        handoff = world.give(GROWS)
        world.until(lambda: count(world, P, "leases") == 1)
        world.run(SOON_S)

        happen(world, kind, role, FAULT_S)
        end, took_s = end_of(world, handoff)
        world.until(lambda: handoff.released)

        assert end == ends
        assert took_s < ENDS_BY_S[kind]
        assert handoff.outcome == offer
        world.run(FAULT_S)
        assert works(world)


def test_the_last_reply_is_lost_with_its_connection_and_the_fetch_completes(seed: int) -> None:
    with world_of(seed) as world:
        handoff = world.give(Plan())
        world.until(lambda: handoff.outcome is Outcome.COMPLETED)
        was_told = handoff.is_ended

        happen(world, FaultKind.BREAK)

        assert not was_told
        assert end_of(world, handoff)[0] == "completed"


@pytest.mark.parametrize(("grace_s", "ends"), [(5.0, "completed"), (0.01, "failed timeout")])
def test_a_yes_that_comes_after_the_deadline_counts_in_the_grace_only(
    seed: int, grace_s: float, ends: str
) -> None:
    deadline_s, late_s = 4.0, 0.5
    with world_of(seed, confirm_grace_s=grace_s) as world:
        handoff = world.give(Plan(timeout_s=deadline_s))
        world.until(lambda: handoff.outcome is Outcome.COMPLETED)

        happen(world, FaultKind.CUT, lasts_s=deadline_s + late_s)

        end, took_s = end_of(world, handoff)
        assert end == ends
        assert took_s > deadline_s


def test_fetches_from_a_silent_agent_fail_at_once_after_some_that_were_not_answered(
    seed: int,
) -> None:
    with world_of(seed) as world:
        assert works(world)
        tried = [
            world.give(Plan(fetch_after_s=1.0 + 3 * number, timeout_s=6.0, ttl_s=2 * LONG_S))
            for number in range(NUM_TRIED)
        ]
        world.until(lambda: count(world, P, "offers") == NUM_TRIED)
        happen(world, FaultKind.FREEZE_AGENT, lasts_s=LONG_S)

        ends = [end_of(world, one)[0] for one in tried]

        assert ends[:2] == ["failed timeout"] * 2
        assert "refused peer_unreachable" in ends
        assert set(ends) == {"failed timeout", "refused peer_unreachable"}
        world.run(LONG_S)
        assert works(world)


@pytest.mark.parametrize(
    ("frozen_s", "freed_by_s"),
    [(15.0, 15.0), (LONG_S, LEASE_S + QUARANTINE_S)],
    ids=["goes on", "never ends"],
)
def test_blocks_are_withheld_from_a_read_of_a_frozen_agent_until_nothing_can_land(
    seed: int, frozen_s: float, freed_by_s: float
) -> None:
    with world_of(seed, part_s=PART_S) as world:
        handoff = read(world)

        happen(world, FaultKind.FREEZE_AGENT, lasts_s=frozen_s)
        end, took_s = end_of(world, handoff)
        were_free = handoff.is_freed
        freed_s = took_s + time_until(world, lambda: handoff.is_freed)

        assert end == "failed lease_expired"
        assert took_s < LEASE_S + SOON_S
        assert not were_free
        assert freed_by_s - SOON_S < freed_s < freed_by_s + 3 * SOON_S


@pytest.mark.parametrize(
    ("gives_up", "offer"), [(True, Outcome.WITHDRAWN), (False, Outcome.EXPIRED)]
)
def test_a_decode_engine_that_cancels_frees_the_offer_only_if_it_says_so(
    seed: int, gives_up: bool, offer: Outcome
) -> None:
    with world_of(seed) as world:
        handoff = world.give(replace(GROWS, cancel_after_s=1.0, gives_up_offer=gives_up))

        assert end_of(world, handoff)[0] == "cancelled cancelled"
        assert (time_until(world, lambda: handoff.released) < SOON_S) == gives_up
        assert handoff.outcome is offer


@pytest.mark.parametrize("role", [P, D])
def test_an_engine_that_is_frozen_hears_how_its_handoff_ended_when_it_goes_on(
    seed: int, role: AgentRole
) -> None:
    with world_of(seed, part_s=PART_S) as world:
        handoff = read(world)

        happen(world, FaultKind.FREEZE_ENGINE, role, lasts_s=LONG_S)
        world.until(lambda: not count(world, D, "fetches") and not count(world, P, "offers"))
        were_told = {P: handoff.released, D: handoff.is_ended}
        world.until(lambda: handoff.released and handoff.is_ended, within_s=2 * LONG_S)

        assert not were_told[role]
        assert (handoff.ended_as, handoff.outcome) == ("completed", Outcome.COMPLETED)


def test_an_engine_that_comes_back_hears_nothing_of_the_one_before(seed: int) -> None:
    """A notice of what is over for its engine is a violation."""
    with world_of(seed, part_s=PART_S) as world:
        handoff = read(world)

        happen(world, FaultKind.FREEZE_AGENT, lasts_s=15.0)
        happen(world, FaultKind.CRASH_ENGINE, D, lasts_s=0.1)

        assert end_of(world, handoff)[0] == "lost"
        world.run(30.0)
        assert works(world)
