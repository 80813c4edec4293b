"""A request as it comes, and who it is from: more than its boot id, which others have heard.

Refuses whatever is no request of one frame.
"""

from hashlib import blake2b
from typing import NamedTuple

from kvbus.bus.limits import require_size
from kvbus.errors import ProtocolError
from kvbus.protocol.envelope import RequestFrame, decode


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
    def name(self) -> str:
        """Stands for the sender in tables and logs, without its secret."""
        return blake2b(repr(tuple(self)).encode(), digest_size=16).hexdigest()


def sender_of(request: RequestFrame, *, key: str, identity: bytes) -> Sender:
    """The sender of a request that came by the connection ``identity``, of ``key`` or of none."""
    return Sender(key, request.boot, request.secret or (b"" if key else identity))


def read_request(frames: list[bytes], max_bytes: int) -> RequestFrame:
    """The request in the frames behind the routing id; raises `ProtocolError`."""
    if len(frames) != 1:
        raise ProtocolError(f"message has {len(frames)} frames or more")
    require_size(frames[0], max_bytes)
    envelope = decode(frames[0])
    if not isinstance(envelope, RequestFrame):
        raise ProtocolError("only requests are answered here")
    return envelope
