"""What is decided when an agent, a connection or an engine fails at one moment, on virtual time.

The services are the product's own; each world ends with nothing held anywhere, as its engines see.
"""

from dataclasses import replace
from typing import Any

import pytest

from kvbus.protocol import AgentRole, Outcome
from kvbus_decode.remote_agent import REFUSED_S
from tests.sim.cluster import Cluster, D, Fault, FaultKind, P, Settings, cluster_of
from tests.sim.handoffs import Handoff, Plan
from tests.sim.worlds import HND, LEASE_S, QUARANTINE_S, cells, quick

FAULT_S, LONG_S = 10.0, 60.0
NUM_TRIED = 8
SOON_S = 1.0
SLOW = quick(part_s=0.5)
"""Each part of a read takes so long."""
PATIENT = quick(prefill_config={"max_lease_s": 600.0}, decode_config={"lease_s": 600.0})
GROWS = Plan(num_tokens=16, num_pieces=2, gap_s=2 * LONG_S, timeout_s=20.0, ttl_s=30.0)
"""Its second half comes so late that a fetch of it waits."""

CRASHING: dict[str, tuple[Settings, dict[str, Any]]] = {
    "sealed": (quick(), {}),
    "by cell": (cells(), {}),
    "by cell, late messages": (cells(delay_s=2e-3), {}),
    "growing": (quick(), {"num_pieces": 3, "gap_s": 0.002, "chunk_tokens": 8}),
    "rendezvous": (quick(), {"meets": True, "transfer_id": "of-one-request-1"}),
    "late messages": (quick(delay_s=2e-3), {}),
}
"""Worlds, and handoffs in them, in which a decode agent crashes at any point."""
seeds = pytest.mark.parametrize("seed", range(3))


def read(world: Cluster, *, timeout_s: float = 30.0) -> Handoff:
    """A handoff whose bytes are on their way."""
    handoff = world.give(Plan(num_tokens=64, timeout_s=timeout_s))
    world.until(lambda: world.agents[D, 0].data.num_jobs > 0)
    return handoff


WAITING = {
    "prefill agent frozen": (FaultKind.FREEZE_AGENT, P),
    "prefill agent crashed": (FaultKind.CRASH_AGENT, P),
    "prefill agent drained": (FaultKind.DRAIN_AGENT, P),
    "decode agent frozen": (FaultKind.FREEZE_AGENT, D),
    "decode agent crashed": (FaultKind.CRASH_AGENT, D),
    "the way between them cut": (FaultKind.CUT, P),
}
"""What happens to whom while a fetch waits for tokens that come when it is over."""
GONE = {
    "prefill engine crashed": (FaultKind.CRASH_ENGINE, P, "failed engine_lost", None),
    "decode agent drained": (FaultKind.DRAIN_AGENT, D, "failed draining", Outcome.EXPIRED),
    "decode engine crashed": (FaultKind.CRASH_ENGINE, D, "lost", Outcome.EXPIRED),
}
"""What ends the offer, or the fetch: how that ends, and the offer after it."""
ENDS_BY_S = {
    "prefill agent crashed": FAULT_S + 2 * SOON_S,
    "prefill agent drained": FAULT_S + 5.0 + 2 * SOON_S,
    "decode agent drained": 5.0 + SOON_S,
}


@seeds
@pytest.mark.parametrize("fault", WAITING)
def test_a_fetch_that_waits_outlives_what_its_offer_outlives(seed: int, fault: str) -> None:
    kind, role = WAITING[fault]
    with cluster_of(quick(), seed) as world:
        handoff = world.give(replace(GROWS, gap_s=1.5 * FAULT_S, timeout_s=4 * FAULT_S))
        world.until(lambda: world.count(P, "leases") == 1)

        world.suffer(Fault(kind, role=role, lasts_s=FAULT_S))

        assert world.end_of(handoff) == "completed"


@pytest.mark.parametrize("crashed_at_s", [0.0002 * step for step in range(50)])
@pytest.mark.parametrize("name", CRASHING)
def test_a_fetch_completes_whenever_its_agent_crashes(name: str, crashed_at_s: float) -> None:
    settings, more = CRASHING[name]
    with cluster_of(settings) as world:
        assert world.works()
        handoff = world.give(Plan(num_tokens=24, timeout_s=LONG_S, ttl_s=LONG_S, **more))
        world.until(lambda: handoff.asked is not None)
        world.suffer(Fault(FaultKind.CRASH_AGENT, role=D, at_s=crashed_at_s, lasts_s=0.1))

        assert world.end_of(handoff) == "completed"
        assert world.time_until(lambda: handoff.outcome is Outcome.COMPLETED) < 2 * SOON_S
        assert world.works()


