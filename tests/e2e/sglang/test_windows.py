"""Layers with a sliding window, whose pages are a group of their own; pages of one token to larger
ones; servers that were there before their agents.
"""

import pytest

from tests.e2e.sglang.clusters import CHUNK_TOKENS, Cluster, num_completed, prompt_of
from tests.e2e.sglang.conftest import Alone
from tests.e2e.sglang.test_pages import works_again
from tests.e2e.vllm.models import WINDOW

CLUSTER = "windows"
LENGTHS = (1, 16, WINDOW - 1, WINDOW, WINDOW + 1, 191, 192, 193, CHUNK_TOKENS + 1, 700)


def test_servers_that_were_there_before_their_agents_hand_off(pair: Cluster, alone: Alone) -> None:
    works_again(pair, alone)


@pytest.mark.kind("sliding windows beside full attention", on="servers")
def test_decode_says_what_sglang_says_alone(pair: Cluster, alone: Alone) -> None:
    """Also where the same prompt, or one that begins with it, is asked for again."""
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    before = num_completed(pair.decode_agent)

    said = [pair.handoff(prompt) for prompt in prompts]
    again = [pair.handoff(prompt) for prompt in prompts]
    others = [[*prompt, *prompt_of(110, seed=9)] for prompt in prompts]
    others += [prompt[: len(prompt) * 3 // 4 + 1] for prompt in prompts]
    parts = [pair.handoff(prompt) for prompt in others]

    assert said == again == [alone(prompt) for prompt in prompts]
    assert parts == [alone(prompt) for prompt in others]
    assert num_completed(pair.decode_agent) == before + 4 * len(prompts)


def test_many_at_once_do_not_disturb_each_other(pair: Cluster, alone: Alone) -> None:
    prompts = [prompt_of(40 * number + 1, seed=200 + number) for number in range(16)]

    said = list(pair.threads.map(pair.handoff, prompts))

    assert said == [alone(prompt) for prompt in prompts]
    works_again(pair, alone)
