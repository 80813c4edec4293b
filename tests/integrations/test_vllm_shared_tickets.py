"""Several requests of one decode engine with one ticket: one loads, and the others wait for it."""

from kvbus.integrations.vllm.loads import Load
from kvbus.integrations.vllm.transfer_params import HandoffParams
from tests.agents import Agents
from tests.integrations.vllm_sides import LOADED_BLOCKS, PROMPT_TOKENS, Side, both_sides


def expect(side: Side, handoff: HandoffParams, *request_ids: str) -> None:
    """The requests have come, all with this ticket."""
    for request_id in request_ids:
        side.loads.expect(Load(request_id, PROMPT_TOKENS, handoff))


def load(side: Side, request_id: str) -> None:
    """vLLM has blocks for a request."""
    num_tokens = side.loads.matched(request_id, 0)
    assert num_tokens == PROMPT_TOKENS
    side.loads.start(request_id, LOADED_BLOCKS, num_tokens)


def test_one_request_loads_and_the_others_wait_until_it_is_computed_on(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        expect(loading, offering.offered("r"), "0_r", "1_r", "2_r")

        load(loading, "0_r")
        assert loading.loads.matched("1_r", 0) is None
        loading.until(lambda: loading.over, "the load is over")
        assert loading.loads.matched("1_r", 0) is None, "it is not in the prefix cache yet"
        loading.loads.note_computed({"0_r"})

        assert [loading.loads.matched(each, 32) for each in ("1_r", "2_r")] == [0, 0]
        loading.loads.start("1_r", LOADED_BLOCKS, 0)
        assert (loading.over, loading.failed) == (["0_r"], [])
        offering.until(lambda: offering.sent, "the blocks came back")
        agents.check()


def test_a_ticket_is_looked_at_when_its_request_comes_and_not_in_each_step(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        again = HandoffParams(dict(handoff.ticket), PROMPT_TOKENS, "")
        expect(loading, handoff, "0_r")
        expect(loading, again, "1_r")
        again.ticket["blocks"] = "others"  # who looks again sees another ticket

        load(loading, "0_r")
        assert loading.loads.matched("1_r", 0) is None


def test_a_request_that_comes_again_later_computes_what_the_cache_lacks(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        loading.load("r", handoff)
        loading.until(lambda: loading.over, "the load is over")
        loading.loads.note_computed({"r"})

        expect(loading, handoff, "again")

        assert loading.loads.matched("again", 0) == 0
        assert not loading.failed


def test_when_the_first_request_ends_before_its_load_the_next_one_loads(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        expect(loading, offering.offered("r"), "0_r", "1_r")
        assert loading.loads.matched("0_r", 0) == PROMPT_TOKENS
        assert loading.loads.matched("1_r", 0) is None

        loading.loads.give_up("0_r")
        load(loading, "1_r")

        loading.until(lambda: loading.over, "the load is over")
        assert (loading.over, loading.failed) == (["1_r"], [])
        agents.check()


def test_a_request_that_ends_while_it_waits_leaves_the_offer_to_the_one_that_loads(
    agents: Agents,
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        expect(loading, offering.offered("r"), "0_r", "1_r")
        assert loading.loads.matched("0_r", 0) == PROMPT_TOKENS

        loading.loads.give_up("1_r")
        load(loading, "0_r")

        loading.until(lambda: loading.over, "the load is over")
        assert not loading.failed


def test_when_the_load_is_given_up_nobody_waits_for_it(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        expect(loading, offering.offered("r"), "0_r", "1_r")
        load(loading, "0_r")

        loading.loads.give_up("0_r")

        assert loading.loads.matched("1_r", 0) == 0
        loading.until(lambda: loading.over, "the load is over")
        agents.check()
