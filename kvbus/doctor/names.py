"""The address of a host, or why there is none, within seconds: a name server may be silent."""

import anyio

from kvbus.bus.connection import look_up


def address_of(host: str) -> str:
    """Raises `RemoteError` (``peer_unreachable``)."""
    return anyio.run(look_up, host).strip("[]")
