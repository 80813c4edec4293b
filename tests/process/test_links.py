"""A link with agents: states alone, groups left out, releases, numbers that come later."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvbus.engine import Link, Rendezvous, describe_tensors
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, state_group
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, started, wait_until

FULL = GroupSpec("full", (0, 1), 16, 2, 8, "float32")
ROW = state_group("row", (), (StatePart("row", 1, 64),), optional=True)
NUM_TOKENS = 40
WITHIN_S = 60.0


class Engine:
    """An engine of one rank, its numbers drawn anew; ``rows`` is [block, byte]."""

    def __init__(self, engine_id: str, *groups: GroupSpec) -> None:
        self.spec = EngineSpec(engine_id, "m", 1, groups)
        self.cache = torch.randn(2, 2, 8, 16, 2, 8)
        self.rows = torch.randint(256, (4, 64), dtype=torch.uint8)

    @contextmanager
    def linked(self, agent: AgentProcess) -> Iterator[Link]:
        tensors = {"full": self.cache} | ({"row": self.rows} if len(self.spec.groups) > 1 else {})
        axes = {"full": "layer kv block token head dim", "row": "block dim"}
        memory = describe_tensors(tensors, axes, engine=self.spec)
        with Link(agent.attach, self.spec, memory=memory) as link:
            yield link


def test_a_state_of_no_layer_is_fetched_alone(prefill: AgentProcess, decode: AgentProcess) -> None:
    source, target = Engine("states-p", FULL, ROW), Engine("states-d", FULL, ROW)
    with source.linked(prefill) as offering, target.linked(decode) as fetching:
        before = target.cache.clone()
        offer = offering.offer(
            "r", num_tokens=NUM_TOKENS, block_ids={"full": [7, 3, 4], "row": [2]}
        )
        fetch = fetching.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, first_token=NUM_TOKENS, block_ids={"row": [1]}
        )
        fetch.ended.wait(WITHIN_S)

        assert offer.ended.wait(WITHIN_S) is Outcome.COMPLETED
        assert torch.equal(target.rows[1], source.rows[2])
        assert torch.equal(target.cache, before)


def test_readers_may_be_without_a_group_that_is_optional(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    source, target = Engine("states-p", FULL, ROW), Engine("states-d", FULL)
    with source.linked(prefill) as offering, target.linked(decode) as fetching:
        offer = offering.offer(
            "r", num_tokens=NUM_TOKENS, block_ids={"full": [7, 3, 4], "row": [2]}
        )
        fetch = fetching.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids={"full": [0, 1, 2]})
        fetch.ended.wait(WITHIN_S)

        got, sent = target.cache[:, :, [0, 1]], source.cache[:, :, [7, 3]]
        assert torch.equal(got, sent)


def test_offers_may_be_without_a_group_that_is_optional(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    source, target = Engine("states-p", FULL), Engine("states-d", FULL, ROW)
    with source.linked(prefill) as offering, target.linked(decode) as fetching:
        rows = target.rows.clone()
        offer = offering.offer("r", num_tokens=NUM_TOKENS, block_ids={"full": [7, 3, 4]})
        tables = {"full": [0, 1, 2], "row": [1]}
        refused = fetching.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=tables)
        failure = refused.ended.exception(WITHIN_S)
        again = offering.offer("again", num_tokens=NUM_TOKENS, block_ids={"full": [7, 3, 4]})
        fetch = fetching.fetch(
            again.ticket, num_tokens=NUM_TOKENS, block_ids={"full": [0, 1, 2], "row": []}
        )
        fetch.ended.wait(WITHIN_S)

        assert "has no group row" in str(failure)
        got, sent = target.cache[:, :, [0, 1]], source.cache[:, :, [7, 3]]
        assert torch.equal(got, sent)
        assert torch.equal(target.rows, rows)


def test_what_is_not_wanted_is_released_also_after_a_fetch_that_was_refused(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    source, target = Engine("states-p", FULL), Engine("states-d", FULL)
    with source.linked(prefill) as offering, target.linked(decode) as fetching:
        sealed = offering.offer("sealed", num_tokens=16, block_ids={"full": [1]})
        refused = fetching.fetch(sealed.ticket, num_tokens=16, block_ids={"full": [1, 2]})
        failure = refused.ended.exception(WITHIN_S)
        fetching.release(sealed.ticket)

        assert getattr(failure, "stage", "") == "requested"
        assert sealed.ended.wait(WITHIN_S) is Outcome.COMPLETED


def test_a_fetch_that_is_cancelled_while_its_agent_is_busy_releases_its_offer() -> None:
    source, target = Engine("states-p", FULL), Engine("states-d", FULL)
    with (
        started("prefill", "decode", max_handoffs=1) as agents,
        source.linked(agents.all[0]) as offering,
        target.linked(agents.all[1]) as fetching,
    ):
        name = Rendezvous(transfer_id="of-nobody-" * 4, endpoint=agents.all[0].peer).to_json()
        first = fetching.fetch(name, num_tokens=16, block_ids={"full": [1]})
        wait_until(lambda: agents.all[1].status()["counts"]["fetches"], "the agent is full")
        offer = offering.offer("r", num_tokens=16, block_ids={"full": [7]})
        second = fetching.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        agents.all[1].says("request.refused")

        second.cancel(release_offer=True).wait(WITHIN_S)
        first.cancel()

        assert getattr(second.ended.exception(WITHIN_S), "code", "") == "cancelled"
        assert offer.ended.wait(WITHIN_S) is Outcome.COMPLETED


@pytest.mark.parametrize("num_tokens", [0, 5, 40, 48])
def test_without_a_number_of_tokens_a_fetch_is_of_what_the_offer_has_when_sealed(
    prefill: AgentProcess, decode: AgentProcess, num_tokens: int
) -> None:
    source, target = Engine("states-p", FULL), Engine("states-d", FULL)
    with source.linked(prefill) as offering, target.linked(decode) as fetching:
        before = target.cache.clone()
        offer = offering.offer("r", num_tokens=0, block_ids={"full": [7, 3, 4]}, sealed=False)
        fetch = fetching.fetch(offer.ticket, block_ids={"full": [0, 1, 2]})
        offer.extend(num_tokens // 2)
        offer.extend(num_tokens)
        offer.seal()

        assert fetch.ended.wait(WITHIN_S).num_tokens == num_tokens
        got, sent = target.cache[:, :, [0, 1, 2]].flatten(2, 3), source.cache[:, :, [7, 3, 4]]
        assert torch.equal(got[:, :, :num_tokens], sent.flatten(2, 3)[:, :, :num_tokens])
        kept = before[:, :, [0, 1, 2]].flatten(2, 3)[:, :, num_tokens:]
        assert torch.equal(got[:, :, num_tokens:], kept)


@pytest.mark.anyio
async def test_in_an_event_loop_the_same_calls_are_awaited(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    source, target = Engine("states-p", FULL), Engine("states-d", FULL)
    memories = [
        describe_tensors({"full": one.cache}, "layer kv block token head dim", engine=one.spec)
        for one in (source, target)
    ]
    async with (
        Link(prefill.attach, source.spec, memory=memories[0]) as offering,
        Link(decode.attach, target.spec, memory=memories[1]) as fetching,
    ):
        offer = await offering.offer("r", num_tokens=16, block_ids={"full": [7]})
        fetch = fetching.fetch(offer.ticket, num_tokens=16, block_ids={"full": [0]})
        await fetch.ended

        assert await offer.ended is Outcome.COMPLETED
        assert torch.equal(target.cache[:, :, 0], source.cache[:, :, 7])
