"""Which protocol an agent speaks, and which machine it runs on."""

import os
from functools import cache
from pathlib import Path

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.tools import Sharing


def check_protocol(theirs_min: int, theirs_max: int) -> None:
    """Raise `LocalError` unless the other side's range has the version that this side speaks."""
    if not theirs_min <= PROTOCOL_VERSION <= theirs_max:
        raise LocalError(
            f"the other side speaks protocol {theirs_min} to {theirs_max}, "
            f"this agent speaks {PROTOCOL_VERSION}",
            code=ErrorCode.UNSUPPORTED_VERSION,
            theirs=f"{theirs_min}..{theirs_max}",
            ours=PROTOCOL_VERSION,
        )


_NAMESPACES = Path("/proc/self/ns")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# Containers of one machine have machine ids of their own, or that of their image, and share memory
# all the same; a machine that was cloned has that of the first. The kernel's boot id is one for all
# containers of a kernel, and another after each boot. Where it is equal by mistake, as in machines
# that were restored from one snapshot, the socket is not there, or its agent has another boot id.
@cache
def machine_id() -> str:
    """The boot id of the kernel; empty where it does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def mount_namespace() -> str:
    """What the kernel calls the mount namespace: paths of another lead elsewhere."""
    return _namespace("mnt")


@cache
def _namespace(kind: str) -> str:
    try:
        return str((_NAMESPACES / kind).readlink())
    except OSError:
        return ""


def sharing(*, path: str = "", closed: str = "", engines: dict[str, str] | None = None) -> Sharing:
    """What an agent says of itself, with what it lends or maps."""
    return Sharing(
        machine=machine_id(),
        uid=os.geteuid(),
        mount_namespace=mount_namespace(),
        pid_namespace=_namespace("pid"),  # UCX reads the memory of its processes alone
        path=path,
        closed=closed,
        engines=engines or {},
    )
