"""What both agents share: the process, the local engines, and the staging slots."""

import sys

# structlog imports rich where it finds it, for tracebacks that no agent prints: `observe` renders
# them before they come to a renderer. That is a seventh of the CPU time of a start, so structlog is
# imported here, before any other module imports it, while rich seems not to be there.
if sys.modules.keys().isdisjoint({"rich", "structlog"}):
    sys.modules["rich"] = None  # type: ignore[assignment]  # None: an import of it fails
    import structlog  # noqa: F401

    del sys.modules["rich"]
