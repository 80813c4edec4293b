"""Adapter for nixl, and its only import."""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbus.data.messages import UCX_ONLY, Backends, MemoryKind
from kvbus.data.nixl import Handle, HandleForgotten, PeerMetadata, Registration
from kvbus.data.slicing import Rows
from kvbus.errors import ConfigError, KVBusError, PeerLost, SegmentError, TransferFailed
from kvbus.memory.nvidia import finds_driver


# The CUDA version of this process decides which of its packages nixl loads (nixl_cu12, nixl_cu13,
# ...). nixl takes the first of these that names a CUDA version:
#
#   1. torch, cuda-python or cupy, where one is imported already
#   2. the file torch/version.py, read from the disk without an import of torch
#   3. `from torch.version import cuda`, which imports torch: 1 s and 190 MB
#
# Step 3 runs only if step 2 found a torch for CPUs, or none. It reads the same file again, with the
# same result: no CUDA. So a stand-in for torch.version without a CUDA version keeps the choice and
# saves the import. Steps 1 and 2 ignore it: it is not used where torch is imported, and
# find_spec("torch") searches for another module.
@contextlib.contextmanager
def _torch_not_imported() -> Iterator[None]:
    if "torch" in sys.modules:
        yield
        return
    stand_in = ModuleType("torch.version")
    vars(stand_in)["cuda"] = None
    sys.modules[stand_in.__name__] = stand_in
    try:
        yield
    finally:
        del sys.modules[stand_in.__name__]


# Settings that the user has not set:
#
#     UCX_TCP_CONN_NB     The default connect blocks: packets dropped by a firewall would stop all
#                         READs for minutes.
#     UCX_MEMTYPE_CACHE   The cache needs hooks into the CUDA runtime. Without them, e.g. where only
#                         pip installed CUDA, UCX takes GPU memory for host memory.
#     UCX_CUDA_IPC_...    Without NVLinks UCX would emulate READs between GPUs over TCP. Where UCX
#                         cannot load CUDA it warns about this variable.
_DEFAULTS = {
    "UCX_TCP_CONN_NB": "y",
    "UCX_MEMTYPE_CACHE": "n",
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
}
_GPU_DEFAULTS = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}


def _set_defaults() -> frozenset[str]:
    defaults = {**_DEFAULTS, **(_GPU_DEFAULTS if finds_driver() else {})}
    unset = frozenset(defaults.keys() - os.environ.keys())
    os.environ.update({name: defaults[name] for name in unset})
    return unset


def _import_nixl() -> tuple[Any, Any]:
    """Import NIXL without its output.

    NIXL's logger attaches a stdout handler and turns `logging.raiseExceptions` off.
    """
    raise_exceptions = logging.raiseExceptions
    with _torch_not_imported():
        from nixl import _api, _bindings  # noqa: PLC0415  # it reads the environment while it loads

    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logging.raiseExceptions = raise_exceptions
    return _api, _bindings


