"""Who a request is from: more than its boot id, which others have heard."""

from collections.abc import Hashable
from hashlib import blake2b
from typing import NamedTuple

from kvbus.protocol.envelope import RequestFrame


class Sender(NamedTuple):
    """Who a request is from. Boot ids are heard by others: ``proof`` is what they cannot show.

        with a secret     it comes with any connection         proof: the secret
        without, keys     any connection of the same key       proof: empty
        without, no keys  this connection and no other         proof: its routing id

    So another one under a known boot id is another sender, with a session of its own.
    """

    key: str
    boot: str
    proof: str | bytes

    @property
    def share(self) -> Hashable:
        """Who pays for what is kept: the key, however many clients it has."""
        return self.key or self

    @property
    def name(self) -> str:
        """Stands for the sender in tables and logs, without its secret."""
        return blake2b(repr(tuple(self)).encode(), digest_size=16).hexdigest()


def sender_of(request: RequestFrame, *, key: str, identity: bytes) -> Sender:
    """The sender of a request that came by the connection ``identity``, of ``key`` or of none."""
    return Sender(key, request.boot, request.secret or (b"" if key else identity))
