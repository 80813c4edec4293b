"""Errors in replies: the map on the wire, and the exception that it becomes.

Refuses nothing: whatever a peer puts into the map, a `RequestRefused` comes out.
"""

from kvbus.errors import ErrorCode, KVBusError, RequestRefused
from kvbus.protocol.envelope import Body

_MAX_MESSAGE_CHARS = 1000
_MAX_DETAILS = 32


def refusal_body(error: KVBusError) -> Body:
    """The ``error`` map of a reply: code, message and detail."""
    return {"code": str(error.code), "message": error.message, "detail": error.detail}


def refusal_error(body: Body) -> RequestRefused:
    """The exception for an ``error`` map; an unknown code becomes ``internal``, kept in detail."""
    message, detail = body.get("message"), _detail(body.get("detail"))
    code = body.get("code")
    try:
        known = ErrorCode(str(code))
    except ValueError:
        known = ErrorCode.INTERNAL
        detail["remote_code"] = str(code)[:64]
    text = message[:_MAX_MESSAGE_CHARS] if isinstance(message, str) else "refused without a message"
    error = RequestRefused(text, code=known)
    error.detail = detail
    return error


def _detail(value: object) -> dict[str, str | int | float]:
    if not isinstance(value, dict):
        return {}
    plain = {k: v for k, v in value.items() if isinstance(v, (str, int, float))}
    return dict(list(plain.items())[:_MAX_DETAILS])
