"""A link with agents: states alone, omitted groups, releases, and fetches without a count."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvbus.engine import Link, Rendezvous, describe_tensors
from kvbus.errors import ClosedError, LocalError
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, state_group
from kvbus.protocol import Outcome
from tests.support.agents import AgentProcess, Agents, started, wait_until

FULL = GroupSpec("full", (0, 1), 16, 2, 8, "float32")
ROW = state_group("row", (), (StatePart("row", 1, 64),), optional=True)
AXES = {"full": "layer kv block token head dim", "row": "block dim"}
OFFERED: dict[str, Any] = {"num_tokens": 40, "block_ids": {"full": [7, 3, 4]}}
FETCHED: dict[str, Any] = {"num_tokens": 40, "block_ids": {"full": [0, 1, 2]}}
WITHIN_S = 60.0


@dataclass
class Engine:
    """A linked engine of one rank with random content; axes of ``rows``: block, byte."""

    link: Link
    cache: torch.Tensor
    rows: torch.Tensor

    def tokens(self, block_ids: list[int]) -> torch.Tensor:
        """Axes: layer, part, token, head, dim."""
        return self.cache[:, :, block_ids].flatten(2, 3)


@contextmanager
def linked(agent: AgentProcess, *groups: GroupSpec) -> Iterator[Engine]:
    spec = EngineSpec(f"states-{agent.role}", "m", 1, groups)
    tensors = {
        "full": torch.randn(2, 2, 8, 16, 2, 8),
        "row": torch.randint(256, (4, 64), dtype=torch.uint8),
    }
    has = {group.name: tensors[group.name] for group in groups}
    memory = describe_tensors(has, AXES, engine=spec)
    with Link(agent.attach, spec, memory=memory) as link:
        yield Engine(link, tensors["full"], tensors["row"])


@contextmanager
def both(
    agents: Agents, theirs: tuple[GroupSpec, ...] = (FULL,), ours: tuple[GroupSpec, ...] = (FULL,)
) -> Iterator[tuple[Engine, Engine]]:
    with linked(agents.all[0], *theirs) as source, linked(agents.all[1], *ours) as target:
        yield source, target


def test_a_state_of_no_layer_is_fetched_alone(agents: Agents) -> None:
    with both(agents, (FULL, ROW), (FULL, ROW)) as (source, target):
        before = target.cache.clone()
        tables = {**OFFERED["block_ids"], "row": [2]}
        offer = source.link.offer("r", num_tokens=40, block_ids=tables)
        fetch = target.link.fetch(
            offer.ticket, num_tokens=40, first_token=40, block_ids={"row": [1]}
        )
        fetch.ended.wait(WITHIN_S)
        assert offer.ended.wait(WITHIN_S) is Outcome.COMPLETED
        assert torch.equal(target.rows[1], source.rows[2])
        assert torch.equal(target.cache, before)


def test_readers_and_offers_may_lack_optional_group(agents: Agents) -> None:
    with both(agents, (FULL, ROW), (FULL,)) as (source, target):
        tables = {**OFFERED["block_ids"], "row": [2]}
        offer = source.link.offer("r", num_tokens=40, block_ids=tables)
        target.link.fetch(offer.ticket, **FETCHED).ended.wait(WITHIN_S)
        assert torch.equal(target.tokens([0, 1]), source.tokens([7, 3]))
    with both(agents, (FULL,), (FULL, ROW)) as (source, target):
        rows = target.rows.clone()
        failures, offers = [], [source.link.offer(name, **OFFERED) for name in "rs"]
        for offer, row in zip(offers, ([1], []), strict=True):
            tables = {**FETCHED["block_ids"], "row": row}
            fetch = target.link.fetch(offer.ticket, num_tokens=40, block_ids=tables)
            failures.append(str(fetch.ended.exception(WITHIN_S)))
        assert "has no group row" in failures[0]
        assert failures[1] == "None"
        assert torch.equal(target.tokens([0, 1]), source.tokens([7, 3]))
        assert torch.equal(target.rows, rows)


def test_unwanted_offer_is_released_even_after_refused_fetch(agents: Agents) -> None:
    block: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}
    with both(agents) as (source, target):
        offers = [source.link.offer(name, **block) for name in "rs"]
        refused = [
            target.link.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1, 2]})
            for offer in offers
        ]
        failures = [fetch.ended.exception(WITHIN_S) for fetch in refused]
        target.link.release(offers[0].ticket)
        refused[1].cancel(release_offer=True)
        assert [getattr(failure, "stage", "") for failure in failures] == ["requested"] * 2
        outcomes = [offer.ended.wait(WITHIN_S) for offer in offers]
        assert outcomes == [Outcome.COMPLETED] * 2


def test_fetch_cancelled_while_agent_is_busy_releases_offer() -> None:
    with started("prefill", "decode", max_handoffs=1) as full, both(full) as (source, target):
        prefill, decode = full.all
        name = Rendezvous(transfer_id="of-nobody-" * 4, endpoint=prefill.peer).to_json()
        first = target.link.fetch(name, num_tokens=16, block_ids={"full": [1]})
        wait_until(lambda: decode.status()["counts"]["fetches"], "the agent is full")
        offer = source.link.offer("r", num_tokens=16, block_ids={"full": [7]})
        second = target.link.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        decode.says("request.refused")
        second.cancel(release_offer=True).wait(WITHIN_S)
        first.cancel()
        assert getattr(second.ended.exception(WITHIN_S), "code", "") == "cancelled"
        assert offer.ended.wait(WITHIN_S) is Outcome.COMPLETED


def test_release_before_link_is_open_happens_when_it_opens(agents: Agents) -> None:
    prefill, decode = agents.all[:2]
    spec = EngineSpec("releases", "m", 1, (FULL,))
    tensors = {"full": torch.zeros(2, 2, 8, 16, 2, 8)}
    memory = describe_tensors(tensors, AXES["full"], engine=spec)
    link = Link(decode.attach, spec, memory=memory)
    with linked(prefill, FULL) as source:
        offer = source.link.offer("r", **OFFERED)
        link.release(offer.ticket)
        with link:
            assert offer.ended.wait(WITHIN_S) is Outcome.COMPLETED


def test_a_callback_may_close_its_link_and_may_not_wait(agents: Agents) -> None:
    num_threads = threading.active_count()
    with linked(agents.all[0], FULL) as source:
        offer, other = (source.link.offer(name, **OFFERED) for name in "rs")
        closed = threading.Event()

        def close() -> None:
            with pytest.raises(LocalError, match="await"):
                other.ended.wait()
            source.link.close()
            closed.set()

        offer.ended.add_callback(close)
        offer.withdraw()
        wait_until(lambda: threading.active_count() == num_threads, "the end of the link's thread")
        with pytest.raises(ClosedError):
            source.link.offer("t", **OFFERED)
        with pytest.raises(ClosedError):
            other.ended.wait(WITHIN_S)
    assert closed.is_set()


def test_fetch_without_token_count_gets_all_of_sealed_offer(agents: Agents) -> None:
    with both(agents) as (source, target):
        for num_tokens in (0, 5, 48):
            before = target.tokens([0, 1, 2])
            offer = source.link.offer("r", **{**OFFERED, "num_tokens": 0}, sealed=False)
            fetch = target.link.fetch(offer.ticket, block_ids=FETCHED["block_ids"])
            offer.extend(num_tokens // 2)
            offer.extend(num_tokens)
            offer.seal()
            assert fetch.ended.wait(WITHIN_S).num_tokens == num_tokens
            wanted = source.tokens([7, 3, 4])
            wanted[:, :, num_tokens:] = before[:, :, num_tokens:]
            assert torch.equal(target.tokens([0, 1, 2]), wanted)
            offer.ended.wait(WITHIN_S)
