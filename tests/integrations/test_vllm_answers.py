"""Answers that are offered for the next turn, with real agents: they hold a share at most."""

import base64
import secrets
from collections.abc import Iterator

import pytest

from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.answers import Answers
from kvbus.integrations.vllm.sessions import control_link
from kvbus.integrations.vllm.transfer_params import HandoffParams
from kvbus.keys import Role
from kvbus.protocol import AgentRole
from tests.agents import Agents, agents_ended, wait_until
from tests.integrations.vllm_sides import BLOCKS, GROUP, PROMPT_TOKENS, Side, both_sides, side_of
from tests.keyring import KeyRing

DIGEST = "of prompt and answer"


def publish(answers: Answers, request_id: str) -> str:
    """The offer of a request at its end; empty when there is none."""
    ticket = answers.publish(request_id, DIGEST, BLOCKS, PROMPT_TOKENS)
    return ticket["offer_id"] if ticket is not None else ""


def answers_of(side: Side, max_blocks: int, ttl_s: float = 60.0) -> Answers:
    wait_until(side.is_up, "the engine is registered")
    return Answers(side.offers, max_blocks=max_blocks, ttl_s=ttl_s)


def test_an_answer_is_offered_at_its_end_and_read_once(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        ticket = answers_of(offering, 3).publish("r", DIGEST, BLOCKS, PROMPT_TOKENS)
        assert ticket is not None

        loading.load("next", HandoffParams(ticket, PROMPT_TOKENS, DIGEST))

        loading.until(lambda: loading.over == ["next"], "the load is over")
        offering.until(lambda: offering.sent == ["r"], "its blocks are the engine's again")
        assert loading.failed == []


def test_the_ticket_of_an_answer_is_of_its_tokens_only(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        ticket = answers_of(offering, 3, ttl_s=1.0).publish("r", DIGEST, BLOCKS, PROMPT_TOKENS)
        assert ticket is not None

        loading.load("next", HandoffParams(ticket, PROMPT_TOKENS, "of others"))

        loading.until(lambda: loading.over == ["next"], "the load is over")
        assert loading.failed == ["next"]


@pytest.fixture(scope="module")
def signing() -> Iterator[Agents]:
    """Two agents of a site that signs its tickets."""
    with agents_ended(Agents) as made:
        ring, key = KeyRing(made.folder), made.folder / "ticket.key"
        key.touch(mode=0o600)
        key.write_bytes(base64.b64encode(secrets.token_bytes(32)))
        for role in (Role.PREFILL, Role.DECODE):
            ring.prepare(made, role, role.value, ticket_keys=[str(key)])
        made.start(*made.all)
        yield made
        made.check()


@pytest.mark.parametrize(("digest", "failed"), [(DIGEST, []), ("of others", ["next"])])
def test_where_tickets_are_signed_they_say_which_tokens_they_are_of(
    signing: Agents, digest: str, failed: list[str]
) -> None:
    with both_sides(*signing.all) as (offering, loading):
        ticket = answers_of(offering, 3, ttl_s=1.0).publish("r", DIGEST, BLOCKS, PROMPT_TOKENS)
        assert ticket is not None

        loading.load("next", HandoffParams(ticket, PROMPT_TOKENS, digest))

        loading.until(lambda: loading.over == ["next"], "the load is over")
        assert loading.failed == failed
        assert ticket["signature"]


def test_the_oldest_answer_goes_for_one_that_would_be_too_much(agents: Agents) -> None:
    with side_of(agents.all[0].attach, "d") as side:
        answers = answers_of(side, max_blocks=2 * len(BLOCKS[0]))

        assert all(publish(answers, request_id) for request_id in ("a", "b", "c"))

        side.until(lambda: side.sent == ["a"], "the oldest is the engine's again")
        assert agents.all[0].status()["counts"]["offers"] == 2


def test_what_was_read_makes_room(agents: Agents) -> None:
    with side_of(agents.all[0].attach, "d") as side:
        answers = answers_of(side, max_blocks=2 * len(BLOCKS[0]))
        first, _ = publish(answers, "a"), publish(answers, "b")
        answers.forget([first, "one that was none"])

        assert publish(answers, "c")

        side.step()
        assert side.sent == []
        assert agents.all[0].status()["counts"]["offers"] == 3


def test_an_answer_that_is_more_than_the_share_is_not_offered(agents: Agents) -> None:
    with side_of(agents.all[0].attach, "d") as side:
        assert not publish(answers_of(side, max_blocks=2), "r")


def test_an_answer_comes_back_at_the_end_of_its_time(agents: Agents) -> None:
    with side_of(agents.all[0].attach, "d") as side:
        assert publish(answers_of(side, 3, ttl_s=0.5), "r")

        side.until(lambda: side.sent == ["r"], "its blocks are the engine's again")


def test_a_vllm_that_is_a_producer_for_vllm_loads_nothing_and_says_why(agents: Agents) -> None:
    """Only of others vLLM keeps blocks until the steps that may write them are over."""
    spec = EngineSpec("e", "model", 1, (GROUP,))
    link = control_link(agents.all[1].attach, spec, (), kv_role="kv_producer")
    try:
        wait_until(lambda: "kv_role" in str(link.problem), "it says what to do")
    finally:
        link.close()


def test_an_agent_of_the_other_kind_is_refused_with_what_to_do(agents: Agents) -> None:
    spec = EngineSpec("e", "model", 1, (GROUP,))
    link = control_link(agents.all[1].attach, spec, (), AgentRole.PREFILL)
    try:
        wait_until(lambda: "exchange the two" in str(link.problem), "it says what to do")
    finally:
        link.close()
