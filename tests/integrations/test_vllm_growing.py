"""How far vLLM is with requests, by what its scheduler says of each step."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvbus.integrations.vllm.growing import BlockIds, Growing, Ready

BLOCK_SIZE, MANY = 4, 1000


def of_one_group(block_ids: BlockIds) -> BlockIds:
    """As vLLM's selection of what is handed over does, which takes no other number of groups."""
    assert len(block_ids) == 1
    return block_ids


def step(
    *,
    new: dict[str, tuple[int, list[int]]] | None = None,
    running: dict[str, tuple[int, list[int] | None]] | None = None,
    tokens: dict[str, int],
) -> Any:
    """What vLLM's scheduler has put into a step: tokens computed before it, and (new) blocks."""
    new, running = new or {}, running or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=(blocks,))
            for name, (computed, blocks) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            num_computed_tokens=[computed for computed, _ in running.values()],
            new_block_ids=[None if more is None else (more,) for _, more in running.values()],
        ),
        num_scheduled_tokens=tokens,
    )


def test_tokens_are_ready_when_their_step_is_done_and_not_before() -> None:
    growing = Growing(of_one_group)
    growing.begin("r", MANY)
    first = growing.schedule(step(new={"r": (0, [1, 2])}, tokens={"r": 8}))
    second = growing.schedule(step(running={"r": (8, [3])}, tokens={"r": 4}))

    assert list(growing.done(0)) == []
    assert list(growing.done(first)) == [Ready("r", 8, [[1, 2, 3]])]
    assert list(growing.done(first)) == []
    assert list(growing.done(second)) == [Ready("r", 12, [[1, 2, 3]])]


def test_what_the_prefix_cache_has_is_ready_with_the_first_step() -> None:
    growing = Growing(of_one_group)
    growing.begin("r", MANY)
    number = growing.schedule(step(new={"r": (8, [1, 2, 3])}, tokens={"r": 3}))

    assert list(growing.done(number)) == [Ready("r", 11, [[1, 2, 3]])]


def test_what_is_computed_behind_the_prompt_is_not_ready() -> None:
    growing = Growing(of_one_group)
    growing.begin("r", 10)
    growing.schedule(step(new={"r": (0, [1, 2])}, tokens={"r": 8}))
    ends = growing.schedule(step(running={"r": (8, [3])}, tokens={"r": 3}))
    answers = growing.schedule(step(running={"r": (11, None)}, tokens={"r": 1}))

    assert list(growing.done(ends)) == [Ready("r", 10, [[1, 2, 3]])]
    assert list(growing.done(answers)) == []


def test_one_that_was_preempted_comes_back_with_all_its_blocks() -> None:
    growing = Growing(of_one_group)
    growing.begin("r", MANY)
    growing.schedule(step(new={"r": (0, [1, 2])}, tokens={"r": 8}))
    growing.end("r")
    growing.begin("r", MANY)
    number = growing.schedule(step(running={"r": (4, [7, 8, 9])}, tokens={"r": 5}))

    assert list(growing.done(number)) == [Ready("r", 9, [[7, 8, 9]])]


def test_nobody_is_told_of_steps_while_no_request_is_followed() -> None:
    growing = Growing(of_one_group)

    assert growing.schedule(step(new={"r": (0, [1])}, tokens={"r": 4})) == 0
    growing.begin("s", MANY)
    number = growing.schedule(step(new={"s": (0, [2])}, tokens={"s": 4}))
    growing.end("s")

    assert number > 0
    assert list(growing.done(number)) == []
    assert growing.schedule(step(tokens={})) == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_what_is_ready_was_computed_and_lies_in_the_blocks(
    chunks: list[int], data: st.DataObject
) -> None:
    growing, told, computed, done_tokens = Growing(of_one_group), 0, 0, dict[int, Any]()
    blocks = list[int]()
    growing.begin("r", MANY)
    for number, chunk in enumerate(chunks):
        end = -(-(computed + chunk) // BLOCK_SIZE)
        more = list(range(100 + len(blocks), 100 + end))
        blocks += more
        if number == 0:
            output = step(new={"r": (0, more)}, tokens={"r": chunk})
        else:
            output = step(running={"r": (computed, more or None)}, tokens={"r": chunk})
        computed += chunk
        done_tokens[growing.schedule(output)] = computed
    undone = sorted(done_tokens)
    while undone:
        number = undone[data.draw(st.integers(0, len(undone) - 1))]
        undone = [later for later in undone if later > number]
        for ready in growing.done(number):
            assert told < ready.num_tokens == done_tokens[number]
            assert ready.block_ids[0][: -(-ready.num_tokens // BLOCK_SIZE)] == [
                100 + index for index in range(-(-ready.num_tokens // BLOCK_SIZE))
            ]
            told = ready.num_tokens
    assert told == computed
