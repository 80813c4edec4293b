"""Messages of the packed path: a box of KV is gathered into a staging slot, for one READ."""

from typing import Annotated, ClassVar, Literal

import msgspec

from kvbus.geometry import BlockTable, Box, SlotOrder
from kvbus.geometry.spec import Index
from kvbus.protocol.message import (
    Address,
    Empty,
    Epoch,
    Id,
    Message,
    Priority,
    Request,
    Seconds,
    Secret,
    Size,
)

SlotId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
SlotIds = Annotated[tuple[SlotId, ...], msgspec.Meta(max_length=1024)]


class Packed(Message, frozen=True):
    """Reply to `Pack`: the box lies at ``address`` of the prefill agent, in the order asked for.

    ``memory`` and ``device`` are what NIXL calls the kind of memory, and the device that it is of.
    The slot is the reader's until ``slot_lease_s`` after the request was received, or until the
    lease of the offer ends; what is read from it later is not valid.
    """

    slot_id: SlotId
    address: Address
    num_bytes: Size
    slot_lease_s: Seconds
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: Index = 0


class Pack(Request[Packed], frozen=True):
    """Asks for a box of what one rank holds, gathered into a staging slot.

    ``table`` has the blocks of the box's positions, as the offer names them; ``done`` are slots
    that the reader has read. Answered when the box is gathered, which may wait for a free slot;
    boxes of a greater ``priority`` wait for less.
    """

    op: ClassVar[str] = "pack"

    agent_boot: Id
    engine_id: Id
    memory_id: Id
    offer_id: Id
    epoch: Epoch
    rank: Index
    box: Box
    order: SlotOrder
    table: BlockTable
    slot_lease_s: Seconds
    token: Secret
    access: Secret
    done: SlotIds = ()
    priority: Priority = 0


class Unpack(Request[Empty], frozen=True):
    """Gives staging slots back that were read, or are not wanted any more."""

    op: ClassVar[str] = "unpack"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    slot_ids: SlotIds
