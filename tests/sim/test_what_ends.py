"""Failures of agents, connections and engines at chosen moments, on virtual time.

The services are the product's own; each world ends with nothing held anywhere, as its engines see.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest

from kvbus.protocol import AgentRole, Outcome
from kvbus_decode.remote_agent import REFUSED_S
from tests.sim.cluster import Cluster, D, Fault, FaultKind, P, Settings, cluster_of
from tests.sim.handoffs import Handoff, Plan
from tests.sim.worlds import HND, LEASE_S, QUARANTINE_S, cells, quick

FAULT_S, LONG_S, SOON_S, NUM_TRIED = 10.0, 60.0, 1.0, 8
SLOW = quick(part_s=0.5)
"""Each part of a read takes so long."""
PATIENT = quick(prefill_config={"max_lease_s": 600.0}, decode_config={"lease_s": 600.0})
GROWS = Plan(num_tokens=16, num_pieces=2, gap_s=2 * LONG_S, timeout_s=20.0, ttl_s=30.0)
"""Its second half comes so late that a fetch of it waits."""


def read(world: Cluster, *, timeout_s: float = 30.0) -> Handoff:
    """A handoff whose bytes are on their way."""
    handoff = world.give(Plan(num_tokens=64, timeout_s=timeout_s))
    world.until(lambda: world.agents[D, 0].data.num_jobs > 0)
    return handoff


def waiting(world: Cluster, plan: Plan = GROWS) -> Handoff:
    """A handoff whose fetch waits for tokens."""
    handoff = world.give(plan)
    world.until(lambda: world.count(P, "leases") == 1)
    return handoff


def begun(world: Cluster, plan: Plan) -> Handoff:
    """A handoff whose fetch is sent."""
    handoff = world.give(plan)
    world.until(lambda: handoff.asked is not None)
    return handoff


def released_s(world: Cluster, handoff: Handoff) -> float:
    return world.time_until(lambda: handoff.released)


def moments(world: Cluster, plan: Plan, *, least: int = 6) -> Iterator[Handoff]:
    """Handoffs, each one event further than the one before, until it is over by then.

    That takes ``least`` events or more.
    """
    for num_events in count():
        assert world.works()
        transfer_id = f"of-one-request-{num_events:02}" if plan.meets else None
        handoff = begun(world, replace(plan, transfer_id=transfer_id))
        world.after_events(num_events)
        if handoff.released and handoff.is_ended:
            assert num_events >= least
            return
        yield handoff


WAITING = {
    "prefill agent frozen": (FaultKind.FREEZE_AGENT, P),
    "prefill agent crashed": (FaultKind.CRASH_AGENT, P),
    "prefill agent drained": (FaultKind.DRAIN_AGENT, P),
    "decode agent frozen": (FaultKind.FREEZE_AGENT, D),
    "decode agent crashed": (FaultKind.CRASH_AGENT, D),
    "the way between them cut": (FaultKind.CUT, P),
}
"""Faults that pass while a fetch waits for tokens, which come later."""


@pytest.mark.parametrize("fault", WAITING)
def test_a_fetch_that_waits_outlives_what_its_offer_outlives(fault: str) -> None:
    kind, role = WAITING[fault]
    with cluster_of(quick()) as world:
        handoff = waiting(world, replace(GROWS, gap_s=1.5 * FAULT_S, timeout_s=4 * FAULT_S))
        world.suffer(Fault(kind, role=role, lasts_s=FAULT_S))
        assert world.end_of(handoff) == "completed"


CRASHING: dict[str, tuple[Settings, dict[str, Any]]] = {
    "sealed": (quick(), {}),
    "by cell": (cells(), {}),
    "by cell, packed": (cells(decode=HND), {}),
    "by cell, late messages": (cells(delay_s=2e-3), {}),
    "late messages": (quick(delay_s=2e-3), {}),
    "growing": (quick(), {"num_pieces": 3, "gap_s": 0.002, "chunk_tokens": 8}),
    "rendezvous": (quick(), {"meets": True}),
}


@pytest.mark.parametrize("name", CRASHING)
def test_a_fetch_completes_whenever_its_agent_crashes(name: str) -> None:
    settings, more = CRASHING[name]
    with cluster_of(settings) as world:
        for handoff in moments(world, Plan(num_tokens=24, timeout_s=LONG_S, ttl_s=LONG_S, **more)):
            world.suffer(Fault(FaultKind.CRASH_AGENT, role=D, lasts_s=0.1))
            assert world.end_of(handoff) == "completed"
            assert released_s(world, handoff) < 2 * SOON_S
            assert handoff.outcome is Outcome.COMPLETED


GONE = {
    "prefill engine": (FaultKind.CRASH_ENGINE, P, "failed engine_lost", None, SOON_S),
    "decode agent drained": (FaultKind.DRAIN_AGENT, D, "failed draining", Outcome.EXPIRED, 6.0),
    "decode engine": (FaultKind.CRASH_ENGINE, D, "lost", Outcome.EXPIRED, SOON_S),
}
"""Faults that end the offer or the fetch: its end, within so many seconds, and the offer's."""


