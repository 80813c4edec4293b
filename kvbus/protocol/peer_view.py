"""What an agent says of another one, when it is asked about it in `Status`."""

import msgspec

from kvbus.protocol.message import Size, Text


class PeerView(msgspec.Struct, frozen=True):
    """What an agent speaks and is known by, and what it knows of the agent that was asked about.

    ``server_key`` is its own CURVE key, ``roles`` what it trusts the other's key as. The rest is
    that of a decode agent: whether its configuration lists the other, and all of that is ready
    for the first fetch; the routes that it knows; why the last handshake came to nothing.
    """

    min_protocol: Size = 0
    max_protocol: Size = 0
    server_key: Text = ""
    roles: tuple[Text, ...] = ()
    listed: bool = False
    warm: bool = False
    num_routes: Size = 0
    problem: Text = ""
