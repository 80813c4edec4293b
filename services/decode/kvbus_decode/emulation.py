"""READs that UCX emulates in software, at up to 0.5 GB/s."""

from collections.abc import Collection

from kvbus.data.messages import MemoryKind
from kvbus.protocol.tools import Fault

ADVICE = (
    'Set gpu_slots = "host" at both agents, or "gpu" at both if they are on one machine. READs '
    "from or into GPU memory of another machine need an RDMA device in data_interfaces."
)


# By memory kinds of the two sides:
#
#     one machine     VRAM and VRAM: CUDA IPC     DRAM and DRAM: CMA      VRAM and DRAM: emulated
#     two machines    DRAM and DRAM: any network  with VRAM: RDMA, or emulated
def is_emulated(
    ours: Collection[MemoryKind],
    theirs: Collection[MemoryKind],
    *,
    on_one_machine: bool,
    has_rdma: bool,
) -> bool:
    kinds = {*ours, *theirs} if ours and theirs else set[MemoryKind]()
    return len(kinds) > 1 if on_one_machine else "VRAM" in kinds and not has_rdma


def emulation_fault(
    name: str, ours: Collection[MemoryKind], theirs: Collection[MemoryKind]
) -> Fault:
    there, here = ("+".join(sorted(kinds)) for kinds in (theirs, ours))
    return Fault(
        f"UCX emulates READs from {name} in software: the staging slots there are in {there}, "
        f"those here in {here}",
        ADVICE,
    )
