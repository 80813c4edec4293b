"""Who hears the events and reaches the peer socket has no right, and so no effect."""

import json
import uuid
from functools import partial

import pytest

from kvbus.errors import ErrorCode
from kvbus.protocol.engine import Outcome
from kvbus.protocol.ticket import Ticket
from tests.agents import until
from tests.engines import expected_after, failure_of, pair, same
from tests.plain_sockets import ask
from tests.security.listening import FORGED, stranger

pytestmark = pytest.mark.anyio
NUM_TOKENS = 40
NUM_HANDOFFS = 40


async def test_a_stranger_who_asks_for_all_that_it_hears_of_changes_no_handoff(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        with stranger(prefill) as listening:
            await until(lambda: listening.heard)
            for number in range(NUM_HANDOFFS):
                theirs = source.some_blocks(number, NUM_TOKENS)
                ours = target.some_blocks(number + 1, NUM_TOKENS)
                offer = await source.prefill.offer(
                    uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs, sealed=False
                )
                fetch = target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours)
                await until(partial(listening.has_heard, "lease.granted", offer.offer_id))
                wanted = expected_after(
                    target.snapshot(), source, theirs, target, ours, num_tokens=NUM_TOKENS
                )
                await offer.seal()
                await fetch.completed()
                outcome = await offer.released()

                assert outcome is Outcome.COMPLETED
                assert same(target.snapshot(), wanted)

    assert listening.num_asked >= 8 * NUM_HANDOFFS
    assert listening.accepted == []
    codes = {error["code"] for error in listening.refusals}
    assert codes <= {ErrorCode.FORBIDDEN, ErrorCode.STALE}
    forbidden = [error for error in listening.refusals if error["code"] == ErrorCode.FORBIDDEN]
    assert len(forbidden) >= 5 * NUM_HANDOFFS
    assert all(error["detail"] == {} for error in forbidden)


async def test_no_event_log_line_status_metric_or_story_has_a_right(prefill, decode):
    rights: list[str] = []
    async with pair(prefill.attach, decode.attach) as (source, target):
        boots = [source.control.boot, target.control.boot]
        with stranger(prefill) as listening, stranger(decode) as elsewhere:
            await until(lambda: listening.heard and elsewhere.heard)
            for wrong in (False, True):
                offer = await source.prefill.offer(
                    uuid.uuid4().hex, num_tokens=16, block_ids={"full": [1]}
                )
                rights.append(offer.ticket["secret"])
                ticket = {**offer.ticket, "secret": FORGED} if wrong else offer.ticket
                fetch = target.decode.fetch(ticket, num_tokens=16, block_ids={"full": [2]})
                if wrong:
                    assert (await failure_of(fetch)).code is ErrorCode.FORBIDDEN
                    await offer.withdraw()
                else:
                    await fetch.completed()
                story = [
                    ask(agent.peer, "status", {kind: one})
                    for agent in (prefill, decode)
                    for kind, one in (("offer_id", offer.offer_id), ("fetch_id", fetch.fetch_id))
                ]
        texts = {
            "events": repr(listening.heard + elsewhere.heard),
            "logs": "\n".join(prefill.lines() + decode.lines()),
            "status": json.dumps(story),
            "refusals": repr(listening.refusals),
            "reprs": repr((offer, fetch, Ticket.from_json(offer.ticket))),
        }

    assert decode.says("handoff.story")
    for secret in [*rights, *boots]:
        assert [where for where, text in texts.items() if secret in text] == []
