"""The simulator can fail: it finds each mistake made on purpose, and names the invariant."""

from collections.abc import Callable, Set

import pytest

from tests.simulator.checker import Violation
from tests.simulator.mutants import MUTANTS
from tests.simulator.settings import CROWDED
from tests.simulator.world import World

MOST_SEEDS = 6


def run_worlds() -> None:
    for seed in range(1, 1 + MOST_SEEDS):
        World(CROWDED, seed=seed, num_handoffs=1500).run()


@pytest.mark.parametrize(
    ("mutate", "broken"), MUTANTS.items(), ids=[mutate.__name__ for mutate in MUTANTS]
)
def test_the_simulator_finds_a_mistake_in_the_tables(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], broken: Set[int]
) -> None:
    mutate(monkeypatch)

    with pytest.raises(Violation) as found:
        run_worlds()

    assert found.value.number in broken
    assert any(note.startswith(("offer ", "fetch ", "at ")) for note in found.value.__notes__)
