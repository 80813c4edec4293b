"""Of a long read the holder is asked for digests while the bytes move, and not after its end."""

import uuid

import pytest

from kvbus.errors import ErrorCode
from kvbus.geometry import Box
from kvbus.planning import chosen_pieces, piece_of
from kvbus_decode.read import compare
from kvbus_decode.read import events as ev
from tests.agents import until
from tests.e2e.shapes import GROUP
from tests.e2e.test_digests import (
    MAX_TOKENS,
    Flip,
    Handoff,
    compared,
    reader_at,
    two_engines_at,
)
from tests.engines import failure_of
from tests.expected import num_pieces_compared

pytestmark = pytest.mark.anyio

ONE_IN = {"sampled": 64, "full": 1}


@pytest.fixture(autouse=True)
def all_reads_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LONG_BYTES", 0)


@pytest.mark.parametrize("digest", ONE_IN)
@pytest.mark.parametrize("path", ["direct", "mapped", "packed"])
async def test_a_flipped_bit_of_a_long_read_is_found(shapes, folder, path, digest):
    box = Box("full", GROUP.layers, GROUP.parts, 0, GROUP.num_kv_heads, 0, MAX_TOKENS)

    def flip(offer_id: str) -> Flip:
        chosen = chosen_pieces(box, offer_id=offer_id, one_in=ONE_IN[digest])
        piece = piece_of(box, int(chosen[-1]))
        return Flip(0, piece.layer, piece.part, piece.head, piece.start, 1, 4)

    async with (
        reader_at(folder, path, digest=digest) as runtime,
        two_engines_at(shapes.prefill, runtime, path, "blocks") as (source, target),
    ):
        handoff = Handoff(runtime, source, target)
        assert await handoff.run(None, MAX_TOKENS) is None
        num_equal = compared(runtime, "equal")
        failed = await handoff.run(flip, MAX_TOKENS)

        assert failed is not None
        assert failed.code is ErrorCode.DIGEST_MISMATCH
        assert "1 of " in failed.message
        assert digest == "sampled" or num_equal == num_pieces_compared(
            source, target, MAX_TOKENS, 0
        )


async def test_nobody_asks_about_a_long_read_that_was_stopped(shapes, folder, monkeypatch):
    async with (
        reader_at(folder, "direct") as runtime,
        two_engines_at(shapes.prefill, runtime, "direct", "blocks") as (source, target),
    ):
        reader = runtime.service._reader
        not_yet, asked = [], []
        monkeypatch.setitem(reader._driver.commands, ev.AskDigests, not_yet.append)
        monkeypatch.setattr(reader._compare, "_ask", asked.append)
        offer = await source.prefill.offer(
            uuid.uuid4().hex, num_tokens=16, block_ids=source.whole_blocks(5, 16)
        )
        ours = target.some_blocks(6, 16)
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids=ours)
        await until(lambda: not_yet)
        await fetch.cancel(release_offer=True)
        failed = await failure_of(fetch)
        await offer.released()
        for command in not_yet:
            reader._compare._ask_late(command)

        assert failed.code is ErrorCode.CANCELLED
        assert asked == []


async def test_bytes_that_differ_as_the_offer_has_ended_are_no_mismatch(
    shapes, folder, monkeypatch
):
    """Its engine has other uses for the blocks then; nobody is told that KV arrives wrong."""
    async with (
        reader_at(folder, "direct") as runtime,
        two_engines_at(shapes.prefill, runtime, "direct", "blocks") as (source, target),
    ):
        commands = runtime.service._reader._driver.commands
        compare_now = commands[ev.StartCompare]
        landed = []
        monkeypatch.setitem(commands, ev.StartCompare, landed.append)
        monkeypatch.setattr(runtime.service._leases, "on_event", lambda *_: None)
        offer = await source.prefill.offer(
            uuid.uuid4().hex, num_tokens=16, block_ids=source.whole_blocks(5, 16)
        )
        ours = target.some_blocks(6, 16)
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids=ours)
        await until(lambda: landed)
        await offer.withdraw()
        await offer.released()
        Flip(0, GROUP.layers[0], GROUP.parts[0], 0, 3, 1, 4).apply(target, ours, 0, 16)
        for command in landed:
            compare_now(command)
        failed = await failure_of(fetch)

        assert failed.code is ErrorCode.OFFER_WITHDRAWN
        assert compared(runtime, "different") == 0
