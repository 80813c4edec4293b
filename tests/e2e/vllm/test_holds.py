"""Requests that wait in the decode engine's queue for longer than their offers' time to wait."""

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.scheduled import LENGTH, WITHIN_S, EngineOf, pair_of, prompt_of, what_follows
from tests.support.agents import Agents, wait_until

if TYPE_CHECKING:
    from tests.e2e.vllm.scheduled import Pair

NUM_QUEUED, TTL_S = 12, 5.0


def num_held(engines: "Pair") -> int:
    return int(engines.agents.all[1].status()["counts"]["holds"])


def test_offers_of_queued_requests_do_not_expire(agents: Agents, engine_of: EngineOf) -> None:
    """Decode has room for one, and does not step before an offer without a request expired."""
    options = {"num_requests": NUM_QUEUED + 1, "num_to_decode": 1, "offer_ttl_s": TTL_S}
    with pair_of(agents, engine_of, **options) as engines:
        prompts = [prompt_of(LENGTH, seed) for seed in range(NUM_QUEUED)]
        answers = [engines.decode.ask(one, 3, engines.params(one)) for one in prompts]
        engines.params(prompt_of(LENGTH, NUM_QUEUED))
        wait_until(lambda: num_held(engines) == NUM_QUEUED, "all are held", WITHIN_S)
        wait_until(lambda: engines.num_offers <= NUM_QUEUED, "one has expired", WITHIN_S)

        engines.decode.until_ended(*answers)

        assert engines.decode.figures["loads_failed"] == []
        assert engines.decode.figures["loads"] == NUM_QUEUED * ["completed"]
        assert [answer.tokens for answer in answers] == [what_follows(one, 3) for one in prompts]
        assert num_held(engines) == 0


def test_aborted_request_is_held_no_longer(agents: Agents, engine_of: EngineOf) -> None:
    with pair_of(agents, engine_of) as engines:
        engines.decode.ask(prompt_of(LENGTH, 1), 3, engines.params(prompt_of(LENGTH, 1)))
        wait_until(lambda: num_held(engines) == 1, "it is held", WITHIN_S)
        engines.decode.give_up()
        wait_until(lambda: num_held(engines) == 0, "it is released", WITHIN_S)
        engines.wait_no_offer()
