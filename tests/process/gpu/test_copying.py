"""Copies by a GPU move the bytes that loops over every element move, as those by the host do."""

import pytest
from hypothesis import HealthCheck, given, settings

from kvbus.memory.cuda import (
    GpuCopier,
    PinnedMemory,
    VramMemory,
    read_bytes,
    write_bytes,
)
from tests.unit.memory.in_memory import (
    InMemory,
    move_through_slots,
    zero_what_is_moved,
    zeroed_by_loops,
)
from tests.unit.planning.handoffs import Case, cases, copied_by_loops

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MANY = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
HEAD_DIMS = (1, 2, 3, 8, 16)


class GpuRoom:
    """Memory of the first GPU."""

    def __init__(self, content: bytes) -> None:
        self._memory, self._size_bytes = VramMemory(len(content), 0), len(content)
        self.address = self._memory.address
        write_bytes(0, self.address, content)

    def content(self) -> bytes:
        return read_bytes(0, self.address, self._size_bytes)


class PinnedRoom:
    def __init__(self, content: bytes) -> None:
        self._memory = PinnedMemory(len(content), 0)
        self._memory.bytes[:] = list(content)
        self.address = self._memory.address

    def content(self) -> bytes:
        return self._memory.bytes.tobytes()


def on_lost(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("slots", [GpuRoom, PinnedRoom])
@MANY
@given(cases(HEAD_DIMS))
def test_tiles_go_from_blocks_to_blocks_of_a_gpu(
    slots: type[GpuRoom | PinnedRoom], case: Case
) -> None:
    copier = GpuCopier(0, on_lost)
    prefill, decode = (
        InMemory(side, room=GpuRoom, mover=copier) for side in (case.prefill, case.decode)
    )

    move_through_slots(case, prefill, decode, new_slot=slots)

    assert decode.content() == copied_by_loops(case)[0]


@MANY
@given(cases(HEAD_DIMS))
def test_zeroed_positions_of_a_gpu_are_those_that_were_asked_for(case: Case) -> None:
    decode = InMemory(case.decode, room=GpuRoom, mover=GpuCopier(0, on_lost))

    zero_what_is_moved(case, decode)

    assert decode.content() == zeroed_by_loops(case)
