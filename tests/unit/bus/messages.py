"""A request of the tests' own, and its reply."""

from typing import Any, ClassVar

from kvbus.bus import Call, RequestServer, Session
from kvbus.protocol import Message, Request


class Echoed(Message, frozen=True):
    number: int = 0
    text: str = ""
    fill: bytes = b""


class Ask(Request[Echoed], frozen=True):
    op: ClassVar[str] = "ask"

    number: int = 0
    text: str = ""
    fill: bytes = b""


class AskNow(Request[Echoed], frozen=True):
    op: ClassVar[str] = "ask_now"
    at_once: ClassVar[bool] = True

    number: int = 0


def asked(request_id: int, boot: str = "raw", op: str = "ask", **body: Any) -> dict[str, Any]:
    return {"v": 1, "op": op, "id": request_id, "boot": boot, "secret": boot, "body": body}


def echo(asked: Ask, call: Call) -> None:
    call.reply(Echoed(number=asked.number, text=asked.text, fill=asked.fill))


def session_of(server: RequestServer, boot: str) -> Session:
    return next(session for session in server.sessions if session.boot == boot)
