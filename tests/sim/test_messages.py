"""The messages of one handoff, from the engines' side and between the agents, in their order."""

import pytest

from kvbus.protocol import Notice, RequestFrame, decode
from tests.sim.cluster import Cluster, Settings, cluster_of
from tests.sim.handoffs import Plan
from tests.sim.worlds import cells, quick

DIRECT = [
    *("offer", "offer: ok", "fetch", "acquire", "acquire: ok", "commit", "commit: ok", "released"),
    "fetch: ok",
]
BY_CELL = ["offer", "offer: ok", "fetch", "fetch: ok", "commits", "released", "commits: ok"]
"""A mapped read has no acquire, and so two messages less."""


def said(world: Cluster) -> list[str]:
    """The requests, their answers, and the notices since the last time; events and pings aside."""
    frames = list(world.network.sent)
    world.network.sent.clear()
    asked: dict[int, str] = {}
    names = []
    for envelope in [decode(frame) for frame in frames if frame[:1] not in (b"\0", b"\1")]:
        if isinstance(envelope, RequestFrame):
            asked[envelope.request_id] = envelope.op
            names.append(envelope.op)
        elif isinstance(envelope, Notice):
            names.append(envelope.op)
        elif envelope.request_id in asked:
            outcome = "error" if envelope.ok is None else "ok"
            names.append(f"{asked[envelope.request_id]}: {outcome}")
    return [one for one in names if "ping" not in one and "." not in one and one != "heartbeat"]


@pytest.mark.parametrize(
    ("settings", "expected"), [(quick(), DIRECT), (cells(), BY_CELL)], ids=["direct", "by cell"]
)
def test_handoff_gets_one_reply_to_each_request(settings: Settings, expected: list[str]) -> None:
    with cluster_of(settings) as world:
        assert world.works()
        world.run(1.0)
        said(world)
        handoff = world.give(Plan())
        world.end_of(handoff)
        world.until(lambda: handoff.released)
        assert said(world) == expected
