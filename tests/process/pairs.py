"""Few cases in which each value of each axis meets each value of every other axis.

Most defects need two things to come together, and hardly any of them more.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Case = dict[str, Any]
"""A value by axis."""
NUM_CANDIDATES, NUM_TRIES = 40, 400
"""So many draws of the other values find no case, where two values cannot meet."""


def pairwise_cases(
    axes: Mapping[str, Sequence[Any]], is_possible: Callable[[Case], bool], seed: int
) -> list[Case]:
    """Cases that are possible, until all values have met that can; the same for the same seed."""
    random, cases, values = Random(seed), list[Case](), list(axes.values())
    missing = {
        (one, first, other, second)
        for one, other in combinations(range(len(values)), 2)
        for first, second in product(range(len(values[one])), range(len(values[other])))
    }
    for pair in sorted(missing):
        if pair not in missing:
            continue
        one, first, other, second = pair
        best, case = {pair}, None
        num_candidates = 0
        for _ in range(NUM_TRIES):
            drawn = [random.randrange(len(some)) for some in values]
            drawn[one], drawn[other] = first, second
            tried = {name: some[at] for (name, some), at in zip(axes.items(), drawn, strict=True)}
            if not is_possible(tried):
                continue
            met = {
                (a, drawn[a], b, drawn[b]) for a, b in combinations(range(len(values)), 2)
            } & missing
            if case is None or len(met) > len(best):
                best, case = met, tried
            num_candidates += 1
            if num_candidates == NUM_CANDIDATES:
                break
        missing -= best
        if case is not None:
            cases.append(case)
    return cases