@pytest.mark.parametrize("fault", GONE)
def test_failure_ends_waiting_fetch_by_name_and_all_works_after(fault: str) -> None:
    kind, role, ends, offer, within_s = GONE[fault]
    with cluster_of(quick()) as world:
        assert world.works()
        handoff = waiting(world)
        world.run(SOON_S)
        world.suffer(Fault(kind, role=role, lasts_s=FAULT_S))
        took_s = world.time_until(lambda: handoff.is_ended)
        world.until(lambda: handoff.released)
        assert (handoff.end, handoff.outcome) == (ends, offer)
        assert took_s < within_s
        world.run(FAULT_S)
        assert world.works()


def test_agent_unreachable_before_meeting_is_named_then_read() -> None:
    with cluster_of(quick()) as world:
        handoff = world.give(Plan(fetch_after_s=1.0, timeout_s=9.0))
        world.until(lambda: world.count(P, "offers") == 1)
        world.suffer(Fault(FaultKind.CUT, lasts_s=FAULT_S))
        assert world.end_of(handoff) == "failed peer_unreachable"
        world.until(lambda: handoff.is_freed, within_s=SOON_S)
        world.run(FAULT_S)
        assert world.works()


@pytest.mark.parametrize("role", [P, D])
def test_an_agent_starts_though_its_data_process_ends_meanwhile(role: AgentRole) -> None:
    with cluster_of(quick()) as world:
        for request in ("Configure", "OpenSlots", "OpenNixl", "ListListening", "AddMemory"):
            assert world.works()
            world.suffer(Fault(FaultKind.CRASH_AGENT, role=role, lasts_s=0.1))
            world.until(partial(world.awaits, role, request))
            world.suffer(Fault(FaultKind.CRASH_DATA, role=role))
            world.until(lambda: world.engines[role, 0].is_ready, within_s=SOON_S)
        assert world.works()


def test_bytes_of_replaced_data_process_complete_no_fetch() -> None:
    """The next one listens at the same place, with other memory at the same addresses."""
    plan = Plan(num_tokens=16, num_pieces=2, gap_s=3.0, timeout_s=20.0, ttl_s=30.0)
    for seed in range(5):
        with cluster_of(quick(prefill=HND), seed) as world:
            world.fabric.follows = 1.0
            handoff = waiting(world, plan)
            world.run(SOON_S)
            world.suffer(Fault(FaultKind.CRASH_DATA))
            world.run(SOON_S)
            assert world.works()
            assert world.end_of(handoff) == "completed"


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_fetch_completes_whatever_is_lost_with_a_connection(num_pieces: int) -> None:
    """No lease is renewed in time, so only events report growth."""
    with cluster_of(PATIENT) as world:
        for handoff in moments(world, Plan(num_tokens=12, num_pieces=num_pieces, gap_s=0.015)):
            world.suffer(Fault(FaultKind.BREAK))
            assert world.end_of(handoff) == "completed"


@pytest.mark.parametrize("away_s", [0.3 + 0.06 * step for step in range(10)])
def test_fetch_from_restarted_agent_outlives_end_of_old_process(away_s: float) -> None:
    """The report that the first process has ended may come when the next one is there."""
    with cluster_of(quick()) as world:
        assert world.works()
        world.suffer(Fault(FaultKind.CRASH_AGENT, lasts_s=away_s))
        world.until(lambda: not world.engines[P, 0].is_ready)
        world.start()
        handoffs = [world.give(Plan(), after_s=0.01 * number) for number in range(30)]
        assert {world.end_of(handoff) for handoff in handoffs} == {"completed"}


def committed(world: Cluster, **plan: Any) -> Handoff:
    """A handoff whose offer is committed, and the reply under way."""
    handoff = world.give(Plan(**plan))
    world.until(lambda: world.count(P, "offers") == 1)
    world.until(lambda: world.count(P, "offers") == 0)
    assert not handoff.is_ended
    return handoff


