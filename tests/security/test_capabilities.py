"""Who hears the events and reaches the peer socket has no right, and so no effect."""

import json
import uuid
from functools import partial
from typing import Any

import pytest

from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome, Ticket
from tests.agents import AgentProcess, until
from tests.engines import Engine, expected_after, failure_of, pair, same
from tests.plain_sockets import ask
from tests.security.listening import FORGED, stranger
from tests.security.test_handshakes import handshake

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
    async with pair(prefill.attach, decode.attach) as (source, target):
        rights = [source.control.boot, target.control.boot]
        with stranger(prefill) as listening, stranger(decode) as elsewhere:
            await until(lambda: listening.heard and elsewhere.heard)
            ends = []
            for reader in ("ours", "forged", "plain"):
                offer = await source.prefill.offer(reader, num_tokens=16, block_ids={"full": [1]})
                rights.append(offer.ticket["secret"])
                if reader == "plain":
                    rights += read_by_hand(prefill, source, offer.ticket)
                    continue
                forged = {"secret": FORGED} if reader == "forged" else {}
                fetch = target.decode.fetch(
                    {**offer.ticket, **forged}, num_tokens=16, block_ids={"full": [2]}
                )
                ends.append(await failure_of(fetch) if forged else await fetch.completed())
                if forged:
                    await offer.withdraw()
            story = [
                ask(agent.peer, op, {kind: one})
                for agent in (prefill, decode)
                for op in ("status", "trace")
                for kind, one in (("offer_id", offer.offer_id), ("fetch_id", fetch.fetch_id))
            ]
        texts = {
            "events": repr(listening.heard + elsewhere.heard),
            "logs": "\n".join(prefill.lines() + decode.lines()),
            "metrics": metrics_of(prefill) + metrics_of(decode),
            "status": json.dumps(story),
            "refusals": repr(listening.refusals),
            "reprs": repr((offer, fetch, ends, Ticket.from_json(offer.ticket))),
        }

    assert decode.says("handoff.story")
    assert "Confirmed" in texts["status"]
    assert len(rights) == 7
    for secret in rights:
        assert [where for where, text in texts.items() if secret in text] == []


def read_by_hand(agent: AgentProcess, source: Engine, ticket: dict[str, Any]) -> list[str]:
    """What a reader is told that nobody else may know: the access, and the lease's token."""
    right = {key: ticket[key] for key in ("engine_instance", "offer_id", "secret")}
    done = ask(agent.peer, "handshake", handshake(source, **right))["ok"]
    offer = {key: ticket[key] for key in ("agent_boot", "offer_id")}
    claim = {**offer, "secret": ticket["secret"], "reader_id": "plain", "lease_s": 10.0}
    granted = ask(agent.peer, "claim", claim)["ok"]
    lease = {**offer, "epoch": granted["epoch"]}
    for token, answer in ((FORGED, "error"), (granted["token"], "ok"), (granted["token"], "ok")):
        assert answer in ask(agent.peer, "confirm", {**lease, "token": token})
    assert "error" in ask(agent.peer, "confirm", {**lease, "token": FORGED}), "though it is over"
    return [done["access"], granted["token"]]


def metrics_of(agent: AgentProcess) -> str:
    return agent.page("/metrics")[1]
