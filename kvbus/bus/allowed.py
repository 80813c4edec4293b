"""Where sockets may connect to: addresses and ports that the configuration names.

Refuses names: what is compared are the numbers that ZeroMQ is given.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from kvbus.errors import ConfigError, ErrorCode, LocalError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class _Range:
    network: Network
    ports: range


class AllowedPeers:
    """Addresses or networks, each with any port, one, or a range of them.

    ``10.0.0.7``, ``10.1.0.0/16:7501``, ``[fd00::/8]:7000-7999``.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._ranges = tuple(_parse(entry) for entry in entries)

    def check(self, endpoint: str) -> None:
        """Raise `LocalError` (``forbidden``) unless the numeric ``endpoint`` is one of ours."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        plain = getattr(address, "ipv4_mapped", None) or address
        if not any(int(port) in one.ports and plain in one.network for one in self._ranges):
            raise LocalError(
                f"{endpoint} is not in 'allowed_peers'",
                code=ErrorCode.FORBIDDEN,
                endpoint=endpoint,
            )


def _parse(entry: str) -> _Range:
    host, ports = entry, ""
    if entry.startswith("["):
        host, _, ports = entry[1:].partition("]")
        ports = ports.removeprefix(":")
    elif entry.count(":") == 1:
        host, _, ports = entry.partition(":")
    first, dash, last = ports.partition("-")
    try:
        network = ipaddress.ip_network(host, strict=False)
        allowed = range(1, MAX_PORT + 1)
        if ports:
            allowed = allowed[int(first) - 1 : int(last if dash else first)]
    except ValueError as error:
        raise ConfigError(
            f"key 'allowed_peers': '{entry}' is not ADDRESS[/BITS][:PORT[-PORT]]; "
            f"in brackets when it is IPv6 with ports: {error}",
            key="allowed_peers",
        ) from error
    return _Range(network, allowed)
