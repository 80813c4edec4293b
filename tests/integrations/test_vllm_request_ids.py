"""What agents call a request of vLLM, whatever its id is."""

from hypothesis import assume, given
from hypothesis import strategies as st

from kvbus.integrations.vllm.request_ids import MAX_CHARACTERS, agents_id

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
