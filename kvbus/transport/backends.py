"""Lists what this installation of NIXL has: its version and its backends.

A backend that is listed with memory types can be loaded, and that is all.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from kvbus.errors import TransferFailed
from kvbus.transport.nixl_agent import nixl_api


@dataclass(frozen=True, slots=True)
class Backends:
    """``memory_types`` by backend; one that cannot be loaded here has none."""

    nixl_version: str
    memory_types: dict[str, tuple[str, ...]]


def list_backends() -> Backends:
    """What is there, by an agent without any backend. Raises `TransferFailed`."""
    api, errors = nixl_api()
    try:
        agent = api.nixl_agent("kvbus/backends", api.nixl_agent_config(backends=[]))
        names = sorted(agent.get_plugin_list())
        types = {name: tuple(agent.get_plugin_mem_types(name)) for name in names}
    except errors as error:
        raise TransferFailed(f"NIXL lists no backends: {error}") from error
    return Backends(_version(), types)


def _version() -> str:
    try:
        return version("nixl")
    except PackageNotFoundError:
        return ""
