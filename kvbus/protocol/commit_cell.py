"""The commit cell of an offer, in a page of the prefill engine: its first successful swap decides.

named ─▶ live ─▶ committed     the reader committed the offer, and reports it afterwards
  │        └───▶ 0             closed by the agent; readers then send requests to it
  └────────┴───▶ 0             closed by the engine
"""

from collections.abc import Callable
from hashlib import blake2b

import msgspec

from kvbus.errors import ErrorCode
from kvbus.protocol.ticket import Ticket

CELLS_BYTES = 4096
"""A page of cells, each of 64 bits in native byte order."""
NUM_CELLS = CELLS_BYTES // 8
Swap = Callable[[int, int, int], int]
"""Compare-and-swap of cell number, expected and new value; returns the previous value."""
_LIVE, _COMMITTED, _NAMED = 1, 2, 3


# Why a swap by the reader is as good as a successful commit at the prefill agent:
#
#     engine   last write, named                                closed, blocks written again
#     agent             offer └▶ named ─▶ live                  closed, a lease or another's commit
#     reader                              └ ticket   copy, live ─▶ committed
#
# The swaps of one cell have one order. Only the engine writes to the blocks again, and it closes
# the cell before it does. The agent has sent `released` or died, or the engine has left an agent
# that hung up or is stopped. In all cases, a reader that finds the cell live has copied before any
# such write. It does not matter which processes are alive.
#
# An engine that died closes no cell, and writes nothing. Therefore cells are for engines with all
# memory in the process that frees blocks. An agent that outlives its connection to the engine no
# longer finds the cell as the engine named it, and makes none live.
#
# The agent closes the cell before it grants an acquire or a commit, and before it reports the end
# of the offer. So exactly one reader has the offer, and the agent knows which one. The value that
# this reader swapped in is a hash of the token of its commit. The token in its `commits` identifies
# it.
#
# A live cell is a hash of the ticket, which has a secret. With an altered ticket, or one of an
# earlier offer that had the cell, a reader finds another value and sends a commit to the agent.
# The mark of a commit is a hash of the reader's token and the offer's secret. So an engine that
# closes the cell of a lost agent's offer can identify the commit.
#
# Messages to the agent have no such order. The end of an engine may arrive after the commit of a
# reader that read blocks as they were written after that end. The cell decides.
class CommitCell:
    """Eight bytes that the prefill engine and both agents map. A swap replaces `Commit`."""

    __slots__ = ("_found", "_live", "_number", "_secret", "_swap")

    def __init__(self, swap: Swap, ticket: Ticket) -> None:
        packed = msgspec.msgpack.encode(msgspec.structs.replace(ticket, traceparent=""))
        self._swap, self._number = swap, ticket.cell % NUM_CELLS
        self._secret = ticket.secret
        self._live = _value(packed, b"", _LIVE)
        self._found: int | None = None

    @property
    def is_closed(self) -> bool:
        return self._found is not None

    def open(self, name: int) -> None:
        """Make the cell live, unless the engine has closed it."""
        self._swap(self._number, _named(name), self._live)

    def commit(self, token: str) -> bool:
        """Commit the offer; return whether it was live."""
        mark = commit_mark(self._secret, token)
        return self._swap(self._number, self._live, mark) == self._live

    def close(self) -> ErrorCode | None:
        """Close the cell; return why the offer is over, or None if the cell was live.

        It is over if a reader committed it, or its engine left, perhaps unnoticed by the agent.
        """
        self._found = self._swap(self._number, self._live, 0)
        if self._found == self._live:
            return None
        return ErrorCode.OFFER_COMPLETED if self.commits else ErrorCode.ENGINE_LOST

    @property
    def commits(self) -> tuple[int, ...]:
        """The mark of the commit that `close` found."""
        return (self._found,) if self._found and self._found & 3 == _COMMITTED else ()

    @property
    def is_committed(self) -> bool:
        """False once the cell is closed."""
        return not self.is_closed and self._swap(self._number, 0, 0) & 3 == _COMMITTED

    def is_committed_by(self, token: str) -> bool:
        return self._swap(self._number, 0, 0) == commit_mark(self._secret, token)


class CellNames:
    """Unique names for the cells of an engine's offers; live ones never share a cell."""

    def __init__(self, swap: Swap) -> None:
        self._swap, self._num_opened = swap, 0
        self._free = list(range(NUM_CELLS))

    def open(self) -> int:
        """Return a new name after writing it to a cell; 0 if no cell is free."""
        if not self._free:
            return 0
        self._num_opened += 1
        name = self._num_opened * NUM_CELLS + self._free.pop()
        self._put(name % NUM_CELLS, _named(name))
        return name

    def close(self, name: int) -> tuple[int, ...]:
        """Return the mark of a commit; readers can no longer commit by this cell."""
        found = self._put(name % NUM_CELLS, 0)
        self._free.append(name % NUM_CELLS)
        return (found,) if found & 3 == _COMMITTED else ()

    def _put(self, number: int, value: int) -> int:
        """Set the cell; a close keeps a commit until the cell's next offer."""
        expected = 0
        while (found := self._swap(number, expected, value)) != expected:
            if not value and found & 3 == _COMMITTED:
                return found
            expected = found
        return expected


def commit_mark(secret: str, token: str) -> int:
    """Return the mark of a commit with ``token`` of the offer with this ``secret``.

    A cell holds it after the commit. Its engine keeps it for the next agent; see `Republished`.
    """
    return _value(token.encode(), blake2b(secret.encode(), digest_size=16).digest(), _COMMITTED)


def _named(name: int) -> int:
    return name << 2 | _NAMED


def _value(content: bytes, key: bytes, kind: int) -> int:
    digest = blake2b(content, key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63 & ~3 | kind
