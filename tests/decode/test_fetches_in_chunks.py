"""A fetch of an offer that is still computed: read chunk by chunk, as the tokens become ready."""

from typing import Any

import pytest

from kvbus.errors import ErrorCode, RemoteError
from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Outcome, Ticket
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.state import FetchLimits, FetchState
from kvbus_decode.fetch.table import FetchTable

BLOCK_SIZE, NUM_TOKENS = 8, 32
TICKET = Ticket("p", "boot", "tcp://p", "engine-p", "engine-boot", "o1", "r1", NUM_TOKENS, "secret")
HINT = ev.OfferAdvanced("f1")
LOST = RemoteError("the fabric failed", code=ErrorCode.TRANSFER_FAILED)


def landed(num_bytes: int = 100, path: str = "direct") -> ev.ChunkRead:
    return ev.ChunkRead("f1", num_bytes, None, path)


def tables(start: int, stop: int) -> dict[str, BlockTable]:
    first, end = start // BLOCK_SIZE, stop // BLOCK_SIZE
    return {"full": BlockTable.of(range(100 + first, 100 + end), first_block=first)}


class Prefill:
    """One fetch at time ``now``, and the grants of an offer that grows by whole blocks."""

    def __init__(
        self, *, first_token: int = 0, has_state: bool = False, chunk_tokens: int = 0
    ) -> None:
        self.table = FetchTable(FetchLimits())
        self.known = 0
        requested = ev.Requested(
            fetch_id="f1",
            engine_id="engine-d",
            ticket=TICKET,
            first_token=first_token,
            num_tokens=NUM_TOKENS,
            tables={},
            timeout_s=60.0,
            reply_to="fetch",
            has_state=has_state,
            chunk_tokens=chunk_tokens,
        )
        self.tell(requested)
        self.tell(ev.PeerReady("f1"))

    def tell(self, event: ev.Event, now: float = 0.0) -> list[Any]:
        return self.table.handle(event, now)

    def grant(
        self, num_tokens: int, *, sealed: bool = False, epoch: int = 1, now: float = 0.0
    ) -> list[Any]:
        """The reply to the claim, or to the renewal that is under way."""
        more = tables(self.known, num_tokens)
        self.known = max(self.known, num_tokens)
        granted = Granted(epoch, 9.0, num_tokens, sealed, more, "token")
        return self.tell(ev.LeaseGranted("f1", now, granted), now)

    def news(self, num_tokens: int, *, sealed: bool = False, epoch: int = 1) -> list[Any]:
        """A hint, and what the renewal that follows it says."""
        assert [type(c) for c in self.tell(HINT)] == [ev.SendRenew]
        return self.grant(num_tokens, sealed=sealed, epoch=epoch)

    @property
    def state(self) -> FetchState:
        fetch = self.table.live.get("f1") or self.table.retired["f1"]
        return fetch.state


def chunk(start: int, stop: int, *, last: bool = False, ready: int | None = None) -> ev.ReadChunk:
    return ev.ReadChunk("f1", 1, "token", tables(0, ready or stop), start, stop, last)


def confirm() -> ev.SendConfirm:
    return ev.SendConfirm("f1", 1, "token", 5.0)


def test_what_is_ready_is_read_while_the_rest_is_computed() -> None:
    prefill = Prefill()

    first = prefill.grant(8)
    at_rest = prefill.tell(landed())
    second = prefill.news(24)
    prefill.tell(landed())
    third = prefill.news(32, sealed=True)
    done = prefill.tell(landed())

    assert (first, at_rest, second) == ([chunk(0, 8)], [], [chunk(8, 24)])
    assert (third, done) == ([chunk(24, 32, last=True)], [confirm()])


def test_news_during_a_chunk_is_one_next_chunk_as_soon_as_that_has_landed() -> None:
    prefill = Prefill()
    prefill.grant(8)

    during = [prefill.news(16), prefill.news(24)]
    after = prefill.tell(landed())

    assert during == [[], []]
    assert after == [chunk(8, 24)]


def test_the_tables_of_a_chunk_do_not_grow_under_it() -> None:
    prefill = Prefill()
    (first,) = prefill.grant(8)

    prefill.news(32, sealed=True)

    assert first.tables == tables(0, 8)


def test_hints_during_a_renewal_ask_once_more_after_it_and_not_more_often() -> None:
    prefill = Prefill()
    prefill.grant(8)

    asked = [prefill.tell(HINT) for _ in range(3)]
    again = prefill.grant(16)
    last = prefill.grant(24)

    assert [len(commands) for commands in asked] == [1, 0, 0]
    assert [type(c) for c in again] == [ev.SendRenew]
    assert again[0].known_blocks == {"full": 2}
    assert last == []


def test_a_claim_that_is_sent_after_a_hint_answers_it() -> None:
    prefill = Prefill()
    prefill.tell(ev.StepFailed("f1", RemoteError("leased", code=ErrorCode.BUSY)))
    claimed = prefill.tell(HINT)

    commands = prefill.grant(0, now=1.0)

    assert [type(c) for c in claimed] == [ev.SendClaim]
    assert commands == []


def test_a_sealed_offer_that_is_there_is_one_last_chunk() -> None:
    prefill = Prefill()

    commands = prefill.grant(32, sealed=True)

    assert commands == [chunk(0, 32, last=True)]


def test_chunks_of_the_wanted_size_are_told_of_as_they_land_after_what_follows_them() -> None:
    prefill = Prefill(first_token=3, chunk_tokens=8)

    first = prefill.grant(32, sealed=True)
    then = [prefill.tell(landed()) for _ in range(4)]

    assert first == [chunk(3, 8, ready=32)]
    assert then == [
        [chunk(8, 16, ready=32), ev.ReportLanded("f1", 8)],
        [chunk(16, 24, ready=32), ev.ReportLanded("f1", 16)],
        [chunk(24, 32, last=True), ev.ReportLanded("f1", 24)],
        [confirm(), ev.ReportLanded("f1", 32)],
    ]


