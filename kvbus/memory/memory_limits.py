"""Checks of available memory, as the kernel's out-of-memory killer may choose any process."""

from pathlib import Path

from kvbus.errors import ErrorCode, SegmentError

_USABLE_MAPPINGS_PERCENT = 75
_USABLE_PERCENT = 95  # of the available memory; the machine needs the rest


def check_memory(size_bytes: int) -> None:
    room_bytes = available_bytes()
    if size_bytes > room_bytes:
        raise SegmentError(
            f"a segment of {size_bytes} bytes does not fit: {room_bytes} bytes of memory are "
            "available; make it smaller, or free memory",
            size_bytes=size_bytes,
            available_bytes=room_bytes,
        )


def check_mappings() -> None:
    """Raise ``SegmentError`` (busy) near the limit of mappings: threads need some, too."""
    most = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    num_mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
    if num_mappings * 100 > most * _USABLE_MAPPINGS_PERCENT:
        raise SegmentError(
            f"this process has {num_mappings} mappings, and the machine allows {most} "
            "(vm.max_map_count): pass fewer and larger segments, or raise it",
            code=ErrorCode.BUSY,
            num_mappings=num_mappings,
        )


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    room_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    return min(room_bytes, _cgroup_room_bytes(room_bytes)) * _USABLE_PERCENT // 100


def cgroup_folder() -> Path:
    """It may be missing."""
    groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line[len("0::/") :] for line in groups if line.startswith("0::/")), "")
    return Path("/sys/fs/cgroup") / own


def _cgroup_room_bytes(unlimited_bytes: int) -> int:
    try:
        folder = cgroup_folder()
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used_bytes = int((folder / "memory.current").read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return unlimited_bytes
    if limit == "max":
        return unlimited_bytes
    fields = dict(line.split(" ", 1) for line in lines)
    reclaimable_bytes = int(fields["active_file"]) + int(fields["inactive_file"])
    return max(0, int(limit) - used_bytes + reclaimable_bytes)
