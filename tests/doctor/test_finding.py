"""What findings come to: the order, the verdict, the exit status."""

from hypothesis import given
from hypothesis import strategies as st

from kvbus.doctor.finding import (
    Finding,
    Severity,
    Verdict,
    exit_status_of,
    sentence_of,
    verdict_of,
    worst_first,
)

SEVERITIES = ["ok", "note", "warning", "error"]

severities = st.lists(st.sampled_from(list(Severity)), max_size=8)


def findings_of(drawn: list[Severity]) -> list[Finding]:
    return [Finding(f"family.{num}", one, "it") for num, one in enumerate(drawn)]


@given(severities)
def test_the_verdict_is_that_of_the_worst(drawn: list[Severity]) -> None:
    verdict = verdict_of(findings_of(drawn))

    words = [str(one) for one in drawn]
    expected = "broken" if "error" in words else "limited" if "warning" in words else "works"
    assert verdict == expected


@given(severities, st.booleans())
def test_the_exit_status_tells_errors_and_with_strict_warnings(
    drawn: list[Severity], strict: bool
) -> None:
    status = exit_status_of(findings_of(drawn), strict=strict)

    assert status == int("error" in drawn or (strict and "warning" in drawn))


@given(severities)
def test_the_worst_come_first_and_equals_stay_in_order(drawn: list[Severity]) -> None:
    ordered = worst_first(findings_of(drawn))

    expected = [
        f"family.{num}"
        for wanted in reversed(SEVERITIES)
        for num, one in enumerate(drawn)
        if one == wanted
    ]
    assert [one.name for one in ordered] == expected


@given(severities)
def test_the_sentence_names_all_complaints_and_nothing_else(drawn: list[Severity]) -> None:
    found = findings_of(drawn)

    sentence = sentence_of(found)

    named = [one.name for one in found if one.name in sentence]
    assert named == [one.name for one in found if one.severity in ("warning", "error")]
    assert sentence.startswith("kvbus does not work" if "error" in drawn else "kvbus works")


def test_no_findings_are_no_complaint() -> None:
    assert verdict_of([]) is Verdict.WORKS
    assert sentence_of([]) == "kvbus works on this machine"
