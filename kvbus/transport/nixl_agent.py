"""The one import of nixl: a thin adapter with the words and errors of kvbus, and quiet logs."""

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from kvbus.errors import KVBusError, PeerLost, SegmentError, TransferFailed
from kvbus.transport.metadata import PeerMetadata
from kvbus.transport.slicing import Rows
from kvbus.transport.types import MemoryKind, Registration


# Which of its packages nixl loads (nixl_cu12, nixl_cu13, ...) follows the CUDA of this process. It
# looks at these, in this order, and the first that names a CUDA decides:
#
#   1. torch, cuda-python or cupy, where one is imported already
#   2. the file torch/version.py, read from the disk without an import of torch
#   3. `from torch.version import cuda`, which imports torch: 1 s and 190 MB
#
# Step 3 is reached only where step 2 found a torch for CPUs, or none; it then reads the same file
# once more, and says the same: no CUDA. So a module that stands in for torch.version, and names no
# CUDA, changes nothing of the choice and spares the import. Steps 1 and 2 do not see it: where
# torch is imported it is not put there, and find_spec("torch") asks for another module.
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
    """Import NIXL without letting it take over the process's output, or wait for connections.

    Its C++ core prints every error that it also raises, UCX warns on its own, and its Python
    logger attaches a stdout handler and turns `logging.raiseExceptions` off. Set `NIXL_LOG_LEVEL`
    or `UCX_LOG_LEVEL` to hear them. UCX connects over TCP by a call that waits: of a port behind
    which everything is dropped, minutes, and with it all reads of others.
    """
    os.environ.setdefault("UCX_TCP_CONN_NB", "y")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    raise_exceptions = logging.raiseExceptions
    with _torch_not_imported():
        from nixl import _api, _bindings  # noqa: PLC0415  # the environment is read while it loads

    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logging.raiseExceptions = raise_exceptions
    return _api, _bindings


