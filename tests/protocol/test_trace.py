"""An answer to `Trace` has the newest entries that fit, and says when some do not."""

from kvbus.protocol import MAX_SPANS, Remembered, Span


def entry(name: str, num_spans: int) -> tuple[Span, ...]:
    return tuple(Span(name, 0.0) for _ in range(num_spans))


def test_all_that_fits_is_answered_in_order() -> None:
    spans, cut = Remembered((entry("old", 2), entry("new", 1))).newest()

    assert [span.name for span in spans] == ["old", "old", "new"]
    assert not cut


def test_of_too_many_the_newest_are_kept_and_the_answer_says_so() -> None:
    spans, cut = Remembered((entry("old", 300), entry("new", 300))).newest()

    assert len(spans) == MAX_SPANS
    assert [span.name for span in spans].count("new") == 300
    assert cut
