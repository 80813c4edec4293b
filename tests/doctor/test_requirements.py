"""Versions against requirements, against the package that the Python world uses for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from kvbus.doctor.judge.requirements import Requirement, allows, requirement

releases = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(
    lambda numbers: ".".join(map(str, numbers))
)
clauses = st.tuples(st.sampled_from([">=", "<=", "==", "!=", "<", ">"]), releases).map("".join)


@given(st.lists(clauses, max_size=3).map(",".join), releases)
def test_bounds_allow_what_packaging_allows(bounds: str, version: str) -> None:
    assert allows(bounds, version) == SpecifierSet(bounds).contains(version)


def test_what_follows_the_release_does_not_count() -> None:
    assert allows(">=2.6,<3", "2.13.0+cpu")
    assert not allows(">=2.6", "2.5.1+cu128")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nixl>=1.5.1,<2", Requirement("nixl", ">=1.5.1,<2")),
        ("nixl<2,>=1.5.1", Requirement("nixl", "<2,>=1.5.1")),
        ("prometheus-client >= 0.21", Requirement("prometheus-client", ">= 0.21")),
        ("torch", Requirement("torch", "")),
        ("nixl[cu12] (>=1)", Requirement("nixl", ">=1")),
        ("mypy>=1.15; extra == 'dev'", None),
        ("", None),
    ],
)
def test_a_requirement_is_read(text: str, expected: Requirement | None) -> None:
    assert requirement(text) == expected
