"""Messages for engines whose ranks are spread over several agents, as in multi-node parallelism.

The agent with the engine's control session is its home: it has the offers, leases and fetches.
"""

from typing import Annotated, Any, ClassVar

import msgspec

from kvbus.protocol.digests import OneInOrNone
from kvbus.protocol.engine import Ranks, Tables
from kvbus.protocol.message import (
    Empty,
    Epoch,
    Id,
    Message,
    Priority,
    Request,
    Seconds,
    Secret,
    Size,
    Text,
    Tokens,
)

AnySeconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class CheckMemory(Request[Empty], frozen=True):
    """Asks whether the ranks of an engine are still those of the handshake; ``stale`` if not.

    A reader asks each agent without the lease, after the last byte landed and before the confirm.
    Such an agent does not know when it is read: it serves the reads of an offer for ``progress_s``,
    so a reader asks before it reads, too, and whenever it renews the lease. 0 ends that.
    """

    op: ClassVar[str] = "check"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    engine_id: Id
    memory_id: Id
    access: Secret
    offer_id: Text = ""
    progress_s: AnySeconds = 0.0


class Delegated(Message, frozen=True):
    """Reply to `Delegate`: all bytes of the chunk are in the remote ranks.

    ``one_in`` says which of them were compared, as they were asked to be; 0: none.
    """

    num_bytes: Size
    path: Text
    one_in: OneInOrNone = 0


class Delegate(Request[Delegated], frozen=True):
    """The home of a decode engine asks an agent with remote ranks to read one chunk into them.

    It is answered when nothing of it is in flight any more: it is done, failed or aborted. The home
    has the lease and confirms, and shows the decode engine's ``access``. ``memory_ids`` are those
    of the prefill agents, as the home knows them, the prefill engine's home first: an agent that
    knows others shakes hands again. With ``one_in`` it compares one in so many pieces of what it
    has read, as `Digest` says.
    """

    op: ClassVar[str] = "delegate"

    fetch_id: Id
    engine_id: Id
    access: Secret
    ranks: Ranks
    ticket: dict[str, Any]
    memory_ids: Annotated[tuple[Id, ...], msgspec.Meta(min_length=1, max_length=1024)]
    epoch: Epoch
    token: Secret
    source: Tables
    target: Tables
    first_token: Tokens
    num_tokens: Tokens
    start: Tokens
    stop: Tokens
    last: bool
    zero_tail: bool
    timeout_s: Seconds
    one_in: OneInOrNone = 0
    priority: Priority = 0


class Aborted(Message, frozen=True):
    """Reply to `AbortDelegate`: with ``ended`` nothing is in flight for it, and nothing will be.

    Without, as by an agent that has no such word, this says nothing.
    """

    ended: bool = False


class AbortDelegate(Request[Aborted], frozen=True):
    """Ends the reading under a lease; answered when that is so, before or after the `Delegate`.

    A `Delegate` with this ``token`` that comes later is refused.
    """

    op: ClassVar[str] = "abort_delegate"

    fetch_id: Id
    access: Secret
    token: Secret
