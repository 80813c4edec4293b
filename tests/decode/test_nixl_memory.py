"""Which memory of a peer NIXL can be told of beside what it was told of before."""

from hypothesis import event, given
from hypothesis import strategies as st

from kvbus_decode.peer.directory import Extent
from kvbus_decode.peer.nixl import NixlMemory


def memory(extents: set[Extent]) -> NixlMemory:
    return NixlMemory("agent", (), frozenset(extents))


def extents() -> st.SearchStrategy[set[Extent]]:
    pairs = st.tuples(st.integers(0, 30), st.integers(1, 12))
    return st.sets(pairs.map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=5)


@given(extents(), extents())
def test_memory_misfits_when_it_overlaps_what_is_known_and_is_not_the_same(
    here: set[Extent], known: set[Extent]
) -> None:
    overlaps = any(
        start < stop_known and start_known < stop and (start, stop) != (start_known, stop_known)
        for start, stop in here
        for start_known, stop_known in known
    )
    event(f"overlaps: {overlaps}")

    assert memory(here).misfits(known) == overlaps


def test_tens_of_thousands_of_segments_are_compared_with_as_many() -> None:
    """Pair by pair that would take many minutes."""
    here = {(2 * number, 2 * number + 1) for number in range(30_000)}
    known = {(2 * number + 1, 2 * number + 2) for number in range(30_000)}

    assert not memory(here).misfits(known)
    assert memory(here).misfits({*known, (60_000 - 2, 60_000)})
