"""Digests of memory are those of its elements, so that one flipped bit changes one of a piece."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbus.data import messages as wire
from kvbus.geometry import Tile
from kvbus.memory.segment import SharedSegment
from kvbus.planning import Piece, ReadMap, chosen_tiles, cut_for_digests, num_pieces, piece_of
from tests.support.data_process import Data, DataInThread
from tests.support.gpu_stand_in import GPU, StandIn
from tests.unit.planning.handoffs import Case, Side, cases, copied_by_loops, some


class Memories:
    """A data process that digests sides of handoffs, in memory of the host or of a GPU."""

    def __init__(self, data: Data, gpu: StandIn | None) -> None:
        self._data, self._gpu = data, gpu
        self._numbers = itertools.count(1)

    @contextmanager
    def of(self, side: Side, content: bytes) -> Iterator[dict[int, int]]:
        """Add each rank of a side; yields the numbers of their memories."""
        added = {rank: next(self._numbers) for rank in side.ranks}
        with ExitStack() as ends:
            for rank, memory in added.items():
                segments, fds = self._pass(side, rank, content, ends)
                message = wire.AddMemory(
                    memory=memory,
                    engine=side.engine,
                    rank=side.ranks[rank].rank,
                    segments=segments,
                    direct=False,
                )
                self._data.call(message, fds)
            yield added
            for memory in added.values():
                self._data.call(wire.RemoveMemory(memory=memory))

    def digests(self, memory: int, side: Side, tile: Tile, **sample: Any) -> list[int]:
        table = side.tables[tile.group]
        asked = wire.DigestJob(
            memory=memory, table=table, tile=tile, turn=wire.Turn("turn"), **sample
        )
        found: list[int] = np.frombuffer(self._data.call(asked).digests, "<u8").tolist()
        return found

    def _pass(
        self, side: Side, rank: int, content: bytes, ends: ExitStack
    ) -> tuple[tuple[wire.SegmentPart, ...], list[int]]:
        placed, parts, fds = side.ranks[rank], [], []
        for segment in placed.rank.segments:
            name, size_bytes, cuda = segment.segment_id, segment.size_bytes, None
            offset = placed.addresses[name] - side.base
            if self._gpu is None:
                shared = SharedSegment(size_bytes)
                ends.callback(shared.close)
                shared.view()[:] = np.frombuffer(content, np.uint8)[offset:][:size_bytes]
                fds.append(shared.fd)
            else:
                handle = f"{rank} {name}".encode()
                self._gpu.memory[handle] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                cuda = wire.CudaPart(GPU, handle, offset, None)
            parts.append(wire.SegmentPart(name, size_bytes, cuda=cuda))
        return tuple(parts), fds


@pytest.fixture(scope="module", params=["host", "gpu"])
def memories(request: pytest.FixtureRequest) -> Iterator[Memories]:
    with pytest.MonkeyPatch.context() as patch:
        gpu = StandIn() if request.param == "gpu" else None
        if gpu is not None:
            gpu.stand_in(patch)
        data = Data() if gpu is None else DataInThread()
        try:
            yield Memories(data, gpu)
        finally:
            data.end()


def tiles_of(case: Case) -> Iterator[tuple[int, int, Tile]]:
    """Holder, reader and tiles of all that is handed over."""
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
def test_both_sides_digest_any_sample_like_loops_over_elements(
    memories: Memories, case: Case, one_in: int, offer_id: str
) -> None:
    prefill, decode = case.prefill, case.decode
    with (
        memories.of(prefill, prefill.memory) as holders,
        memories.of(decode, copied_by_loops(case)[0]) as readers,
    ):
        for holder, reader, tile in tiles_of(case):
            sample: dict[str, Any] = {"offer_id": offer_id, "one_in": one_in}
            if chosen := list(chosen_tiles(tile, **sample)):
                numbers = range(sum(map(num_pieces, chosen)))
                should_be = [wanted(case, tile, piece_of(chosen, number)) for number in numbers]
                assert memories.digests(holders[holder], prefill, tile, **sample) == should_be
                assert memories.digests(readers[reader], decode, tile, **sample) == should_be
