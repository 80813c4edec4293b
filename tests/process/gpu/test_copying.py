"""Copies on a GPU move the bytes that loops over every element move, as those on the host do."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.unit.memory.in_memory import (
    InMemory,
    move_through_slots,
    zero_what_is_moved,
    zeroed_by_loops,
)
from tests.unit.planning.handoffs import Case, cases, copied_by_loops

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MANY = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
HEAD_DIMS = (1, 2, 3, 8, 16)


@pytest.mark.parametrize("kind", ["on the GPU", "pinned"])
@MANY
@given(cases(HEAD_DIMS))
def test_tiles_go_from_blocks_to_blocks_of_a_gpu(kind: str, case: Case) -> None:
    prefill, decode = (InMemory(side, device="cuda") for side in (case.prefill, case.decode))

    def new_slot(num_bytes: int) -> torch.Tensor:
        if kind == "pinned":
            return torch.zeros(num_bytes + 5, dtype=torch.uint8, pin_memory=True)
        return torch.zeros(num_bytes + 5, dtype=torch.uint8, device="cuda")

    move_through_slots(case, prefill, decode, new_slot=new_slot)
    torch.cuda.synchronize()

    assert decode.content() == copied_by_loops(case)[0]


@MANY
@given(cases(HEAD_DIMS))
def test_zeroed_positions_of_a_gpu_are_those_that_were_asked_for(case: Case) -> None:
    decode = InMemory(case.decode, device="cuda")

    zero_what_is_moved(case, decode)

    assert decode.content() == zeroed_by_loops(case)
