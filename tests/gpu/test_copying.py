"""Copies on a GPU move the bytes that those on the host move, which tests/memory holds to loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvbus.geometry import slot_bytes
from kvbus.memory import Slot, gather, scatter, zero_positions
from tests.memory.boxes import Case, Side, cases, in_slot, itemsize_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MANY = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def on_gpu(buffer: torch.Tensor) -> torch.Tensor:
    """A copy that lies as far from its storage's start."""
    storage = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
    start = int(buffer.storage_offset())
    return storage.cuda()[start : start + buffer.numel()]


def moved(side: Side) -> Side:
    """The side with its memory on the GPU."""
    return replace(side, buffers={name: on_gpu(buffer) for name, buffer in side.buffers.items()})


def contents(side: Side) -> dict[str, list[int]]:
    return {name: buffer.cpu().tolist() for name, buffer in side.buffers.items()}


def slots(case: Case, kind: str) -> Slot:
    """A copy of the slot, on the GPU or in pinned memory."""
    buffer = case.slot.buffer
    there = on_gpu(buffer) if kind == "on the GPU" else buffer.clone().pin_memory()
    return Slot(there, case.slot.order)


@pytest.mark.parametrize("kind", ["on the GPU", "pinned"])
@MANY
@given(cases())
def test_a_gathered_box_is_that_of_the_host(kind: str, case: Case) -> None:
    slot, side = slots(case, kind), moved(case.prefill)
    gather(case.prefill.memory, case.prefill.table, case.box, case.slot)

    gather(side.memory, side.table, case.box, slot)
    torch.cuda.synchronize()

    itemsize = itemsize_of(side.group)
    starts = [at for _, at in in_slot(side.group, case.box, slot.order).values()]
    index = torch.tensor([at + byte for at in starts for byte in range(itemsize)])
    assert torch.equal(slot.buffer.cpu()[index], case.slot.buffer[index])
    beyond = slot_bytes(side.group, case.box, slot.order)
    assert torch.equal(slot.buffer.cpu()[beyond:], case.slot.buffer[beyond:])


@pytest.mark.parametrize("kind", ["on the GPU", "pinned"])
@MANY
@given(cases())
def test_scattered_blocks_are_those_of_the_host(kind: str, case: Case) -> None:
    slot, side = slots(case, kind), moved(case.decode)
    scatter(case.decode.memory, case.decode.table, case.box, case.slot)

    scatter(side.memory, side.table, case.box, slot)
    torch.cuda.synchronize()

    assert contents(side) == contents(case.decode)


@MANY
@given(cases())
def test_zeroed_positions_are_those_of_the_host(case: Case) -> None:
    side = moved(case.decode)
    zero_positions(case.decode.memory, case.decode.table, case.box.start, case.box.stop)

    zero_positions(side.memory, side.table, case.box.start, case.box.stop)

    assert contents(side) == contents(case.decode)
