"""What a worker reports in which step, and which tokens may be read behind which step."""

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.integrations.vllm.steps import (
    NOTHING,
    EarlyCompletions,
    Growing,
    StepResults,
    ranks_elsewhere,
)
from kvbus.protocol import AgentRanks, Fetched, Outcome


def ended(fetch_id: str, outcome: Outcome = Outcome.COMPLETED) -> Fetched:
    return Fetched(fetch_id, "", outcome, "completed", blocks_free=True)


@dataclass(frozen=True)
class Story:
    """In which step a load starts, the worker hears of it, and its scheduler does."""

    start: int
    heard_after: int
    known_after: int
    completed: bool


STORIES = st.lists(
    st.builds(Story, st.integers(0, 3), st.integers(0, 4), st.integers(0, 4), st.booleans()),
    max_size=6,
)


@given(STORIES)
def test_each_load_is_reported_once_as_soon_as_either_way_has_told(stories: list[Story]) -> None:
    completions, received, failed = EarlyCompletions(), Counter[str](), Counter[str]()
    first: dict[str, int] = {}
    for step in range(12):
        numbered = [(f"r{at}", f"f{at}", story) for at, story in enumerate(stories)]
        for _, fetch_id, story in numbered:
            if step == story.start + story.heard_after:
                outcome = Outcome.COMPLETED if story.completed else Outcome.FAILED
                completions.tell(ended(fetch_id, outcome))
        known = [
            (request_id, story)
            for request_id, _, story in numbered
            if step == story.start + 1 + story.known_after
        ]
        results = completions.take(
            StepResults(
                started=tuple((r, f) for r, f, story in numbered if step == story.start),
                received=tuple(request_id for request_id, _ in known),
                failed=tuple(request_id for request_id, story in known if not story.completed),
            )
        )
        received.update(results.received)
        failed.update(results.failed)
        for request_id in results.received:
            first.setdefault(request_id, step)

    assert received == Counter({f"r{at}": 1 for at in range(len(stories))})
    assert failed == Counter({f"r{at}": 1 for at, s in enumerate(stories) if not s.completed})
    for at, story in enumerate(stories):
        by_scheduler = story.start + 1 + story.known_after
        told = story.start + story.heard_after
        assert first[f"r{at}"] == (min(told, by_scheduler) if story.completed else by_scheduler)


def test_a_load_that_the_worker_reported_does_not_fail_afterwards() -> None:
    completions = EarlyCompletions()
    completions.tell(ended("f"))
    early = completions.take(StepResults(started=(("r", "f"),)))
    late = completions.take(StepResults(received=("r",), failed=("r",)))

    assert early.received == ("r",)
    assert late == NOTHING


def place(rank: int, agent: int) -> AgentRanks:
    """Agent 0 is one that is not there."""
    endpoint = f"tcp://10.0.0.{agent}:7711" if agent else ""
    return AgentRanks(endpoint, (rank,), f"{16 * 'a'}{rank}", f"key{agent}")


@pytest.mark.parametrize(
    ("agents", "elsewhere"),
    [
        ((1, 1, 2, 2, 3, 3), {2: (2, 3), 3: (4, 5)}),
        ((1, 0), {}),
        ((0, 1), {}),
    ],
    ids=["three agents", "none beside the second", "none beside the first"],
)
def test_ranks_are_elsewhere_whose_agent_is_not_that_of_the_first(
    agents: tuple[int, ...], elsewhere: dict[int, tuple[int, ...]]
) -> None:
    workers = [place(rank, agent) for rank, agent in enumerate(agents)]

    wanted = [
        AgentRanks(f"tcp://10.0.0.{agent}:7711", ranks, f"{16 * 'a'}{ranks[0]}", f"key{agent}")
        for agent, ranks in elsewhere.items()
    ]
    assert ranks_elsewhere(workers) == wanted


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
