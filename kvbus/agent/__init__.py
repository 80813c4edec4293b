"""What both agents share: the process, the local engines, and the staging slots.

A name is imported when it is asked for: an agent starts without what it does not need yet.
"""

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
    from kvbus.agent.access import Access, load_http_token, load_ticket_keys
    from kvbus.agent.config import (
        AgentConfig,
        convert_config,
        load_config,
        load_shared_config,
    )
    from kvbus.agent.copiers import Copiers, FairThreads, Job, Work
    from kvbus.agent.data_plane import UCX_INTERFACES, DataPlane, choose_interfaces
    from kvbus.agent.engines import EngineProcess, LocalEngine
    from kvbus.agent.http import Pages, ask_loop
    from kvbus.agent.identity import machine_id
    from kvbus.agent.loop import AgentLoop
    from kvbus.agent.otlp import SpanSender
    from kvbus.agent.runtime import Runtime, ServiceFactory
    from kvbus.agent.slots import HOST, SlotMemory, StagingDevices
    from kvbus.agent.sources import variable
    from kvbus.agent.status import OLD_S, current_faults

_MODULES = {
    "copiers": "Copiers FairThreads Job Work",
    "engines": "EngineProcess LocalEngine",
    "http": "Pages ask_loop",
    "loop": "AgentLoop",
    "otlp": "SpanSender",
    "access": "Access load_http_token load_ticket_keys",
    "config": "AgentConfig convert_config load_config load_shared_config",
    "sources": "variable",
    "data_plane": "UCX_INTERFACES DataPlane choose_interfaces",
    "identity": "machine_id",
    "runtime": "Runtime ServiceFactory",
    "slots": "HOST SlotMemory StagingDevices",
    "status": "OLD_S current_faults",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, from the module that has it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "HOST", "OLD_S", "UCX_INTERFACES", "Access", "AgentConfig", "AgentLoop",
    "Copiers", "DataPlane",
    "EngineProcess", "FairThreads", "Job", "LocalEngine", "Pages",
    "Runtime", "ServiceFactory", "SlotMemory", "SpanSender",
    "StagingDevices", "Work", "ask_loop", "choose_interfaces",
    "convert_config", "current_faults", "load_config", "load_http_token",
    "load_shared_config", "load_ticket_keys",
    "machine_id", "variable",
]  # fmt: skip
