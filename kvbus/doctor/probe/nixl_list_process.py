"""A process that says what NIXL has here.

Refuses to use it: what it prints is one line of JSON, and what UCX tells goes to stderr.
"""

import contextlib
import os
import sys

import msgspec

from kvbus.doctor.probe import without_torch  # noqa: F401  # before NIXL
from kvbus.doctor.probe.native import die_with_parent
from kvbus.doctor.probe.nixl import Listed
from kvbus.errors import TransferFailed
from kvbus.transport.backends import list_backends
from kvbus.transport.nixl_agent import NixlAgent


def main() -> None:
    """Tell; exit status 1 when NIXL does not work at all."""
    try:
        found = list_backends()
    except TransferFailed as error:
        sys.exit(str(error))
    _have_transports_listed()
    listed = Listed(found.nixl_version, found.memory_types)
    sys.stdout.write(msgspec.json.encode(listed).decode() + "\n")


def _have_transports_listed() -> None:
    """Ask for a transport that UCX does not have: its complaint lists those that it has."""
    os.environ["UCX_TLS"] = "none-of-these"
    with contextlib.suppress(TransferFailed):
        NixlAgent(f"kvbus-doctor/{os.getpid()}")


if __name__ == "__main__":
    die_with_parent()
    main()
