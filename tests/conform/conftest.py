"""The plays of all tests of ``kvbus conform``."""

from collections.abc import Iterator

import pytest

from tests.conform.plays import Plays, side_by_side


@pytest.fixture(scope="session")
def plays() -> Iterator[Plays]:
    with side_by_side() as made:
        yield made
