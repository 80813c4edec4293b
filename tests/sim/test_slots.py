"""KV that passes through staging slots: where they are used up, too few, or not there."""

import pytest

from kvbus.protocol import AgentRole
from tests.sim.cluster import D, Fault, FaultKind, P, cluster_of
from tests.sim.handoffs import Plan
from tests.sim.worlds import HND, quick

FEW = 4
LONG = Plan(num_tokens=480, timeout_s=30.0)
"""Of several tiles, as a slot has room for 4 KiB."""


def test_fetches_from_frozen_agent_leave_slots_for_others() -> None:
    few = {"path": "packed", "staging_bytes": FEW << 12}
    with cluster_of(quick(decode=HND, decode_config=few, pairs=2, part_s=0.02)) as world:
        stuck = [world.give(LONG) for _ in range(4)]
        world.until(lambda: world.count(P, "slots") >= 2 * FEW)
        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=60.0))
        world.run(0.5)
        healthy = world.give(Plan(prefill=1, num_tokens=200, timeout_s=1.0))
        assert world.end_of(healthy) == "completed"
        ends = {world.end_of(one) for one in stuck}
        assert ends <= {"failed lease_expired", "failed timeout", "failed peer_unreachable"}


def test_what_several_ranks_of_one_agent_hold_is_read_once() -> None:
    with cluster_of(quick(decode=HND, decode_config={"path": "packed"})) as world:
        handoff = world.give(LONG)
        assert world.end_of(handoff) == "completed"
        assert handoff.num_bytes == handoff.content.nbytes


@pytest.mark.parametrize("without", [P, D])
@pytest.mark.parametrize(("path", "ends"), [("auto", "completed"), ("packed", "failed config")])
def test_agent_without_staging_is_read_direct(without: AgentRole, path: str, ends: str) -> None:
    prefill, decode = ({"staging_bytes": 0} if without is role else {} for role in (P, D))
    with cluster_of(quick(prefill_config=prefill, decode_config={"path": path, **decode})) as world:
        assert world.end_of(world.give(Plan())) == ends


def test_fetches_with_too_many_tiles_complete_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus_prefill.gather.MAX_PACKS", 3)
    monkeypatch.setattr("kvbus_decode.config.TILES_IN_FLIGHT", 8)
    few, packed = {"staging_bytes": 1 << 12}, {"path": "packed"}
    settings = quick(decode=HND, prefill_config=few, decode_config=packed, part_s=0.1)
    with cluster_of(settings) as world:
        crowd = [world.give(LONG) for _ in range(4)]
        ends = {world.end_of(one) for one in crowd}
        metrics = world.agents[D, 0].runtime.agent.metrics.registry
        assert ends == {"completed"}
        assert metrics.get_sample_value("kvbus_fetch_retries_total", {"code": "busy"})
