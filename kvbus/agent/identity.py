"""The version of an agent, and its machine."""

import os
from functools import cache
from pathlib import Path

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.tools import Sharing


def check_protocol(theirs_min: int, theirs_max: int) -> None:
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


# Machine ids do not identify a machine. Containers of one machine share memory, but have separate
# machine ids or that of their image. A cloned machine keeps the id of its original. The kernel's
# boot id is the same for all containers of a kernel, and changes with each boot. Machines restored
# from one snapshot share it by mistake. Then the socket is missing, or its agent has another boot
# id.
@cache
def machine_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def mount_namespace() -> str:
    """Return the kernel's name of this namespace: paths are valid only inside it."""
    return _namespace("mnt")


@cache
def _namespace(kind: str) -> str:
    try:
        return str((_NAMESPACES / kind).readlink())
    except OSError:
        return ""


def sharing(*, path: str = "", closed: str = "", engines: dict[str, str] | None = None) -> Sharing:
    return Sharing(
        machine=machine_id(),
        uid=os.geteuid(),
        mount_namespace=mount_namespace(),
        pid_namespace=_namespace("pid"),  # UCX shares memory only within one PID namespace
        path=path,
        closed=closed,
        engines=engines or {},
    )
