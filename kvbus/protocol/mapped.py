"""Messages of a prefill agent's memory socket: how agents of one machine get its engines' memory.

Descriptors travel beside them, in the order of what they are of.
"""

from typing import Annotated, Any, ClassVar

import msgspec

from kvbus.protocol.message import Id, Message, Request, Secret, Size, Text

MAX_LENT_AT_ONCE = 64
"""Segments of one reply, as no message carries more descriptors."""


class MemorySocket(msgspec.Struct, frozen=True):
    """Where an agent of the same machine gets the memory of an engine, to map it.

    ``machine`` is the boot id of the kernel. ``closed`` says why there is none, and is empty
    otherwise.
    """

    path: Text = ""
    machine: Text = ""
    closed: Text = ""


class Sharing(msgspec.Struct, frozen=True):
    """Whether an agent shares memory with others of its machine, and what decides that.

    A prefill agent lends at ``path``. ``engines`` are those that a decode agent has met, and for
    each ``open``, or why its memory is not mapped. ``closed`` says why there is none at all.
    """

    machine: Text = ""
    uid: Size = 0
    mount_namespace: Text = ""
    pid_namespace: Text = ""
    path: Text = ""
    closed: Text = ""
    engines: dict[str, Text] = {}


class LentSegment(msgspec.Struct, frozen=True):
    """One segment of a rank, and the size of its file."""

    rank: Size
    segment_id: Id
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class MemoryLent(Message, frozen=True):
    """Reply to `LendMemory`: some of the ``num_segments``, a descriptor with each, in order.

    ``agent_boot`` is that of who answers: at the same path may be another agent, in another mount
    namespace.
    """

    agent_boot: Id
    num_segments: Size
    segments: Annotated[tuple[LentSegment, ...], msgspec.Meta(max_length=MAX_LENT_AT_ONCE)]


class LendMemory(Request[MemoryLent], frozen=True):
    """Asks for the segments of the ranks of one handshake from number ``first`` on, read-only.

    The connection stays open while they are mapped: its end means that the engine is gone.
    """

    op: ClassVar[str] = "lend"

    agent_boot: Id
    engine_id: Id
    memory_id: Id
    access: Secret
    first: Size = 0


MEMORY_REQUESTS: tuple[type[Request[Any]], ...] = (LendMemory,)
