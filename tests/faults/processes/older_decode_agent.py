"""A decode agent as one of before digests were: what it does not know of a `delegate` it drops.

Run as ``python older_decode_agent.py python -m kvbus_decode CONFIG``: an `AgentProcess.runner`.
"""

import sys

from msgspec import structs

from kvbus.bus import Call
from kvbus.protocol import Delegate, Message, Size, Text
from kvbus_decode.__main__ import main
from kvbus_decode.read import delegate
from kvbus_decode.read.delegate import DelegateServer

_delegate = DelegateServer.delegate


class OlderDelegated(Message, frozen=True):
    """The reply without ``one_in``."""

    num_bytes: Size
    path: Text


def older_reply(*, num_bytes: int, path: str, one_in: int) -> OlderDelegated:
    return OlderDelegated(num_bytes=num_bytes, path=path)


def older_delegate(self: DelegateServer, asked: Delegate, call: Call) -> None:
    _delegate(self, structs.replace(asked, one_in=0), call)


if __name__ == "__main__":
    setattr(DelegateServer, "delegate", older_delegate)  # noqa: B010 - mypy allows no other way
    setattr(delegate, "Delegated", older_reply)  # noqa: B010
    sys.argv = ["kvbus-decode", *sys.argv[4:]]
    main()
