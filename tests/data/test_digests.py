"""Digests of memory are those of its elements, so that one flipped bit changes one of a piece."""

from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbus.data.digests import digest_pieces
from kvbus.geometry import Box
from kvbus.planning import Piece, ReadMap, chosen_boxes, cut_for_digests, num_pieces, piece_of
from tests.memory.in_memory import InMemory
from tests.planning.handoffs import Case, cases, copied_by_loops, some


def digests(side: InMemory, rank: int, boxes: list[Box]) -> list[int]:
    (group,) = {box.group for box in boxes}
    memory, table = side.paged(rank, group), side.side.tables[group]
    return [int(one) for one in digest_pieces(memory, table, boxes)]


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


@pytest.mark.parametrize("as_gpu", [False, True], ids=["host", "gpu"])
@some(160)
@given(cases(), st.integers(1, 3), st.text(max_size=3))
def test_both_sides_digest_of_any_sample_what_loops_over_every_element_say(
    as_gpu: bool, case: Case, one_in: int, offer_id: str
) -> None:
    prefill = InMemory(case.prefill, as_gpu=as_gpu)
    decode = InMemory(case.decode, copied_by_loops(case)[0], as_gpu=as_gpu)

    for holder, reader, box in boxes_of(case):
        if chosen := list(chosen_boxes(box, offer_id=offer_id, one_in=one_in)):
            numbers = range(sum(map(num_pieces, chosen)))
            should_be = [wanted(case, box, piece_of(chosen, number)) for number in numbers]
            assert digests(prefill, holder, chosen) == should_be
            assert digests(decode, reader, chosen) == should_be
