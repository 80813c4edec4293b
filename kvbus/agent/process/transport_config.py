"""The keys of an agent's configuration that say how NIXL is used.

Refuses nothing itself; `kvbus.agent.process.config` reads and checks.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


class TransportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the agent moves bytes with NIXL."""

    slice_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            le=1 << 30,
            description="Largest post of one transfer, and largest part of a copy out of mapped "
            "memory, in bytes.",
        ),
    ] = 8 << 20
    slice_descriptors: Annotated[
        int, Meta(ge=1, le=1 << 16, description="Most descriptors in one post.")
    ] = 2048
    close_timeout_s: Annotated[
        float,
        Meta(gt=0, le=86_400, description="How long a stop waits for posted transfers to end."),
    ] = 5.0
