"""Digests of memory are those of its elements, so that one flipped bit changes one of a piece."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbus.data import messages as wire
from kvbus.data.digests import DigestParts
from kvbus.geometry import Tile
from kvbus.planning import Piece, ReadMap, chosen_tiles, cut_for_digests, num_pieces, piece_of
from tests.unit.memory.in_memory import InMemory
from tests.unit.planning.handoffs import Case, cases, copied_by_loops, some


def digests(memory: InMemory, rank: int, tile: Tile, **sample: Any) -> list[int]:
    side, paged = memory.side, partial(memory.paged, rank)
    room = partial(np.empty, dtype=np.uint8)
    local: Any = SimpleNamespace(engine=side.engine, paged=paged, room=room)
    table, turn = side.tables[tile.group], wire.Turn("turn")
    asked = wire.DigestJob(memory=rank, table=table, tile=tile, turn=turn, **sample)
    job = DigestParts(asked, local)
    for part in job.parts():
        part()
    found: list[int] = np.frombuffer(job.joined(), "<u8").tolist()
    return found


def tiles_of(case: Case) -> Iterator[tuple[int, int, Tile]]:
    spans = case.spans()
    for share in ReadMap(*case.ranks).shares(case.replica_index):
        for tile in cut_for_digests(share, spans[share.group]):
            yield share.holder, share.reader, tile


def wanted(case: Case, tile: Tile, piece: Piece) -> int:
    """The digest of the elements, one after the other."""
    group = case.prefill.engine.group(tile.group)
    values = [
        case.prefill.values[tile.group, position, piece.layer, piece.part, piece.head, dim]
        for position in range(piece.start, piece.stop)
        for dim in range(group.part_shape(piece.part).head_dim)
    ]
    return xxhash.xxh3_64_intdigest(b"".join(values))


@some(160)
@given(case=cases(), one_in=st.integers(1, 3), offer_id=st.text(max_size=3))
def test_both_sides_digest_like_loops(case: Case, one_in: int, offer_id: str) -> None:
    prefill = InMemory(case.prefill)
    decode = InMemory(case.decode, copied_by_loops(case)[0])
    sample: dict[str, Any] = {"offer_id": offer_id, "one_in": one_in}
    for holder, reader, tile in tiles_of(case):
        if chosen := list(chosen_tiles(tile, **sample)):
            numbers = range(sum(map(num_pieces, chosen)))
            should_be = [wanted(case, tile, piece_of(chosen, number)) for number in numbers]
            assert digests(prefill, holder, tile, **sample) == should_be
            assert digests(decode, reader, tile, **sample) == should_be
