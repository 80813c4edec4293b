"""The address of a host, or why there is none, within seconds: a name server may be silent."""

import threading

from kvbus.bus.names import NAMES
from kvbus.errors import ErrorCode, RemoteError

ANSWER_S = 5.0


def address_of(host: str) -> str:
    """Raises `RemoteError` (``peer_unreachable``)."""
    done, found = threading.Event(), list[str | OSError]()

    def take(address: str | OSError) -> None:
        found.append(address)
        done.set()

    NAMES.find(host.strip("[]"), take)
    if not done.wait(ANSWER_S):
        problem = f"the name server does not tell the address of '{host}' within {ANSWER_S:g} s"
    elif isinstance(found[0], OSError):
        problem = f"'{host}' cannot be resolved: {found[0].strerror or found[0]}"
    else:
        return found[0].strip("[]")
    raise RemoteError(problem, code=ErrorCode.PEER_UNREACHABLE, host=host)
