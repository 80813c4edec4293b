"""Imported before NIXL, it keeps NIXL from importing a torch that is built for CPUs only.

Refuses to change which NIXL is chosen: nixl asks torch for its CUDA, and such a torch has none. To
hear that costs a second of each process; where the machine is small, that was most of the time.
"""

import sys

from kvbus.doctor.probe.host import installed_version

if (installed_version("torch") or "").endswith("+cpu"):
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to say: not here
