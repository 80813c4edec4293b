"""Where this process runs, as far as that decides who can share memory with it."""

import os
from pathlib import Path

from kvbus.protocol.mapped import Sharing

_NAMESPACES = Path("/proc/self/ns")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# Containers of one machine have machine ids of their own, or that of their image, and share memory
# all the same; a machine that was cloned has that of the first. The kernel's boot id is one for all
# containers of a kernel, and another after each boot. Where it is equal by mistake, as in machines
# that were restored from one snapshot, the socket is not there, or its agent has another boot id.
def machine_id() -> str:
    """The boot id of the kernel; empty where it does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def mount_namespace() -> str:
    """What the kernel calls the mount namespace: paths of another lead elsewhere."""
    return _namespace("mnt")


def pid_namespace() -> str:
    """What the kernel calls the PID namespace: UCX reads the memory of its processes alone."""
    return _namespace("pid")


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
        pid_namespace=pid_namespace(),
        path=path,
        closed=closed,
        engines=engines or {},
    )