_SET_HERE = {"UCX_NET_DEVICES", "UCX_TCP_CONN_NB", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"}
"""Settings that an agent has without its user."""
_api, _bindings = _import_nixl()
_ERRORS: tuple[type[Exception], ...] = (
    *(
        error
        for error in vars(_bindings).values()
        if isinstance(error, type) and issubclass(error, Exception)
    ),
    *(ValueError, LookupError, MemoryError, RuntimeError, TypeError),
)
"""NIXL's own, and what pybind makes of what else C++ throws."""

Handle = Any
"""NIXL's transfer handle."""


class HandleForgotten(TransferFailed):
    """NIXL dropped the peer under a live handle: bytes can still land, and nothing will say so."""


def load_backend() -> None:
    """Load UCX, without a port: that takes most of the time that a first `NixlAgent` does.

    Raises `TransferFailed`.
    """
    with _translated("NIXL lists no backends"):
        agent = _api.nixl_agent("kvbus-load", _api.nixl_agent_config(backends=[]))
        types = agent.get_plugin_mem_types("UCX")
    if not types:
        raise TransferFailed(f"NIXL has no backend UCX that can be loaded{_settings()}")


@contextlib.contextmanager
def _translated(
    what: str, peer: str = "", *, as_error: type[KVBusError] = TransferFailed
) -> Iterator[None]:
    """What NIXL raises is one of ours; `PeerLost` when the peer disconnected."""
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


# NIXL's errors have no cause: a setting that UCX cannot use shows as NIXL_ERR_BACKEND, at the start
# or not before the first READ.
def _settings() -> str:
    """The user's settings of UCX and NIXL, for the end of an error."""
    names = (one for one in sorted(os.environ) if one.startswith(("UCX_", "NIXL_")))
    told = ", ".join(f"{one}={os.environ[one]}" for one in names if one not in _SET_HERE)
    return f" (environment: {told})" if told else ""


class NixlAgent:
    """One NIXL agent with its UCX backend, driven by whoever calls `progress`.

    ``name`` must do as the name of a file: NIXL's telemetry writes one that is named so.
    """

    def __init__(self, name: str) -> None:
        config = _api.nixl_agent_config(
            enable_prog_thread=False,
            sync_mode=_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        with _translated("no NIXL agent"):
            self._agent = _api.nixl_agent(name, config)
        self._descriptors: dict[int, Any] = {}
        self._contacts: dict[str, bytes] = {}
        self._later: dict[str, tuple[bytes, ...]] = {}

    def register(self, registration: Registration) -> None:
        """Register memory, or raise `SegmentError`."""
        row = (registration.address, registration.size_bytes, registration.device, "")
        with _translated("NIXL cannot register the memory", as_error=SegmentError):
            descriptors = self._agent.register_memory([row], registration.memory)
        self._descriptors[registration.key] = descriptors

    def deregister(self, registration: Registration) -> None:
        """Take memory back. No handle may target it any more."""
        with _translated("NIXL cannot deregister the memory", as_error=SegmentError):
            self._agent.deregister_memory(self._descriptors.pop(registration.key))

    def metadata(self, registrations: Sequence[Registration] | None) -> bytes:
        """Connection info with all registrations, or with the given ones only."""
        if registrations is None:
            with _translated("no metadata"):
                return bytes(self._agent.get_agent_metadata())
        rows = [(r.address, r.size_bytes, r.device, "") for r in registrations]
        kind = registrations[0].memory if registrations else "DRAM"
        if any(r.memory != kind for r in registrations):
            raise SegmentError("registrations of one blob must be of one memory kind")
        with _translated("no metadata"):
            descriptors = _bindings.nixlRegDList(self._agent.nixl_mems[kind], rows)
            return bytes(self._agent.get_partial_agent_metadata(descriptors, True, ["UCX"]))

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer, or what is new about one; its name.

        What calls itself by the name of a peer that is here, and is somewhere else, is refused:
        NIXL would drop that peer, and what is in flight to it.
        """
        peer = PeerMetadata.read(metadata)
        self._add_later(peer.name)
        if self._contacts.get(peer.name, peer.contact) != peer.contact:
            raise TransferFailed("another peer has that name", peer=peer.name)
        self._contacts.pop(peer.name, None)  # NIXL forgets it where it refuses this
        with _translated("the peer's metadata is refused"):
            self._agent.add_remote_agent(metadata)
        self._contacts[peer.name] = peer.contact
        return peer.name

    def add_peer_later(self, name: str, blobs: Iterable[bytes]) -> None:
        """`add_peer`, with each of these, when the peer is first needed."""
        self._later[name] = tuple(blobs)

    def _add_later(self, name: str) -> None:
        for blob in self._later.pop(name, ()):
            self.add_peer(blob)

    def remove_peer(self, name: str) -> None:
        """Forget a peer. No handle to it may be outstanding: NIXL would lose sight of it."""
        if self._later.pop(name, None) is None:
            with _translated("the peer cannot be removed", name):
                self._agent.remove_remote_agent(name)
            self._contacts.pop(name, None)

    def progress(self) -> None:
        """Drive UCX, as initiator and as target; raises `TransferFailed`."""
        try:
            self._agent.get_new_notifs()
        except _ERRORS as error:
            raise _ours(error, "no progress", "") from error

    def destroy(self) -> None:
        """End it, which closes its connections; raises `TransferFailed` when something keeps it.

        Handles of it must be gone.
        """
        alive = weakref.ref(self._agent.agent)
        self._descriptors.clear()
        self._agent = None
        if alive() is not None:
            raise TransferFailed("the NIXL agent does not end: something refers to it")

    def prepare(
        self, peer: str, local: Rows, remote: Rows, kinds: tuple[MemoryKind, MemoryKind]
    ) -> Handle:
        """Make a READ handle that is not posted yet.

        One-shot descriptors, not prepared lists. Measured (nixl 1.5.1, shared memory): one-shot
        costs 2 µs more for one descriptor, and 10 µs more for 2,048, whose READ takes 3,800;
        preparing the 65,536 blocks of one region on both sides takes 5 ms, for each new local list.
        """
        try:
            self._add_later(peer)
        except TransferFailed as error:
            raise PeerLost(f"the connection cannot be made anew: {error}", peer=peer) from error
        if peer not in self._contacts:
            raise PeerLost("NIXL does not know the peer", peer=peer)
        with _translated("the read cannot be prepared", peer):
            return self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, kinds[0]),
                self._agent.get_xfer_descs(remote, kinds[1]),
                peer,
            )

    def post(self, handle: Handle, peer: str) -> bool:
        """Post a handle, which can take as long as the copy; True when it is already done."""
        with _translated("the read cannot be posted", peer):
            state = self._agent.transfer(handle)
        return _is_done(state, peer)

    def is_done(self, handle: Handle, peer: str) -> bool:
        """Whether a posted handle is done; raises when it ended with an error."""
        try:
            state = self._agent.check_xfer_state(handle)
        except _bindings.nixlNotFoundError as error:
            raise HandleForgotten("NIXL forgot the peer of a live handle", peer=peer) from error
        except _ERRORS as error:
            raise _ours(error, "the read failed", peer) from error
        return _is_done(state, peer)

    def release(self, handle: Handle) -> bool:
        """Give a terminal handle back; False when NIXL refuses, and then it is kept for ever."""
        try:
            self._agent.release_xfer_handle(handle)
        except _ERRORS:
            return False
        return True


def _is_done(state: str, peer: str) -> bool:
    if state == "ERR":
        what = f"the read failed: NIXL says ERR{_settings()}"
        raise TransferFailed(what, nixl="ERR", peer=peer)
    return state == "DONE"
