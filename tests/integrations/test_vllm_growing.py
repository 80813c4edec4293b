"""Which tokens of a prompt may be read behind which step."""

from types import SimpleNamespace
from typing import Any

from kvbus.integrations.vllm.steps import Growing


def test_tokens_of_the_prompt_are_ready_when_their_step_is_done_and_those_behind_it_never() -> None:
    """A step may compute more than a prompt, as vLLM with drafts has them."""
    request: Any = SimpleNamespace(request_id="r", num_computed_tokens=0, num_prompt_tokens=10)
    growing, steps = Growing(), []
    growing.begin(request)
    for num_tokens in (8, 3, 1):
        steps.append(growing.schedule({"r": num_tokens, "other": 5}))
        request.num_computed_tokens += num_tokens

    ready = [list(growing.done(step)) for step in steps]

    assert ready == [[("r", 8)], [("r", 10)], []]
