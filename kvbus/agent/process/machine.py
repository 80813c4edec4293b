"""Which machine this process runs on, as far as memory can be shared there."""

from pathlib import Path

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
