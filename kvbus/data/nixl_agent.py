"""Adapter for nixl, and its only import."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from kvbus.data.messages import MemoryKind
from kvbus.data.nixl import Handle, HandleForgotten, PeerMetadata, Registration
from kvbus.data.slicing import Rows
from kvbus.errors import KVBusError, PeerLost, SegmentError, TransferFailed


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


def _import_nixl() -> tuple[Any, Any]:
    """Import NIXL without its output and its blocking connects.

    NIXL's logger attaches a stdout handler and turns `logging.raiseExceptions` off. UCX's default
    TCP connect blocks: packets dropped by a firewall would stop all READs for minutes.
    """
    os.environ.setdefault("UCX_TCP_CONN_NB", "y")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    raise_exceptions = logging.raiseExceptions
    with _torch_not_imported():
        from nixl import _api, _bindings  # noqa: PLC0415  # it reads the environment while it loads

    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logging.raiseExceptions = raise_exceptions
    return _api, _bindings


_SET_HERE = {"UCX_NET_DEVICES", "UCX_TCP_CONN_NB", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"}
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


# NIXL's errors have no cause. A setting that UCX cannot use shows as NIXL_ERR_BACKEND, at the start
# or at the first READ.
def _settings() -> str:
    names = (one for one in sorted(os.environ) if one.startswith(("UCX_", "NIXL_")))
    settings = ", ".join(f"{one}={os.environ[one]}" for one in names if one not in _SET_HERE)
    return f" (environment: {settings})" if settings else ""


def load() -> type["NixlAgent"]:
    with _translated("NIXL lists no backends"):
        agent = _api.nixl_agent("kvbus-load", _api.nixl_agent_config(backends=[]))
        types = agent.get_plugin_mem_types("UCX")
    if not types:
        raise TransferFailed(f"NIXL has no backend UCX that can be loaded{_settings()}")
    return NixlAgent


class NixlAgent:
    """``name`` must be a valid file name for NIXL's telemetry."""

    def __init__(self, name: str) -> None:
        config = _api.nixl_agent_config(
            enable_prog_thread=False,
            sync_mode=_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        with _translated("no NIXL agent"):
            self._agent = _api.nixl_agent(name, config)
        self._descriptors: dict[Registration, Any] = {}
        self._contact_by_peer: dict[str, bytes] = {}

    def register(self, registration: Registration) -> None:
        row = (registration.address, registration.size_bytes, registration.device, "")
        with _translated("NIXL cannot register the memory", as_error=SegmentError):
            descriptors = self._agent.register_memory([row], registration.memory)
        self._descriptors[registration] = descriptors

    def deregister(self, registration: Registration) -> None:
        with _translated("NIXL cannot deregister the memory", as_error=SegmentError):
            self._agent.deregister_memory(self._descriptors.pop(registration))

    def metadata(self, registrations: Sequence[Registration]) -> bytes:
        rows = [(r.address, r.size_bytes, r.device, "") for r in registrations]
        kind = registrations[0].memory if registrations else "DRAM"
        if any(r.memory != kind for r in registrations):
            raise SegmentError("registrations of one blob must be of one memory kind")
        with _translated("no metadata"):
            descriptors = _bindings.nixlRegDList(self._agent.nixl_mems[kind], rows)
            return bytes(self._agent.get_partial_agent_metadata(descriptors, True, ["UCX"]))

    def add_peer(self, metadata: PeerMetadata) -> None:
        """Reject a known name with another contact: NIXL would drop the known peer."""
        name, contact = metadata.name, metadata.contact
        if self._contact_by_peer.get(name, contact) != contact:
            raise TransferFailed("another peer has that name", peer=name)
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
                peer,
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
