"""Code shared by both agents."""

import sys

# structlog imports rich if it is installed, for tracebacks that no agent prints: `observe` renders
# them before any renderer sees them. Importing rich takes a seventh of the CPU time of a start.
# Therefore rich is hidden while structlog is imported here, before any other module imports it.
if sys.modules.keys().isdisjoint({"rich", "structlog"}):
    sys.modules["rich"] = None  # type: ignore[assignment]  # None: an import of it fails
    import structlog  # noqa: F401

    del sys.modules["rich"]