@pytest.mark.parametrize(("grace_s", "ends"), [(5.0, "completed"), (0.01, "failed timeout")])
def test_late_reply_has_a_grace(monkeypatch: pytest.MonkeyPatch, grace_s: float, ends: str) -> None:
    monkeypatch.setattr("kvbus_decode.config.COMMIT_GRACE_S", grace_s)
    with cluster_of(quick()) as world:
        handoff = committed(world, timeout_s=4.0)
        world.suffer(Fault(FaultKind.CUT, lasts_s=4.5))
        assert world.time_until(lambda: handoff.is_ended) > 4.0
        assert handoff.end == ends


def test_fetches_from_silent_agent_fail_at_once_after_some_tries() -> None:
    with cluster_of(quick()) as world:
        assert world.works()
        plan = Plan(timeout_s=6.0, ttl_s=2 * LONG_S)
        tried = [world.give(replace(plan, fetch_after_s=1.0 + 6 * one)) for one in range(NUM_TRIED)]
        world.until(lambda: world.count(P, "offers") == NUM_TRIED)
        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=LONG_S))
        ends = [world.end_of(one) for one in tried]
        assert set(ends[:4]) <= {"failed timeout", "failed peer_unreachable"}
        assert set(ends[6:]) == {"refused peer_unreachable"}
        world.run(LONG_S)
        assert world.works()


def test_silent_agent_restarted_as_new_process_is_read() -> None:
    with cluster_of(quick()) as world:
        assert world.works()
        world.suffer(Fault(FaultKind.CRASH_AGENT, lasts_s=LONG_S))
        world.run(LONG_S)
        assert world.works()


def test_a_read_whose_connection_is_reset_is_made_again() -> None:
    with cluster_of(SLOW) as world:
        handoff = read(world)
        world.suffer(*(Fault(FaultKind.RESET, role=D, at_s=0.3 * number) for number in range(3)))
        assert world.end_of(handoff) == "completed"
        assert world.works()


def test_fetch_ending_during_reconnect_gives_its_blocks_back() -> None:
    with cluster_of(SLOW) as world:
        handoff = read(world)
        world.suffer(Fault(FaultKind.CUT, lasts_s=LONG_S), Fault(FaultKind.RESET, role=D))
        assert world.end_of(handoff) == "failed peer_unreachable"
        world.until(lambda: handoff.is_freed, within_s=SOON_S)
        world.run(LONG_S)
        assert world.works()


def test_paused_decode_agent_blames_no_prefill_agent() -> None:
    plan = Plan(timeout_s=30.0, ttl_s=2 * REFUSED_S)
    with cluster_of(quick()) as world:
        for frozen_s in (3.0, 7.0, FAULT_S, REFUSED_S + 10.0):
            assert world.works()
            world.suffer(Fault(FaultKind.FREEZE_AGENT, role=D, lasts_s=frozen_s))
            handoffs = [world.give(plan, after_s=0.5 * number) for number in range(NUM_TRIED)]
            assert {world.end_of(handoff) for handoff in handoffs} == {"completed"}
            assert {handoff.attempts for handoff in handoffs} == {1}


def test_a_reply_that_comes_while_its_reader_is_paused_is_read() -> None:
    """The pause is longer than the agent waits for the reply."""
    with cluster_of(PATIENT) as world:
        for handoff in moments(world, Plan(timeout_s=30.0, ttl_s=30.0)):
            world.suffer(Fault(FaultKind.FREEZE_AGENT, role=D, lasts_s=FAULT_S))
            assert world.end_of(handoff) == "completed"


@pytest.mark.parametrize("frozen_s", [30.0, 0.0], ids=["silent", "idle"])
def test_unused_peer_is_left_and_found(monkeypatch: pytest.MonkeyPatch, frozen_s: float) -> None:
    monkeypatch.setattr("kvbus_decode.peers.FORGET_PEER_S", 2.0 if frozen_s else 60.0)
    idle = {} if frozen_s else {"idle_peer_s": 2.0}
    with cluster_of(quick(part_s=0.5, decode_config=idle)) as world:
        assert world.works()
        assert world.num_peers() == 1
        if frozen_s:
            read(world, timeout_s=5.0)
            world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=frozen_s))
        world.until(lambda: not world.num_peers(), within_s=frozen_s + 10.0)
        world.run(frozen_s)
        assert world.works()


def test_a_read_of_a_frozen_agent_is_repeated_when_that_goes_on() -> None:
    with cluster_of(quick(part_s=0.4)) as world:
        handoff = read(world)
        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=15.0))
        assert world.time_until(lambda: handoff.is_ended) < 15.0 + 3 * SOON_S
        assert handoff.end == "completed"