_SET_HERE = _set_defaults() | {"UCX_NET_DEVICES", "FI_TCP_IFACE", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"}
_api, _bindings = _import_nixl()
_ERRORS: tuple[type[Exception], ...] = (
    *(
        error
        for error in vars(_bindings).values()
        if isinstance(error, type) and issubclass(error, Exception)
    ),
    *(ValueError, LookupError, MemoryError, RuntimeError, TypeError),
)


@contextlib.contextmanager
def _translated(
    what: str, peer: str = "", *, as_error: type[KVBusError] = TransferFailed
) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise _ours(error, what, peer, as_error=as_error) from error


def _ours(
    error: Exception, what: str, peer: str, *, as_error: type[KVBusError] = TransferFailed
) -> KVBusError:
    name = type(error).__name__
    if isinstance(error, _bindings.nixlRemoteDisconnectError):
        return PeerLost(f"{what}: the peer disconnected{_settings()}", nixl=name, peer=peer)
    return as_error(f"{what}: {error}{_settings()}", nixl=name, peer=peer)


# NIXL's errors have no cause. A setting that a backend cannot use shows as NIXL_ERR_BACKEND, at the
# start or at the first READ.
def _settings() -> str:
    names = (one for one in sorted(os.environ) if one.startswith(("UCX_", "NIXL_", "FI_")))
    settings = ", ".join(f"{one}={os.environ[one]}" for one in names if one not in _SET_HERE)
    return f" (environment: {settings})" if settings else ""


@dataclass(frozen=True, slots=True)
class Plugin:
    """Plugin of NIXL. A storage backend has memory kinds other than ``DRAM`` and ``VRAM``.

    ``problem`` is the reason why it cannot be loaded.
    """

    memory_kinds: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


class Plugins:
    """Plugins that NIXL finds in its folder; each is loaded when it is looked up."""

    def __init__(self) -> None:
        with _translated("NIXL lists no backends"):
            self._agent = _api.nixl_agent("kvbus-load", _api.nixl_agent_config(backends=[]))

    @property
    def names(self) -> list[str]:
        return sorted(self._agent.get_plugin_list())

    def load(self, name: str) -> Plugin:
        if name not in self._agent.get_plugin_list():
            return Plugin(problem="NIXL has no plugin of this name")
        try:
            parameters, kinds = self._agent.agent.getPluginParams(name)
        except _ERRORS:
            return Plugin(problem=_load_error(name))
        return Plugin(tuple(kind.removesuffix("_SEG") for kind in kinds), parameters)


# NIXL logs the reason at its level INFO only.
def _load_error(name: str) -> str:
    package = Path(_bindings.__file__).parent
    folders = [f".{package.name}.mesonpy.libs/plugins", f"{package.name}.libs/nixl"]
    named = os.environ.get("NIXL_PLUGIN_DIR")
    found = [Path(named)] if named else [package.parent / folder for folder in folders]
    for path in (folder / f"libplugin_{name}.so" for folder in found):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            if path.exists():
                return str(error)
    return "NIXL cannot load it"


_ONLY_IN_CODE = {
    "UCX": {"device_list", "engine_config", "num_threads", "split_batch_size"},
    "LIBFABRIC": {"max_bw_per_dram_seg", "striping_threshold"},
}
"""Parameters that NIXL 1.5.1 reads, but does not list."""


def load(backends: Backends = UCX_ONLY) -> Callable[[str], "NixlAgent"]:
    """Raises `ConfigError` for a backend that this process cannot use."""
    plugins = Plugins()
    for name, parameters in backends.items():
        _check_backend(name, parameters, plugins)
    return partial(NixlAgent, backends=backends)


def _check_backend(name: str, parameters: Mapping[str, str], plugins: Plugins) -> None:
    plugin = plugins.load(name)
    if plugin.problem:
        raise _wrong_backends(
            f"backend '{name}' cannot be loaded: {plugin.problem}{_settings()}. NIXL has "
            f"{', '.join(plugins.names)}. Install what is missing, or choose another backend; "
            "kvbus doctor lists them"
        )
    if not {"DRAM", "VRAM"}.issuperset(plugin.memory_kinds):
        kinds = ", ".join(plugin.memory_kinds)
        raise _wrong_backends(
            f"backend '{name}' is for storage (it moves {kinds}): name one that reads the memory "
            "of other processes, such as UCX"
        )
    known = {*plugin.parameters, *_ONLY_IN_CODE.get(name, ())}
    if unknown := sorted(parameters.keys() - known):
        raise ConfigError(
            f"key 'nixl_backend_params': backend '{name}' has no {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}",
            key="nixl_backend_params",
        )


def _wrong_backends(problem: str) -> ConfigError:
    return ConfigError(f"key 'nixl_backends': {problem}", key="nixl_backends")


class NixlAgent:
    """``name`` must be a valid file name for NIXL's telemetry."""

    def __init__(self, name: str, *, backends: Backends = UCX_ONLY) -> None:
        config = _api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        with _translated("no NIXL agent"):
            self._agent = _api.nixl_agent(name, config)
        for backend, parameters in backends.items():
            given = "".join(f" {key}={value}" for key, value in parameters.items())
            with _translated(f"no NIXL backend {backend}{given}"):
                self._agent.create_backend(backend, dict(parameters))
        self._backends = tuple(backends)
        self._descriptors: dict[Registration, Any] = {}
        self._contact_by_peer: dict[str, bytes] = {}

    # NIXL's own loop over backends succeeds if one of them registers the memory.
    def register(self, registration: Registration) -> None:
        row = (registration.address, registration.size_bytes, registration.device, "")
        descriptors = None
        try:
            for name in self._backends:
                what = f"the NIXL backend {name} cannot register the memory"
                with _translated(what, as_error=SegmentError):
                    descriptors = self._agent.register_memory([row], registration.memory, [name])
        except SegmentError:
            if descriptors is not None:
                self._agent.deregister_memory(descriptors)
            raise
        self._descriptors[registration] = descriptors

    def deregister(self, registration: Registration) -> None:
        with _translated("NIXL cannot deregister the memory", as_error=SegmentError):
            self._agent.deregister_memory(self._descriptors.pop(registration))

    def metadata(self, registrations: Sequence[Registration], backend: str) -> bytes:
        rows = [(r.address, r.size_bytes, r.device, "") for r in registrations]
        kind = registrations[0].memory if registrations else "DRAM"
        if any(r.memory != kind for r in registrations):
            raise SegmentError("registrations of one blob must be of one memory kind")
        with _translated("no metadata"):
            descriptors = _bindings.nixlRegDList(self._agent.nixl_mems[kind], rows)
            return bytes(self._agent.get_partial_agent_metadata(descriptors, True, [backend]))

    def add_peer(self, metadata: PeerMetadata) -> None:
        """Reject a known name with another contact: NIXL would drop the known peer."""
        name, contact = metadata.name, metadata.contact
        if self._contact_by_peer.get(name, contact) != contact:
            raise TransferFailed("another peer has that name", peer=name)
        if metadata.backend not in self._backends:
            raise TransferFailed(f"this agent has no NIXL backend {metadata.backend}", peer=name)
        self._contact_by_peer.pop(name, None)  # NIXL drops it if it rejects this
        with _translated("the peer's metadata is refused"):
            self._agent.add_remote_agent(metadata.blob)
        self._contact_by_peer[name] = contact

    def remove_peer(self, name: str) -> None:
        with _translated("the peer cannot be removed", name):
            self._agent.remove_remote_agent(name)
        self._contact_by_peer.pop(name, None)

    def progress(self) -> None:
        try:
            self._agent.get_new_notifs()
        except _ERRORS as error:
            raise _ours(error, "no progress", "") from error

    def prepare(
        self, peer: str, local: Rows, remote: Rows, kinds: tuple[MemoryKind, MemoryKind]
    ) -> Handle:
        """Prepared lists would save 10 µs of 3,800 µs (nixl 1.5.1 over shared memory)."""
        if peer not in self._contact_by_peer:
            raise PeerLost("NIXL does not know the peer", peer=peer)
        with _translated("the read cannot be prepared", peer):
            return self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, kinds[0]),
                self._agent.get_xfer_descs(remote, kinds[1]),
                peer,  # its metadata is for one backend, which NIXL takes
            )

    def post(self, handle: Handle, peer: str) -> bool:
        """This can take as long as the copy."""
        with _translated("the read cannot be posted", peer):
            state = self._agent.transfer(handle)
        return _is_done(state, peer)

    def is_done(self, handle: Handle, peer: str) -> bool:
        try:
            state = self._agent.check_xfer_state(handle)
        except _bindings.nixlNotFoundError as error:
            raise HandleForgotten("NIXL forgot the peer of a live handle", peer=peer) from error
        except _ERRORS as error:
            raise _ours(error, "the read failed", peer) from error
        return _is_done(state, peer)

    def release(self, handle: Handle) -> bool:
        try:
            self._agent.release_xfer_handle(handle)
        except _ERRORS:
            return False
        return True


def _is_done(state: str, peer: str) -> bool:
    if state == "ERR":
        what = f"the read failed: NIXL reports ERR{_settings()}"
        raise TransferFailed(what, nixl="ERR", peer=peer)
    return state == "DONE"
