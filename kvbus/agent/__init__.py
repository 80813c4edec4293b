"""What both agents share: the process, the local engines, and the staging slots.

Tests name this module alone; the product imports from the files.
"""
# ruff: noqa: F403  the files are the list

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# structlog imports rich where it finds it, for tracebacks that no agent prints: `observe` renders
# them before they come to a renderer. That is a seventh of the CPU time of a start, so structlog is
# imported here, before any other module imports it, while rich seems not to be there.
if sys.modules.keys().isdisjoint({"rich", "structlog"}):
    sys.modules["rich"] = None  # type: ignore[assignment]  # None: an import of it fails
    import structlog  # noqa: F401

    del sys.modules["rich"]

if TYPE_CHECKING:
    from kvbus.agent.access import *
    from kvbus.agent.config import *
    from kvbus.agent.copiers import *
    from kvbus.agent.data_plane import *
    from kvbus.agent.engines import *
    from kvbus.agent.http import *
    from kvbus.agent.identity import *
    from kvbus.agent.loop import *
    from kvbus.agent.otlp import *
    from kvbus.agent.runtime import *
    from kvbus.agent.slots import *
    from kvbus.agent.sources import *
    from kvbus.agent.status import *

_FILES = (
    *("access", "config", "copiers", "data_plane", "engines", "http", "identity", "loop", "slots"),
    *("sources", "status", "runtime", "otlp"),
)


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: an agent starts without what it does not need yet."""
    for file in () if name.startswith("_") else _FILES:
        found = vars(import_module(f"{__name__}.{file}")).get(name)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
