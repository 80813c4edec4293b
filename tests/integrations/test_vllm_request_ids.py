"""What agents call a request of vLLM, whatever its id is."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbus.integrations.vllm.request_ids import (
    MAX_CHARACTERS,
    agents_id,
    is_later_sequence,
    is_of_later_prompt,
    prompt_of_sequence,
)

LONG = st.text(st.characters(codec="utf-8"), min_size=MAX_CHARACTERS + 1, max_size=2000)


@given(st.text(max_size=MAX_CHARACTERS))
def test_an_id_that_agents_take_stays_as_it_is(request_id: str) -> None:
    assert agents_id(request_id) == request_id


@given(LONG, LONG)
def test_long_ids_become_short_ones_that_differ_as_they_did(one: str, other: str) -> None:
    assume(one != other)

    assert len(agents_id(one)) <= MAX_CHARACTERS
    assert agents_id(one) != agents_id(other)


def test_ids_that_differ_in_the_middle_alone_differ() -> None:
    ends = 500 * "a"

    assert agents_id(f"{ends}1{ends}") != agents_id(f"{ends}2{ends}")


@pytest.mark.parametrize(
    ("request_id", "is_later"),
    [
        ("cmpl-a-0-12345678", False),
        ("cmpl-a-1-12345678", True),
        ("cmpl-a-10-0000000f", True),
        ("2_cmpl-a-0-0000000f", False),
        ("2_cmpl-a-1-0000000f", True),
        ("cmpl-7-12345678-0-1234567f", False),
        ("chatcmpl-a-1-12345678", False),
        ("1-12345678", False),
    ],
)
def test_an_id_says_whether_its_prompt_is_the_first_of_its_completion(
    request_id: str, is_later: bool
) -> None:
    assert is_of_later_prompt(request_id) == is_later


@pytest.mark.parametrize(
    ("request_id", "is_later"),
    [("0_cmpl-a", False), ("1_cmpl-a", True), ("10_chatcmpl-0_a", True), ("cmpl-1_a", False)],
)
def test_an_id_says_whether_its_sequence_is_the_first_of_its_prompt(
    request_id: str, is_later: bool
) -> None:
    assert is_later_sequence(request_id) == is_later


@pytest.mark.parametrize(
    ("request_id", "prompt"),
    [("0_cmpl-a", "cmpl-a"), ("12_chatcmpl-3_b", "chatcmpl-3_b"), ("cmpl-0_a", None), ("_a", None)],
)
def test_an_id_says_of_which_prompt_its_sequence_is(request_id: str, prompt: str | None) -> None:
    assert prompt_of_sequence(request_id) == prompt