@seeds
@pytest.mark.parametrize("fault", GONE)
def test_failure_ends_waiting_fetch_by_name_and_all_works_after(seed: int, fault: str) -> None:
    kind, role, ends, offer = GONE[fault]
    with cluster_of(quick(), seed) as world:
        assert world.works()
        handoff = world.give(GROWS)
        world.until(lambda: world.count(P, "leases") == 1)
        world.run(SOON_S)

        world.suffer(Fault(kind, role=role, lasts_s=FAULT_S))
        took_s = world.time_until(lambda: handoff.is_ended)
        world.until(lambda: handoff.released)

        assert handoff.end == ends
        assert took_s < ENDS_BY_S.get(fault, SOON_S)
        assert handoff.outcome == offer
        world.run(FAULT_S)
        assert world.works()


@seeds
def test_agent_unreachable_before_meeting_is_named_then_read(
    seed: int,
) -> None:
    with cluster_of(quick(), seed) as world:
        handoff = world.give(Plan(fetch_after_s=1.0, timeout_s=9.0))
        world.until(lambda: world.count(P, "offers") == 1)
        world.suffer(Fault(FaultKind.CUT, lasts_s=FAULT_S))

        assert world.end_of(handoff) == "failed peer_unreachable"
        world.until(lambda: handoff.is_freed, within_s=SOON_S)
        world.run(FAULT_S)
        assert world.works()


@pytest.mark.parametrize("role", [P, D])
@pytest.mark.parametrize(
    "request_name", ["Configure", "OpenSlots", "OpenNixl", "ListListening", "AddMemory"]
)
def test_an_agent_starts_though_its_data_process_ends_meanwhile(
    request_name: str, role: AgentRole
) -> None:
    with cluster_of(quick()) as world:
        assert world.works()
        world.suffer(Fault(FaultKind.CRASH_AGENT, role=role, lasts_s=0.1))
        world.until(lambda: world.awaits(role, request_name))
        world.suffer(Fault(FaultKind.CRASH_DATA, role=role))

        world.until(lambda: world.engines[role, 0].is_ready, within_s=SOON_S)

        assert world.works()


def test_bytes_of_replaced_data_process_complete_no_fetch() -> None:
    """The next one may listen at the same place, with other memory at the same addresses."""
    plan = Plan(num_tokens=16, num_pieces=2, gap_s=3.0, timeout_s=20.0, ttl_s=30.0)
    for seed in range(10):
        with cluster_of(quick(prefill=HND), seed) as world:
            handoff = world.give(plan)
            world.until(lambda: world.count(P, "leases") == 1)
            world.run(SOON_S)
            world.suffer(Fault(FaultKind.CRASH_DATA))
            world.run(SOON_S)
            assert world.works()

            assert world.end_of(handoff) == "completed"


@seeds
def test_a_rendezvous_waits_for_its_offer(seed: int) -> None:
    with cluster_of(quick(), seed) as world:
        handoff = world.give(Plan(meets=True, transfer_id="of-one-request-1", num_pieces=2))

        assert world.end_of(handoff) == "completed"


@pytest.mark.parametrize("broken_at_s", [0.001 * step for step in range(1, 40, 2)])
def test_offer_grown_before_first_event_is_asked_for(
    broken_at_s: float,
) -> None:
    """No lease is renewed in time: events alone tell of growth, and the first ones are lost."""
    with cluster_of(PATIENT) as world:
        handoff = world.give(Plan(num_tokens=12, num_pieces=3, gap_s=0.015))
        world.suffer(Fault(FaultKind.BREAK, at_s=broken_at_s))

        assert world.end_of(handoff) == "completed"


@pytest.mark.parametrize("away_s", [0.3 + 0.02 * step for step in range(30)])
def test_fetch_from_restarted_agent_outlives_end_of_old_process(
    away_s: float,
) -> None:
    """Who looked whether the first one is gone may hear of it when the next one is there."""
    with cluster_of(quick()) as world:
        assert world.works()
        world.suffer(Fault(FaultKind.CRASH_AGENT, lasts_s=away_s))
        world.until(lambda: not world.engines[P, 0].is_ready)
        world.until(lambda: world.engines[P, 0].is_ready)
        handoffs = [world.give(Plan(), after_s=0.01 * number) for number in range(30)]

        assert {world.end_of(handoff) for handoff in handoffs} == {"completed"}


