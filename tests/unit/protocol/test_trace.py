"""A trace is read as W3C Trace Context says, and an answer to `Trace` has the newest that fits."""

import pytest

from kvbus.protocol import MAX_SPANS, Span, TraceParent, TraceResult, known_trace

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NOT_OF_THE_FORM = (
    "",
    "no trace",
    f"01-{TRACE}-{SPAN}-01",
    f"00-{TRACE}-{SPAN}-01-more",
    f"00-{TRACE}-{SPAN}-01\n",
    f"00-{TRACE.upper()}-{SPAN}-01",
    f"00-{32 * '0'}-{SPAN}-01",
    f"00-{TRACE}-{16 * '0'}-01",
    f"00-{TRACE}-{SPAN}-0\N{ARABIC-INDIC DIGIT ONE}",
)


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_trace_is_its_two_ids_and_whether_it_is_sampled(flags: str, sampled: bool) -> None:
    assert TraceParent.read(f"00-{TRACE}-{SPAN}-{flags}") == TraceParent(TRACE, SPAN, sampled)


@pytest.mark.parametrize("text", NOT_OF_THE_FORM)
def test_malformed_trace_is_none_and_first_valid_one_counts(text: str) -> None:
    first, second = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
    assert TraceParent.read(text) is None
    assert known_trace(text, first, second) == first
    assert known_trace(text, "") == ""


def test_newest_of_too_many_spans_are_kept_and_cut_is_told() -> None:
    few, many = ((Span(name, 0.0),) * num for name, num in (("old", 2), ("new", MAX_SPANS - 1)))
    fits, cut = TraceResult((few, (Span("new", 0.0),))).newest()
    newest, also_cut = TraceResult((few, many)).newest()
    assert ([span.name for span in fits], cut) == (["old", "old", "new"], False)
    assert len(newest) == MAX_SPANS
    assert [span.name for span in newest].count("new") == MAX_SPANS - 1
    assert also_cut
