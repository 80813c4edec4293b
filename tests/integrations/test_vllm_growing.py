"""Of a step that computes more than a prompt, as vLLM with drafts has them, the prompt is ready."""

from types import SimpleNamespace
from typing import Any

from kvbus.integrations.vllm.growing import Growing, Ready


def step(computed: int, tokens: int, *blocks: int, is_new: bool = False) -> Any:
    """What vLLM's scheduler has put into a step of the only request."""
    new = SimpleNamespace(req_id="r", num_computed_tokens=computed, block_ids=(list(blocks),))
    cached = SimpleNamespace(
        req_ids=[] if is_new else ["r"],
        num_computed_tokens=[computed],
        new_block_ids=[(list(blocks),) if blocks else None],
    )
    return SimpleNamespace(
        scheduled_new_reqs=[new] if is_new else [],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"r": tokens},
    )


def test_what_is_computed_behind_the_prompt_is_not_ready() -> None:
    growing = Growing(lambda block_ids: block_ids)
    growing.begin("r", 10)
    growing.schedule(step(0, 8, 1, 2, is_new=True))
    ends = growing.schedule(step(8, 3, 3))
    answers = growing.schedule(step(11, 1))

    assert list(growing.done(ends)) == [Ready("r", 10, [[1, 2, 3]])]
    assert list(growing.done(answers)) == []
