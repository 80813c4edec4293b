"""The word of an offer, in a page of the prefill engine: whoever swaps it first decides.

named ─▶ live ─▶ taken     the reader took the offer, and says so after that
  │        └───▶ 0         closed by the agent, which readers ask then
  └────────┴───▶ 0         closed by the engine
"""

from collections.abc import Callable
from hashlib import blake2b

import msgspec

from kvbus.errors import ErrorCode
from kvbus.protocol.ticket import Ticket

WORDS_BYTES = 4096
"""Size of a page of words, each of 64 bits in the machine's order."""
NUM_WORDS = WORDS_BYTES // 8
Swap = Callable[[int, int, int], int]
"""``swap(number, expected, value)`` puts the value there if the word is as expected; returns what
was there."""
_LIVE, _TAKEN, _NAMED = 1, 2, 3


# Why a swap by the reader is as good as a yes of the prefill agent:
#
#     engine   last write, named                                closed, blocks written again
#     agent             offer └▶ named ─▶ live                  closed, a lease or another's take
#     reader                              └ ticket   copy, live ─▶ taken
#
# A word has one order of its swaps. Only the engine writes to the blocks again, and it closes the
# word before, for whatever reason it has them back: the agent said `released`, or died, or was left
# as it hung up or is stopped. So a reader that finds the word live has copied before that: it need
# not know who lives. An engine that died closes nothing, and writes nothing: hence words are for
# engines whose memory is all in the process that gives blocks back. An agent that goes on after its
# engine has left it finds no word as the engine named it, and makes none live.
#
# The agent closes the word before it lets anyone claim or take, and before it says how the offer
# ended: so one reader has it, and the agent knows. What that one has swapped in is of the token of
# its take: when it says `taken`, it is known by that.
#
# A live word is a hash of the ticket, which has a secret. So whoever shows a ticket that was
# altered, or one of an offer that had the word before, finds another value, and asks the agent.
# The mark of a commit is a hash of the reader's token and the offer's secret, so an engine that
# closes the word of a lost agent's offer finds who committed it.
#
# What the agent hears has no order: the end of an engine may come behind the take of a reader that
# has read what was written after it. The word tells.
class Word:
    """The word that ``ticket`` names."""

    __slots__ = ("_found", "_live", "_number", "_secret", "_swap")

    def __init__(self, swap: Swap, ticket: Ticket) -> None:
        told = msgspec.msgpack.encode(msgspec.structs.replace(ticket, traceparent=""))
        self._swap, self._number = swap, ticket.word % NUM_WORDS
        self._secret = ticket.secret
        self._live = _value(told, b"", _LIVE)
        self._found: int | None = None

    @property
    def is_closed(self) -> bool:
        return self._found is not None

    def open(self, name: int) -> None:
        """Make it live, unless the engine has taken back what it named."""
        self._swap(self._number, _named(name), self._live)

    def take(self, token: str) -> bool:
        """Whether the offer was there to be taken; it is no more."""
        mark = commit_mark(self._secret, token)
        return self._swap(self._number, self._live, mark) == self._live

    def close(self) -> ErrorCode | None:
        """From now on nobody takes it. Returns what has become of the offer: a reader has taken it,
        or its engine has left the agent, which may not know it yet.
        """
        self._found = self._swap(self._number, self._live, 0)
        if self._found == self._live:
            return None
        return ErrorCode.OFFER_COMPLETED if self.commits else ErrorCode.ENGINE_LOST

    @property
    def commits(self) -> tuple[int, ...]:
        """The mark of the commit that was found when the word was closed, if there was one."""
        return (self._found,) if self._found and self._found & 3 == _TAKEN else ()

    def is_taken_by(self, token: str) -> bool:
        """Whether a reader with this token has taken the offer."""
        return self._swap(self._number, 0, 0) == commit_mark(self._secret, token)


class WordNames:
    """What an engine calls the words of its offers: each name once, and no two for one word."""

    def __init__(self, swap: Swap) -> None:
        self._swap, self._round = swap, 0
        self._free = list(range(NUM_WORDS))

    def open(self) -> int:
        """The name for an offer that is about to be made; 0 when no word is free."""
        if not self._free:
            return 0
        self._round += 1
        name = self._round * NUM_WORDS + self._free.pop()
        self._put(name % NUM_WORDS, _named(name))
        return name

    def close(self, name: int) -> tuple[int, ...]:
        """Close the word of an offer: from now on no reader commits by it.

        Return the mark of the commit that was there, if there was one.
        """
        found = self._put(name % NUM_WORDS, 0)
        self._free.append(name % NUM_WORDS)
        return (found,) if found & 3 == _TAKEN else ()

    def _put(self, number: int, value: int) -> int:
        """Whatever is there, which is returned; a commit is left there until the next offer."""
        expected = 0
        while (found := self._swap(number, expected, value)) != expected:
            if not value and found & 3 == _TAKEN:
                return found
            expected = found
        return expected


def commit_mark(secret: str, token: str) -> int:
    """Return the mark of a commit with ``token`` of the offer that has this ``secret``.

    A word holds it after the commit. Its engine keeps it for the next agent, see `Republished`.
    """
    return _value(token.encode(), blake2b(secret.encode(), digest_size=16).digest(), _TAKEN)


def _named(name: int) -> int:
    return name << 2 | _NAMED


def _value(content: bytes, key: bytes, kind: int) -> int:
    digest = blake2b(content, key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63 & ~3 | kind
