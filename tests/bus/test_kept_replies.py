"""What is kept of replies: by age, by bytes with what Python takes for each, and for whom."""

import sys
from collections import Counter

import pytest
import zmq

from kvbus.bus import ServerLimits
from kvbus.bus.replies import KEPT_BYTES, KEPT_S, KeptReply, ReplyCache
from kvbus.bus.sender import Sender
from tests.bus.messages import serve

ASKER = Sender("", "boot", "secret")


def test_replies_that_are_nearly_empty_are_bounded_by_what_they_take() -> None:
    cache = ReplyCache(max_replies=1 << 30, max_bytes=100 * KEPT_BYTES)

    evicted = [key for i in range(1000) for key in cache.put((ASKER, i), KeptReply(b"ok", i), "")]

    assert len(cache) == 99
    assert [request_id for _, request_id in evicted] == list(range(901))
    assert cache.num_bytes == 99 * (KEPT_BYTES + 2)


def test_replies_that_are_old_go_when_others_come() -> None:
    cache = ReplyCache(max_replies=1 << 30, max_bytes=1 << 30)

    kept = []
    for second in range(1000):
        cache.put((ASKER, second), KeptReply(b"ok", 0, float(second)), "")
        kept.append(len(cache))

    assert max(kept) == kept[-1] == KEPT_S + 1
    assert cache.get((ASKER, 999)) is not None
    assert cache.get((ASKER, 900)) is None


def test_who_has_most_loses_its_own_and_what_a_sender_had_goes_with_it() -> None:
    cache = ReplyCache(max_replies=100, max_bytes=1 << 30)
    others = [Sender("", f"boot-{number}", "") for number in range(10)]
    for number, other in enumerate(others):
        cache.put((other, 1), KeptReply(b"ok", number), f"party {number}")

    evicted = [key for i in range(1000) for key in cache.put((ASKER, i), KeptReply(b"ok", i), "")]
    cache.forget(ASKER)

    assert {sender for sender, _ in evicted} == {ASKER}
    assert [cache.get((other, 1)) for other in others] == [
        KeptReply(b"ok", number) for number in range(10)
    ]
    assert len(cache) == 10
    assert cache.num_bytes == 10 * (KEPT_BYTES + 2)


def asked(number: int, boot: str) -> dict[str, object]:
    return {"v": 1, "op": "ask", "id": number, "boot": boot, "secret": boot, "body": {}}


@pytest.mark.anyio
async def test_a_request_costs_the_same_however_many_senders_there_were(
    context, endpoint, running, raw_peer
) -> None:
    """The work is counted in calls of functions, as time says little on a busy machine."""
    server = serve(context, endpoint, limits=ServerLimits(max_replies=4000))
    flood, peer = raw_peer(zmq.DEALER, endpoint), raw_peer(zmq.DEALER, endpoint)
    calls: Counter[str] = Counter()

    async def work_of(names: list[str]) -> int:
        before = calls["call"]
        for number, name in enumerate(names):
            peer.put(asked(number + 1, name))
            await peer.get()
        return calls["call"] - before

    async with running(server):
        sys.setprofile(lambda _, event, __: calls.update([event]))
        few = await work_of([f"early-{number}" for number in range(50)])
        sys.setprofile(None)
        for number in range(2000):
            flood.put(asked(number + 1, "one"))
            flood.put(asked(1, f"boot-{number}"))
            await flood.get()
            await flood.get()
        sys.setprofile(lambda _, event, __: calls.update([event]))
        many = await work_of([f"late-{number}" for number in range(50)])
        sys.setprofile(None)

    assert many < 3 * few


@pytest.mark.anyio
async def test_replies_of_sessions_that_were_evicted_are_not_kept(
    context, endpoint, running, raw_peer
) -> None:
    server = serve(context, endpoint, limits=ServerLimits(max_sessions=4))
    peer = raw_peer(zmq.DEALER, endpoint)

    async with running(server):
        for number in range(100):
            peer.put(asked(1, f"boot-{number}"))
            await peer.get()
            if number == 3:
                most_bytes = server.num_reply_bytes

    assert server.num_reply_bytes <= most_bytes + 100