def test_a_chunk_ends_where_the_ready_tokens_do_though_the_engine_wants_larger_ones() -> None:
    prefill = Prefill(chunk_tokens=16)

    first = prefill.grant(8)
    at_rest = prefill.tell(landed())
    second = prefill.news(32, sealed=True)

    assert first == [chunk(0, 8)]
    assert at_rest == [ev.ReportLanded("f1", 8)]
    assert second == [chunk(8, 16, ready=32)]


def test_a_chunk_that_did_not_land_is_not_told_of() -> None:
    prefill = Prefill(chunk_tokens=8)
    prefill.grant(32, sealed=True)

    commands = prefill.tell(ev.ChunkRead("f1", 0, LOST))

    assert [type(c) for c in commands] == [ev.SendRelease, ev.ReportFetched]


def test_no_chunk_goes_beyond_the_tokens_that_were_asked_for() -> None:
    prefill = Prefill()

    commands = prefill.grant(40)

    assert commands == [chunk(0, 32, ready=40)]


def test_tokens_that_the_engine_has_are_not_waited_for_in_chunks() -> None:
    prefill = Prefill(first_token=12)

    before = prefill.grant(8)
    commands = prefill.news(16)

    assert before == []
    assert commands == [chunk(12, 16)]


def test_a_fetch_that_has_all_tokens_waits_for_the_seal_and_then_confirms() -> None:
    prefill = Prefill()
    prefill.grant(32)

    read = prefill.tell(landed())
    sealed = prefill.news(32, sealed=True)

    assert read == []
    assert sealed == [confirm()]


def test_the_state_is_read_as_a_last_chunk_without_tokens_once_the_offer_is_sealed() -> None:
    prefill = Prefill(has_state=True)
    prefill.grant(32)

    read = prefill.tell(landed())
    sealed = prefill.news(32, sealed=True)
    done = prefill.tell(landed())

    assert read == []
    assert sealed == [chunk(32, 32, last=True)]
    assert done == [confirm()]


def test_a_seal_during_the_chunk_that_ends_at_the_last_token_is_not_in_that_chunk() -> None:
    prefill = Prefill(has_state=True)
    prefill.grant(32)
    prefill.news(32, sealed=True)

    commands = prefill.tell(landed())

    assert commands == [chunk(32, 32, last=True)]


@pytest.mark.parametrize("has_state", [True, False])
def test_an_engine_that_has_everything_reads_nothing_and_confirms_after_the_seal(
    has_state: bool,
) -> None:
    prefill = Prefill(first_token=NUM_TOKENS, has_state=has_state)

    still_open = prefill.grant(32)
    sealed = prefill.news(32, sealed=True)

    assert still_open == []
    assert sealed == [confirm()]


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "sealed", "epoch"),
    [(8, False, 1), (16, True, 1), (24, False, 2)],
    ids=["fewer tokens", "sealed too short", "another epoch"],
)
def test_news_that_no_chunk_can_follow_fails_the_fetch(
    num_tokens: int, sealed: bool, epoch: int, in_flight: bool
) -> None:
    prefill = Prefill()
    prefill.grant(16)
    if not in_flight:
        prefill.tell(landed())

    commands = prefill.news(num_tokens, sealed=sealed, epoch=epoch)

    (report,) = (c for c in commands if isinstance(c, ev.ReportFetched))
    assert (report.error and report.error.code) is ErrorCode.INVALID
    assert report.blocks_free is not in_flight
    assert prefill.state is (FetchState.DRAINING if in_flight else FetchState.FAILED)


def test_an_offer_that_is_open_again_after_its_seal_fails_the_fetch() -> None:
    prefill = Prefill()
    prefill.grant(32, sealed=True)

    prefill.news(32, sealed=False)

    assert prefill.state is FetchState.DRAINING


def test_a_fetch_that_is_cancelled_between_two_chunks_has_its_blocks_at_once() -> None:
    prefill = Prefill()
    prefill.grant(16)
    prefill.tell(landed())

    commands = prefill.tell(ev.CancelRequested("f1", "cancel"))

    assert [type(c) for c in commands] == [ev.SendReply, ev.SendRelease, ev.ReportFetched]
    assert commands[-1].blocks_free


def test_a_fetch_that_failed_between_two_chunks_starts_no_other() -> None:
    prefill = Prefill()
    prefill.grant(16)
    prefill.tell(HINT)
    prefill.tell(ev.ChunkRead("f1", 0, LOST))

    commands = prefill.grant(32, sealed=True)

    assert commands == []
    assert prefill.state is FetchState.FAILED


def test_the_report_adds_up_the_chunks_and_names_the_path_of_the_last_that_had_one() -> None:
    prefill = Prefill(has_state=True)
    prefill.grant(16, now=1.0)
    prefill.tell(landed(300, "packed"), 2.0)
    prefill.tell(HINT, 2.5)
    prefill.grant(32, now=2.5)
    prefill.tell(landed(200, "direct"), 2.75)
    prefill.tell(HINT, 3.0)
    prefill.grant(32, sealed=True, now=3.0)
    prefill.tell(landed(0, ""), 3.25)

    (report,) = prefill.tell(ev.LeaseConfirmed("f1"), 4.0)

    assert report.outcome is Outcome.COMPLETED
    assert (report.num_bytes, report.path) == (500, "direct")
    assert (report.stages_s.waiting, report.stages_s.reading) == (0.75, 1.5)
