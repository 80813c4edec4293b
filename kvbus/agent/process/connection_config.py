"""The keys of an agent's configuration that bound what others connect to its TCP sockets.

Refuses nothing itself; `kvbus.agent.process.config` reads and checks.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


class ConnectionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many connections others may have, and how much may wait on each."""

    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Most connections to the peer socket, and to the events socket.",
        ),
    ] = 1024
    max_by_address: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Most connections of one address to each of these sockets.",
        ),
    ] = 256
    max_new_by_address_s: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Most connections of one address a second that may begin a handshake.",
        ),
    ] = 500
    max_unread_bytes: Annotated[
        int,
        Meta(
            ge=5 << 20,
            le=1 << 30,
            description="Most bytes of one peer connection that came and wait to be read, a "
            "message that is not whole included; of all connections four times as much.",
        ),
    ] = 6 << 20
    max_unsent_bytes: Annotated[
        int,
        Meta(
            ge=17 << 20,
            le=1 << 30,
            description="Most bytes that one peer connection was sent and has not taken; of all "
            "connections four times as much.",
        ),
    ] = 32 << 20
