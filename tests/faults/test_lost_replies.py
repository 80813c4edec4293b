"""The reply that ends an offer is lost, and its connection too: the fetch completes nonetheless."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvbus.protocol.engine import Outcome
from tests.agents import AgentProcess, until
from tests.chaos.links import PROXY_HOST, READ_BYTES, Connection, Link
from tests.engines import Engine, pair, story_of, works

pytestmark = pytest.mark.anyio

NUM_LOST = 3
NUM_TOKENS = 40
LAST_WORDS = (b"\xa2op\xa4take", b"\xa2op\xa7confirm")
"""The operations, as msgpack has them in a request."""


class LosingLink(Link):
    """Once the last word on an offer was asked for, carries no answer any more."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.is_losing = False
        self.num_lost = 0

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        recorded: Connection | None,
    ) -> None:
        while some := await source.read(READ_BYTES):
            if recorded is not None and self.is_losing and any(op in some for op in LAST_WORDS):
                self.num_lost += 1
                self.blacken()
            if recorded is None:
                await self._passes.wait()
            sink.write(some)
            await sink.drain()

    def lose(self) -> None:
        """The next one has no answer; `restore` ends its connection."""
        self.is_losing = True

    def restore(self) -> None:
        """What is not carried yet never will be; the next connection is a good one."""
        self.is_losing = False
        self.cut()
        self.heal()


@asynccontextmanager
async def lossy(prefill: AgentProcess) -> AsyncIterator[LosingLink]:
    """A link to the peer socket that loses, and one to the events that does not."""
    peer, events = (
        int(prefill.settings[key].rsplit(":", 1)[1]) for key in ("peer_bind", "events_bind")
    )
    losing, other = LosingLink(peer), Link(events)
    await losing.open()
    await other.open()
    try:
        yield losing
    finally:
        prefill.started["peer"] = prefill.settings["peer_bind"]  # it is looked at without a link
        await losing.close()
        await other.close()


async def hand_over(source: Engine, target: Engine, link: LosingLink, *, times_out: bool) -> None:
    """A handoff whose last reply is lost when the offer has been consumed already.

    It ``times_out``, or is found when its request is sent again.
    """
    theirs, ours = source.some_blocks(3, NUM_TOKENS), target.some_blocks(4, NUM_TOKENS)
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs)
    link.lose()
    fetch = target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours)
    assert await offer.released() is Outcome.COMPLETED
    assert fetch.notice is None
    if times_out:
        await until(lambda: "StepFailed" in str(story_of(target, fetch)))

    link.restore()

    await fetch.completed()


@pytest.mark.parametrize("request_timeout_s", [0.5, 20.0], ids=["asked anew", "sent again"])
@pytest.mark.parametrize("optimistic", [True, False], ids=["taken", "confirmed"])
async def test_an_offer_whose_last_reply_was_lost_is_a_completed_fetch(
    fresh, optimistic, request_timeout_s
):
    prefill = fresh.prefill(advertise_host=PROXY_HOST)
    decode = fresh.decode(optimistic=optimistic, request_timeout_s=request_timeout_s)
    fresh.start(prefill, decode)
    async with (
        lossy(prefill) as link,
        pair(prefill.attach, decode.attach) as (source, target),
    ):
        assert await works(source, target)

        for _ in range(NUM_LOST):
            await hand_over(source, target, link, times_out=request_timeout_s < 1)

        assert link.num_lost >= NUM_LOST
        assert await works(source, target)
