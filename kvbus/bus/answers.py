"""What comes back to who asks: replies and notices, and the typed reply or error in one.

Refuses whatever a server does not send.
"""

from kvbus.errors import KVBusError, ProtocolError
from kvbus.protocol.envelope import Notice, Reply, RequestFrame, decode
from kvbus.protocol.message import R, Request, read_reply, refusal


def read_answer(frames: list[bytes]) -> Reply | Notice:
    """The envelope; raises `ProtocolError`."""
    envelope = decode(frames[0])
    if len(frames) != 1 or isinstance(envelope, RequestFrame):
        raise ProtocolError("a server sends replies and notices of one frame")
    return envelope


def outcome_of(message: Request[R], reply: Reply | KVBusError) -> R | KVBusError:
    """The typed reply to ``message``, or the error that stands for it."""
    if isinstance(reply, KVBusError):
        return reply
    if reply.error is not None:
        return refusal(reply.error)
    try:
        return read_reply(message, reply.ok or {})
    except ProtocolError as error:
        return error
