"""The clock of an agent is placed on ours by the quickest question, within half its round trip."""

from hypothesis import given
from hypothesis import strategies as st

from kvbus.clocks import ClockOffset, Exchange

ways = st.floats(1e-5, 0.5)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(ways, ways), min_size=1, max_size=8))
def test_it_is_wrong_by_no_more_than_it_says(
    skew_s: float, took: list[tuple[float, float]]
) -> None:
    exchanges = [
        Exchange(float(at), at + there_s + skew_s, at + there_s + back_s)
        for at, (there_s, back_s) in enumerate(took)
    ]

    offset = ClockOffset.of(exchanges)

    assert abs(offset.offset_s + skew_s) <= offset.error_s + 1e-9
    assert offset.error_s <= min(sum(one) for one in took) / 2 + 1e-9