def test_read_of_frozen_agent_keeps_blocks_until_quarantine_ends() -> None:
    with cluster_of(SLOW) as world:
        handoff = read(world, timeout_s=9.0)
        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=LONG_S))
        took_s = world.time_until(lambda: handoff.is_ended)
        assert not handoff.is_freed
        freed_s = took_s + world.time_until(lambda: handoff.is_freed)
        assert handoff.end == "failed timeout"
        assert took_s < 9.0 + SOON_S
        assert abs(freed_s - LEASE_S - QUARANTINE_S) < 3 * SOON_S


@pytest.mark.parametrize("gives_up", [True, False])
def test_cancel_by_engine_frees_offer_only_on_request(gives_up: bool) -> None:
    with cluster_of(quick()) as world:
        handoff = world.give(replace(GROWS, cancel_after_s=1.0, gives_up_offer=gives_up))
        assert world.end_of(handoff) == "cancelled cancelled"
        assert (released_s(world, handoff) < SOON_S) == gives_up
        assert handoff.outcome is (Outcome.WITHDRAWN if gives_up else Outcome.EXPIRED)


@pytest.mark.parametrize("role", [P, D])
def test_frozen_engine_hears_end_of_its_handoff_when_it_resumes(role: AgentRole) -> None:
    with cluster_of(SLOW) as world:
        handoff = read(world)
        world.suffer(Fault(FaultKind.FREEZE_ENGINE, role=role, lasts_s=LONG_S))
        world.until(lambda: not world.count(D, "fetches") and not world.count(P, "offers"))
        assert not (handoff.released if role is P else handoff.is_ended)
        world.until(lambda: handoff.released and handoff.is_ended, within_s=2 * LONG_S)
        assert (handoff.end, handoff.outcome) == ("completed", Outcome.COMPLETED)


def test_restarted_engine_hears_nothing_of_its_predecessor() -> None:
    """A notice of what is over for its engine is a violation."""
    with cluster_of(SLOW) as world:
        handoff = read(world)
        crash = Fault(FaultKind.CRASH_ENGINE, role=D, lasts_s=0.1)
        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=15.0), crash)
        assert world.end_of(handoff) == "lost"
        world.run(30.0)
        assert world.works()


KEEP_S = 15.0
HELD = Plan(num_tokens=16, ttl_s=3.0, fetch_after_s=40.0, is_held=True)
"""Its fetch comes long after its time to wait."""


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
def test_only_held_offer_is_read_after_its_ttl(is_held: bool, meets: bool) -> None:
    transfer_id = "of-one-request-held" if meets else None
    plan = replace(HELD, is_held=is_held, meets=meets, transfer_id=transfer_id)
    with cluster_of(quick()) as world:
        handoff = world.give(plan)
        ended = world.end_of(handoff)
        assert ended.endswith("completed" if is_held else "offer_expired")
        assert world.count(D, "holds") == 0


@pytest.mark.parametrize("gap_s", [1.0, 9.0, 12.0])
@pytest.mark.parametrize("after_s", [0.5, 10.0])
def test_held_offer_outlives_crashes_of_prefill_agent(after_s: float, gap_s: float) -> None:
    """The gap may be shorter, or longer, than the time that a republished offer has."""
    with cluster_of(quick()) as world:
        handoff = world.give(HELD)
        world.until(lambda: world.count(D, "holds") == 1)
        world.run(after_s)
        for _ in range(2):
            world.suffer(Fault(FaultKind.CRASH_AGENT, role=P, lasts_s=0.5))
            world.run(gap_s)
        assert world.end_of(handoff) == "completed"


def test_unread_offer_expires_though_its_agent_crashes_again_and_again() -> None:
    with cluster_of(quick()) as world:
        handoff = world.give(replace(HELD, is_held=False, fetch_after_s=None))
        world.until(lambda: handoff.offer_id != "")
        num_crashes = 0
        while not handoff.released and num_crashes < 20:
            world.suffer(Fault(FaultKind.CRASH_AGENT, role=P, lasts_s=0.5))
            num_crashes += 1
            world.run(9.0)
        assert handoff.outcome is Outcome.EXPIRED
        assert 1 < num_crashes < 20


def test_crashed_engine_holds_nothing_after_seconds() -> None:
    with cluster_of(quick()) as world:
        handoff = world.give(HELD)
        world.until(lambda: world.count(D, "holds") == 1)
        world.run(20.0)
        assert not handoff.released
        world.suffer(Fault(FaultKind.CRASH_ENGINE, role=D, lasts_s=0.1))
        world.until(lambda: world.count(D, "holds") == 0)
        assert released_s(world, handoff) < KEEP_S + SOON_S