@seeds
def test_fetch_completes_though_connection_loses_last_reply(seed: int) -> None:
    with cluster_of(quick(), seed) as world:
        handoff = world.give(Plan())
        world.until(lambda: world.count(P, "offers") == 1)
        world.until(lambda: world.count(P, "offers") == 0)
        was_told = handoff.is_ended

        world.suffer(Fault(FaultKind.BREAK))

        assert not was_told
        assert world.end_of(handoff) == "completed"


@seeds
@pytest.mark.parametrize(("grace_s", "ends"), [(5.0, "completed"), (0.01, "failed timeout")])
def test_commit_reply_after_deadline_counts_only_within_grace(
    monkeypatch: pytest.MonkeyPatch, seed: int, grace_s: float, ends: str
) -> None:
    monkeypatch.setattr("kvbus_decode.config.COMMIT_GRACE_S", grace_s)
    deadline_s, late_s = 4.0, 0.5
    with cluster_of(quick(), seed) as world:
        handoff = world.give(Plan(timeout_s=deadline_s))
        world.until(lambda: world.count(P, "offers") == 1)
        world.until(lambda: world.count(P, "offers") == 0)  # and the reply is under way

        world.suffer(Fault(FaultKind.CUT, lasts_s=deadline_s + late_s))

        assert world.time_until(lambda: handoff.is_ended) > deadline_s
        assert handoff.end == ends


@seeds
def test_fetches_from_silent_agent_fail_at_once_after_some_tries(
    seed: int,
) -> None:
    with cluster_of(quick(), seed) as world:
        assert world.works()
        tried = [
            world.give(Plan(fetch_after_s=1.0 + 6 * number, timeout_s=6.0, ttl_s=2 * LONG_S))
            for number in range(NUM_TRIED)
        ]
        world.until(lambda: world.count(P, "offers") == NUM_TRIED)
        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=LONG_S))

        ends = [world.end_of(one) for one in tried]

        assert set(ends[:4]) <= {"failed timeout", "failed peer_unreachable"}
        assert set(ends[6:]) == {"refused peer_unreachable"}
        world.run(LONG_S)
        assert world.works()


@seeds
def test_silent_agent_restarted_as_new_process_is_read(seed: int) -> None:
    with cluster_of(quick(), seed) as world:
        assert world.works()

        world.suffer(Fault(FaultKind.CRASH_AGENT, lasts_s=LONG_S))
        world.run(LONG_S)

        assert world.works()


@seeds
@pytest.mark.parametrize("num_resets", [1, 3])
def test_a_read_whose_connection_is_reset_is_made_again(seed: int, num_resets: int) -> None:
    with cluster_of(SLOW, seed) as world:
        handoff = read(world)
        for number in range(num_resets):
            world.suffer(Fault(FaultKind.RESET, role=D, at_s=0.3 * number))

        assert world.end_of(handoff) == "completed"
        assert world.works()


@seeds
def test_fetch_ending_during_reconnect_gives_its_blocks_back(
    seed: int,
) -> None:
    with cluster_of(SLOW, seed) as world:
        handoff = read(world)
        world.suffer(Fault(FaultKind.CUT, lasts_s=LONG_S), Fault(FaultKind.RESET, role=D))

        assert world.end_of(handoff) == "failed peer_unreachable"
        world.until(lambda: handoff.is_freed, within_s=SOON_S)
        world.run(LONG_S)
        assert world.works()


@seeds
@pytest.mark.parametrize("frozen_s", [3.0, 7.0, FAULT_S, REFUSED_S + 10.0])
def test_paused_decode_agent_blames_no_prefill_agent(seed: int, frozen_s: float) -> None:
    with cluster_of(quick(), seed) as world:
        assert world.works()
        world.suffer(Fault(FaultKind.FREEZE_AGENT, role=D, lasts_s=frozen_s))
        plan = Plan(timeout_s=30.0, ttl_s=2 * REFUSED_S)
        handoffs = [world.give(plan, after_s=0.5 * number) for number in range(NUM_TRIED)]

        assert {world.end_of(handoff) for handoff in handoffs} == {"completed"}
        assert {handoff.attempts for handoff in handoffs} == {1}


