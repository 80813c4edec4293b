"""A request of the tests' own, its reply, and a server of it."""

from typing import Any, ClassVar

from kvbus.bus import BusContext, Call, RequestServer, Session
from kvbus.bus.server import Handler
from kvbus.protocol import Message, Request


class Echoed(Message, frozen=True):
    """What was asked, again."""

    number: int = 0
    text: str = ""
    fill: bytes = b""


class Ask(Request[Echoed], frozen=True):
    """Asks for an echo."""

    op: ClassVar[str] = "ask"

    number: int = 0
    text: str = ""
    fill: bytes = b""


class AskNow(Request[Echoed], frozen=True):
    """Asks for an echo that never takes a while."""

    op: ClassVar[str] = "ask_now"
    at_once: ClassVar[bool] = True

    number: int = 0
    text: str = ""
    fill: bytes = b""


def echo(asked: Ask | AskNow, call: Call) -> None:
    """Answer at once."""
    call.reply(Echoed(number=asked.number, text=asked.text, fill=asked.fill))


def serve(
    context: BusContext, endpoint: str, handler: Handler = echo, **options: Any
) -> RequestServer:
    """A server with the boot id ``server``, unless ``options`` say another, that takes `Ask`."""
    server = RequestServer(context, endpoint, **{"boot": "server", **options})
    server.on({Ask: handler})
    return server


def session_of(server: RequestServer, boot: str) -> Session | None:
    """The server's session with that peer."""
    return next((session for session in server.sessions if session.boot == boot), None)
