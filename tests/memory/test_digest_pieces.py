"""Digests of memory: equal on both sides of a right handoff, and a flipped bit is located."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbus.geometry import Box
from kvbus.memory import PagedMemory, digest_pieces
from kvbus.memory.digest_gathered import digest_gathered
from kvbus.memory.digest_pieces import Digests
from kvbus.planning import (
    Lattice,
    Numbers,
    Piece,
    PieceMap,
    PlacedRank,
    ReadMap,
    by_lattice,
    cut_for_digests,
    digests,
    num_pieces,
    piece_of,
)
from tests.planning.handoffs import (
    Case,
    Meaning,
    Side,
    cases,
    copied_by_loops,
    some,
    where_elements_lie,
)

EXAMPLES = some(160)
SPAN_TOKENS = 3
"""Drawn handoffs have few tokens."""
NUM_FLIPS = 8
Digest = Callable[[Lattice, Numbers], Digests]


@pytest.fixture(scope="session", params=["kernel", "numpy"])
def digest(request: pytest.FixtureRequest) -> Digest:
    if request.param == "kernel":
        found = digest_pieces.load_kernel(request.getfixturevalue("library"))
        assert found is not None
        return lambda lattice, pieces: digest_pieces.digest_by_kernel(*found, lattice, pieces)
    return digest_pieces.digest_by_numpy


@pytest.fixture(scope="module", autouse=True)
def short_spans() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "SPAN_TOKENS", SPAN_TOKENS)
        yield


class Real:
    """One side of a drawn handoff, in memory that is there."""

    def __init__(self, side: Side, memory: bytes) -> None:
        self.side, self.memory = side, np.frombuffer(memory, np.uint8).copy()
        self.moved = self.memory.ctypes.data - side.base
        self.maps = {n: PieceMap(self._placed(placed)) for n, placed in side.ranks.items()}

    def _placed(self, placed: PlacedRank) -> PlacedRank:
        moved = {name: address + self.moved for name, address in placed.addresses.items()}
        return PlacedRank(placed.engine, placed.rank, moved)

    def digests(
        self, digest: Digest, rank: int, box: Box, pieces: Numbers | None = None
    ) -> list[int]:
        pieces = np.arange(num_pieces(box)) if pieces is None else pieces
        found = np.zeros(pieces.size, np.uint64)
        lattices = self.maps[rank].lattices(box, self.side.tables[box.group])
        for lattice, which, numbers in by_lattice(lattices, pieces):
            found[which] = digest(lattice, numbers)
        return [int(one) for one in found]


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


@EXAMPLES
@given(cases())
def test_both_sides_digest_what_loops_over_every_element_say(digest: Digest, case: Case) -> None:
    prefill = Real(case.prefill, case.prefill.memory)
    decode = Real(case.decode, copied_by_loops(case)[0])

    for holder, reader, box in boxes_of(case):
        pieces = [piece_of(box, number) for number in range(num_pieces(box))]
        should_be = [wanted(case, box, piece) for piece in pieces]
        assert prefill.digests(digest, holder, box) == should_be
        assert decode.digests(digest, reader, box) == should_be


@EXAMPLES
@given(cases(), st.data())
def test_some_pieces_have_the_digests_that_they_have_among_all(
    digest: Digest, case: Case, data: st.DataObject
) -> None:
    """Those that lie side by side are gathered together, if both are wanted."""
    prefill = Real(case.prefill, case.prefill.memory)

    for holder, _, box in boxes_of(case):
        numbers = st.integers(0, num_pieces(box) - 1)
        chosen = np.array(sorted(data.draw(st.sets(numbers, min_size=1))))
        among_all = prefill.digests(digest, holder, box)

        found = prefill.digests(digest, holder, box, chosen)
        assert found == [among_all[number] for number in chosen.tolist()]


@EXAMPLES
@given(cases(), st.integers(1, 400))
def test_memory_that_cannot_be_looked_into_has_the_same_digests(
    case: Case, buffer_bytes: int
) -> None:
    prefill = Real(case.prefill, case.prefill.memory)

    for holder, _, box in boxes_of(case):
        placed, table = case.prefill.ranks[holder], case.prefill.tables[box.group]
        buffers = {}
        for segment in placed.rank.segments:
            start = placed.addresses[segment.segment_id] - case.prefill.base
            held = prefill.memory[start : start + segment.size_bytes]
            buffers[segment.segment_id] = torch.from_numpy(held)
        group = case.prefill.engine.group(box.group)
        memory = PagedMemory(group, placed.rank.regions, buffers)
        chosen = np.arange(num_pieces(box))[::2]
        found = digest_gathered(memory, table, box, chosen, buffer_bytes=buffer_bytes)

        should_be = [wanted(case, box, piece_of(box, number)) for number in chosen.tolist()]
        assert found.tolist() == should_be


@EXAMPLES
@given(cases(), st.integers(0, 2**32))
def test_a_flipped_bit_is_found_and_named_whatever_the_memory_is(
    digest: Digest, case: Case, seed: int
) -> None:
    prefill = Real(case.prefill, case.prefill.memory)
    decode = Real(case.decode, copied_by_loops(case)[0])
    random = Random(seed)
    for holder, reader, box in boxes_of(case):
        sides = {"source": (prefill, holder), "target": (decode, reader)}
        right = decode.digests(digest, reader, box)
        for _ in range(NUM_FLIPS):
            side, rank = sides[random.choice(list(sides))]
            held = where_elements_lie(side.side, side.side.ranks[rank], case.moved())
            inside = [one for one in held if one[0][0] == box.group and has(box, one[0])]
            meaning, at, num_bytes = random.choice(inside)
            flipped, bit = at + random.randrange(num_bytes), 1 << random.randrange(8)
            side.memory[flipped] ^= bit
            found = side.digests(digest, rank, box)
            side.memory[flipped] ^= bit

            wrong = [number for number, one in enumerate(found) if one != right[number]]
            assert len(wrong) == 1
            named = piece_of(box, wrong[0])
            assert (named.layer, named.part, named.head) == meaning[2:5]
            assert named.start <= meaning[1] < named.stop
            assert named.stop - named.start <= SPAN_TOKENS


def has(box: Box, meaning: Meaning) -> bool:
    _, position, layer, part, head, _ = meaning
    in_heads = box.first_head <= head < box.first_head + box.num_heads
    return (
        layer in box.layers
        and part in box.parts
        and in_heads
        and (box.start <= position < box.stop)
    )


def test_a_package_without_the_hash_leaves_it_to_numpy(library: Path) -> None:
    assert digest_pieces.load_kernel(library, library) is None
    assert digest_pieces.load_kernel(library.with_name("none.so")) is None