@pytest.mark.parametrize("frozen_at_s", [0.0002 * step for step in range(3)])
def test_a_reply_that_comes_while_its_reader_is_paused_is_read(frozen_at_s: float) -> None:
    """The pause is longer than the agent waits for the reply."""
    with cluster_of(PATIENT) as world:
        handoff = world.give(Plan(timeout_s=30.0, ttl_s=30.0))
        world.until(lambda: world.count(D, "fetches") == 1)
        fault = Fault(FaultKind.FREEZE_AGENT, role=D, at_s=frozen_at_s, lasts_s=FAULT_S)
        world.suffer(fault)

        assert world.end_of(handoff) == "completed"


@seeds
@pytest.mark.parametrize(
    ("frozen_s", "forgets"),
    [(30.0, {}), (0.0, {"idle_peer_s": 2.0})],
    ids=["silent", "idle"],
)
def test_silent_or_idle_peer_is_left_and_met_again(
    monkeypatch: pytest.MonkeyPatch, seed: int, frozen_s: float, forgets: dict[str, float]
) -> None:
    monkeypatch.setattr("kvbus_decode.peers.FORGET_PEER_S", 2.0 if frozen_s else 60.0)
    with cluster_of(quick(part_s=0.5, decode_config=forgets), seed) as world:
        assert world.works()
        num_met = world.num_peers()

        if frozen_s:
            read(world, timeout_s=5.0)
            world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=frozen_s))
        world.until(lambda: not world.num_peers(), within_s=frozen_s + 10.0)
        world.run(frozen_s)

        assert num_met == 1
        assert world.works()


@seeds
def test_a_read_of_a_frozen_agent_is_repeated_when_that_goes_on(seed: int) -> None:
    with cluster_of(quick(part_s=0.4), seed) as world:
        handoff = read(world)

        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=15.0))
        took_s = world.time_until(lambda: handoff.is_ended)

        assert handoff.end == "completed"
        assert took_s < 15.0 + 3 * SOON_S


@seeds
def test_read_of_frozen_agent_keeps_blocks_until_quarantine_ends(
    seed: int,
) -> None:
    with cluster_of(SLOW, seed) as world:
        handoff = read(world, timeout_s=9.0)

        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=LONG_S))
        took_s = world.time_until(lambda: handoff.is_ended)
        were_free = handoff.is_freed
        freed_s = took_s + world.time_until(lambda: handoff.is_freed)

        assert handoff.end == "failed timeout"
        assert took_s < 9.0 + SOON_S
        assert not were_free
        assert abs(freed_s - LEASE_S - QUARANTINE_S) < 3 * SOON_S


@seeds
@pytest.mark.parametrize(
    ("gives_up", "offer"), [(True, Outcome.WITHDRAWN), (False, Outcome.EXPIRED)]
)
def test_cancel_by_decode_engine_frees_offer_only_on_request(
    seed: int, gives_up: bool, offer: Outcome
) -> None:
    with cluster_of(quick(), seed) as world:
        handoff = world.give(replace(GROWS, cancel_after_s=1.0, gives_up_offer=gives_up))

        assert world.end_of(handoff) == "cancelled cancelled"
        assert (world.time_until(lambda: handoff.released) < SOON_S) == gives_up
        assert handoff.outcome is offer


@seeds
@pytest.mark.parametrize("role", [P, D])
def test_frozen_engine_hears_end_of_its_handoff_when_it_resumes(seed: int, role: AgentRole) -> None:
    with cluster_of(SLOW, seed) as world:
        handoff = read(world)

        world.suffer(Fault(FaultKind.FREEZE_ENGINE, role=role, lasts_s=LONG_S))
        world.until(lambda: not world.count(D, "fetches") and not world.count(P, "offers"))
        were_told = {P: handoff.released, D: handoff.is_ended}
        world.until(lambda: handoff.released and handoff.is_ended, within_s=2 * LONG_S)

        assert not were_told[role]
        assert (handoff.end, handoff.outcome) == ("completed", Outcome.COMPLETED)


@seeds
def test_restarted_engine_hears_nothing_of_its_predecessor(seed: int) -> None:
    """A notice of what is over for its engine is a violation."""
    with cluster_of(SLOW, seed) as world:
        handoff = read(world)

        world.suffer(
            Fault(FaultKind.FREEZE_AGENT, lasts_s=15.0),
            Fault(FaultKind.CRASH_ENGINE, role=D, lasts_s=0.1),
        )

        assert world.end_of(handoff) == "lost"
        world.run(30.0)
        assert world.works()
