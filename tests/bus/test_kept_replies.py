"""The bytes of kept replies, with what Python takes for each, and their bound."""

from kvbus.bus.replies import KEPT_BYTES, KeptReply, ReplyCache
from kvbus.bus.sender import Sender

ASKER = Sender("", "boot", "secret")


def test_replies_that_are_nearly_empty_are_bounded_by_what_they_take() -> None:
    cache = ReplyCache(max_replies=1 << 30, max_bytes=100 * KEPT_BYTES)

    evicted = [key for i in range(1000) for key in cache.put((ASKER, i), KeptReply(b"ok", i))]

    assert len(cache) == 99
    assert [request_id for _, request_id in evicted] == list(range(901))
    assert cache.num_bytes == 99 * (KEPT_BYTES + 2)
