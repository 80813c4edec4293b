"""Who has most gives way where all places are taken, and nobody else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import LocalError
from kvbus.table import Places
from tests.examples import num_examples

PARTIES = st.integers(0, 4)
MOST = 6


@settings(deadline=None, max_examples=num_examples(200))
@given(st.lists(st.tuples(st.sampled_from(["enter", "leave"]), PARTIES), min_size=20, max_size=90))
def test_an_equal_share_is_neither_refused_nor_lost(steps: list[tuple[str, int]]) -> None:
    places: Places[tuple[int, int]] = Places(MOST)
    held: dict[int, list[tuple[int, int]]] = {party: [] for party in range(5)}

    for number, (step, party) in enumerate(steps):
        if step == "leave":
            if held[party]:
                gone = held[party].pop(0)
                places.leave(gone)
                places.leave(gone)  # twice is once
            continue
        wanted = party, number
        before, num_parties = len(held[party]), sum(map(bool, held.values())) + (not held[party])
        is_full = len(places) == MOST
        try:
            lost = places.enter(party, wanted)
        except LocalError:
            assert is_full
            assert before + 1 > MOST // num_parties
            continue
        held[party].append(wanted)
        assert (lost is not None) == is_full
        if lost is not None:
            assert held[lost[0]].pop() == lost
            assert len(held[lost[0]]) >= len(held[party])
        assert len(places) == sum(map(len, held.values())) <= MOST
        assert all(one in places for things in held.values() for one in things)
