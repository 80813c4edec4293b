"""The cases between two agents move runs of the length that their table shows."""

import numpy as np
import pytest

from kvbus.bench.shapes import direct_descriptors
from kvbus.bench.sides.cases import CASES, MIB, PairCase

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_runs_have_the_length_that_is_shown(case: PairCase) -> None:
    tables = case.tables(4)

    rows, _ = direct_descriptors(case.source, case.target, tables)

    # A few runs have a neighbour on both sides, by chance.
    assert np.median(rows.local[:, 1]) == (case.run_bytes or rows.num_bytes)


@every_case
def test_a_handoff_is_as_large_as_was_asked_for_or_one_block(case: PairCase) -> None:
    num_bytes = case.tables(4).num_tokens * case.target.token_bytes

    assert num_bytes == (case.source.block_bytes if case.is_one else 4 * MIB)
