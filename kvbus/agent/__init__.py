"""What both agents share: the process, the local engines, and the staging slots.

A name is imported when it is asked for: an agent starts without what it does not need yet.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbus.agent.engines.local_engine import EngineProcess, LocalEngine
    from kvbus.agent.engines.memory_return import MemoryReturn
    from kvbus.agent.http.answer import Route, as_text
    from kvbus.agent.http.door import Door
    from kvbus.agent.http.health import Health
    from kvbus.agent.http.loop_asker import LoopAsker
    from kvbus.agent.http.routes import AgentPages
    from kvbus.agent.http.server import HttpServer
    from kvbus.agent.otlp.outbox import SETTLE_S, SpanOutbox
    from kvbus.agent.otlp.post import HEADERS, Answer, Collector
    from kvbus.agent.otlp.sender import SpanSender
    from kvbus.agent.process.access import Access
    from kvbus.agent.process.addresses import check_room_beside
    from kvbus.agent.process.calibration import Calibration
    from kvbus.agent.process.config import (
        AgentConfig,
        convert_config,
        load_config,
        load_shared_config,
    )
    from kvbus.agent.process.config_sources import variable
    from kvbus.agent.process.data_plane import UCX_INTERFACES, DataPlane, choose_interfaces
    from kvbus.agent.process.faults import OLD_S, current_faults
    from kvbus.agent.process.loop import AgentLoop
    from kvbus.agent.process.machine import machine_id
    from kvbus.agent.process.runtime import Runtime, ServiceFactory
    from kvbus.agent.process.takeover import take_over
    from kvbus.agent.process.ticket_keys import load_ticket_keys
    from kvbus.agent.staging.copiers import Copiers
    from kvbus.agent.staging.devices import HOST, StagingDevices
    from kvbus.agent.staging.gpu import preferred
    from kvbus.agent.staging.slot_memory import SlotMemory
    from kvbus.agent.staging.turns import FairThreads, Job, Work

_MODULES = {
    "engines.local_engine": "EngineProcess LocalEngine",
    "engines.memory_return": "MemoryReturn",
    "http.answer": "Route as_text",
    "http.door": "Door",
    "http.health": "Health",
    "http.loop_asker": "LoopAsker",
    "http.routes": "AgentPages",
    "http.server": "HttpServer",
    "otlp.outbox": "SETTLE_S SpanOutbox",
    "otlp.post": "HEADERS Answer Collector",
    "otlp.sender": "SpanSender",
    "process.access": "Access",
    "process.addresses": "check_room_beside",
    "process.calibration": "Calibration",
    "process.config": "AgentConfig convert_config load_config load_shared_config",
    "process.config_sources": "variable",
    "process.data_plane": "UCX_INTERFACES DataPlane choose_interfaces",
    "process.faults": "OLD_S current_faults",
    "process.loop": "AgentLoop",
    "process.machine": "machine_id",
    "process.runtime": "Runtime ServiceFactory",
    "process.takeover": "take_over",
    "process.ticket_keys": "load_ticket_keys",
    "staging.copiers": "Copiers",
    "staging.devices": "HOST StagingDevices",
    "staging.gpu": "preferred",
    "staging.slot_memory": "SlotMemory",
    "staging.turns": "FairThreads Job Work",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, from the module that has it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "HEADERS", "HOST", "OLD_S", "SETTLE_S", "UCX_INTERFACES", "Access", "AgentConfig", "AgentLoop",
    "AgentPages", "Answer", "Calibration", "Collector", "Copiers", "DataPlane", "Door",
    "EngineProcess", "FairThreads", "Health", "HttpServer", "Job", "LocalEngine", "LoopAsker",
    "MemoryReturn", "Route", "Runtime", "ServiceFactory", "SlotMemory", "SpanOutbox", "SpanSender",
    "StagingDevices", "Work", "as_text", "check_room_beside", "choose_interfaces",
    "convert_config", "current_faults", "load_config", "load_shared_config", "load_ticket_keys",
    "machine_id", "preferred", "take_over", "variable",
]  # fmt: skip
