"""Addresses of host names, so that ZeroMQ gets numbers only.

libzmq resolves a name in its one I/O thread, again at each reconnect: one name server that is dead
holds up all sockets of a process for seconds.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from kvbus.errors import ErrorCode, RemoteError

ANSWER_WITHIN_S = 5.0
MAX_LOOKUPS = 32

_places = threading.BoundedSemaphore(MAX_LOOKUPS)


def look_up_all(host: str) -> list[str]:
    """All addresses of ``host``, as they stand in endpoints; blocks.

    Raises `OSError`, or `UnicodeError` for what is no host name.
    """
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    texts = (
        f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])
        for family, *_, address in found
    )
    return list(dict.fromkeys(texts))


async def look_up(host: str) -> str:
    """The first address of ``host``; raises `RemoteError` (``peer_unreachable``) that says why.

    That is after `ANSWER_WITHIN_S` at the latest.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def take(found: str | OSError) -> None:
        if not answer.done():
            _settle(answer, found)

    def deliver(found: str | OSError) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(take, found)

    try:
        _begin(host, deliver)
        return await asyncio.wait_for(answer, ANSWER_WITHIN_S)
    except TimeoutError:
        reason = f"no answer within {ANSWER_WITHIN_S:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    raise RemoteError(
        f"cannot resolve '{host}': {reason}", code=ErrorCode.PEER_UNREACHABLE, host=host
    )


# A lookup cannot be ended, so its thread is a daemon: no process waits for a name server to end.
def _begin(host: str, deliver: Callable[[str | OSError], None]) -> None:
    if not _places.acquire(blocking=False):
        raise OSError(f"{MAX_LOOKUPS} other names are being looked up")

    def run() -> None:
        found: str | OSError
        try:
            found = look_up_all(host)[0]
        except OSError as error:
            found = error
        except UnicodeError:
            found = OSError("it is not a host name")
        _places.release()
        deliver(found)

    threading.Thread(target=run, name="kvbus-name", daemon=True).start()


def _settle(answer: "asyncio.Future[str]", found: str | OSError) -> None:
    if isinstance(found, OSError):
        answer.set_exception(found)
    else:
        answer.set_result(found)
