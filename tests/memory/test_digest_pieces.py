"""Digests of memory are those of its elements, so that one flipped bit changes one of a piece."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbus.geometry import Box
from kvbus.memory import digest_pieces
from kvbus.planning import (
    Numbers,
    Piece,
    PieceMap,
    ReadMap,
    by_lattice,
    cut_for_digests,
    num_pieces,
    piece_of,
)
from tests.memory.in_memory import InMemory
from tests.planning.handoffs import Case, cases, copied_by_loops, some

Digest = Callable[[InMemory, int, Box, Numbers], list[int]]


def by_lattices(digest: Any, side: InMemory, rank: int, box: Box, pieces: Numbers) -> list[int]:
    found = np.zeros(pieces.size, np.uint64)
    lattices = PieceMap(side.placed(rank)).lattices(box, side.side.tables[box.group])
    for lattice, which, numbers in by_lattice(lattices, pieces):
        found[which] = digest(lattice, numbers)
    return [int(one) for one in found]


def by_gathering(side: InMemory, rank: int, box: Box, pieces: Numbers) -> list[int]:
    """As for memory that cannot be looked into."""
    memory, table = side.paged(rank, box.group), side.side.tables[box.group]
    found = digest_pieces.digest_gathered(memory, table, box, pieces, buffer_bytes=64)
    return [int(one) for one in found]


@pytest.fixture(scope="module", params=["mapped", "gathered"])
def digest(request: pytest.FixtureRequest) -> Digest:
    if request.param == "gathered":
        return by_gathering
    return partial(by_lattices, digest_pieces.digest_pieces)


def boxes_of(case: Case) -> Iterator[tuple[int, int, Box]]:
    """Holder, reader and boxes of all that is handed over."""
    spans = case.spans()
    for share in ReadMap(*case.ranks).shares(case.replica_index):
        for box in cut_for_digests(share, spans[share.group]):
            yield share.holder, share.reader, box


def wanted(case: Case, box: Box, piece: Piece) -> int:
    """The digest of the elements, one after the other."""
    group = case.prefill.engine.group(box.group)
    values = [
        case.prefill.values[box.group, position, piece.layer, piece.part, piece.head, dim]
        for position in range(piece.start, piece.stop)
        for dim in range(group.part_shape(piece.part).head_dim)
    ]
    return xxhash.xxh3_64_intdigest(b"".join(values))


@some(160)
@given(cases(), st.data())
def test_both_sides_digest_of_any_pieces_what_loops_over_every_element_say(
    digest: Digest, case: Case, data: st.DataObject
) -> None:
    """Pieces that lie side by side are gathered together, if all of them are asked for."""
    prefill = InMemory(case.prefill)
    decode = InMemory(case.decode, copied_by_loops(case)[0])

    for holder, reader, box in boxes_of(case):
        numbers = range(num_pieces(box))
        some_of_them = st.sets(st.sampled_from(numbers), min_size=1)
        chosen = np.array(sorted(data.draw(st.just(set(numbers)) | some_of_them)))

        should_be = [wanted(case, box, piece_of(box, number)) for number in chosen.tolist()]
        assert digest(prefill, holder, box, chosen) == should_be
        assert digest(decode, reader, box, chosen) == should_be
