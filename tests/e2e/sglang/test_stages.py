"""Two pipeline stages of prefill to one, pages of one token to larger ones."""

import pytest

from tests.e2e.sglang.clusters import CHUNK_TOKENS, Cluster, prompt_of
from tests.e2e.sglang.conftest import Alone
from tests.e2e.sglang.servers import RefusedError
from tests.e2e.sglang.test_pages import works_again

pytestmark = pytest.mark.long
CLUSTER = "stages"
LENGTHS = (1, 16, 17, CHUNK_TOKENS, CHUNK_TOKENS + 1, 700)


@pytest.mark.kind("pipeline stages of prefill", on="servers")
def test_stages_hand_off_to_one(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]

    said = [pair.handoff(prompt) for prompt in prompts]
    again = [pair.handoff(prompt) for prompt in prompts]

    assert said == again == [alone(prompt) for prompt in prompts]


def test_many_at_once_do_not_disturb_each_other(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(25 * number + 1, seed=200 + number) for number in range(16)]

    said = list(pair.threads.map(pair.handoff, prompts))

    assert said == [alone(prompt) for prompt in prompts]


def test_a_request_that_decode_alone_hears_of_fails_in_time(pair: Cluster, alone: Alone) -> None:
    with pytest.raises(RefusedError, match="kvbus: "):
        pair.decode.generate(prompt_of(40, seed=400), 4, **pair.room())

    works_again(pair, alone)
