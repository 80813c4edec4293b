"""Core of the data process."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any, NoReturn

from kvbus.data import definitions as named
from kvbus.data import messages as wire
from kvbus.data.copiers import Copiers
from kvbus.data.definitions import NIXL, Definitions
from kvbus.data.jobs import Jobs
from kvbus.data.listening import listening_sockets
from kvbus.data.memories import (
    GpuCopiers,
    LocalMemory,
    RemoteMemory,
    close_fds,
    host_registrations,
    map_rank,
)
from kvbus.data.metadata import read_metadata
from kvbus.data.nixl import LoadNixl, OpenNixlAgent, PeerMetadata, Registration
from kvbus.data.plans import PreparedPlan, make_plan
from kvbus.data.reads import NixlReads
from kvbus.data.replies import Background, Replies
from kvbus.data.scheduler import PostLimits
from kvbus.data.slots import Slots, allocate_slots, kinds_of_slots
from kvbus.errors import ErrorCode, KVBusError, LocalError, SegmentError, TransferFailed
from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.mapping import SegmentMapping
from kvbus.planning import PlacedRank

MAX_KEPT = 4096
"""Limit of mappings that stay as zeros after their memory is removed."""
NUM_MAPPING_THREADS = 4
CUT = "was truncated by its owner"


#     main thread     handle ─▶ definitions, jobs           step ─▶ READs (`reads`)
#     other threads   map, plan, discard ─▶ main thread     copies (`copiers`) ─▶ Reply
class DataServer:
    """Only the main thread calls it. ``post`` schedules a call there; any thread may ``send``."""

    def __init__(
        self,
        configure: wire.Configure,
        *,
        load_nixl: LoadNixl,
        send: Callable[[wire.FromData], object],
        post: Callable[[Callable[[], object]], object],
        new_threads: Callable[[int, str], Executor],
        clock: Callable[[], float],
        bus_errors: BusErrors,
    ) -> None:
        self._configure, self._load_nixl, self._clock = configure, load_nixl, clock
        self._bus_errors, self._post = bus_errors, post
        self._replies = Replies(send)
        self._background = Background(new_threads(NUM_MAPPING_THREADS, "kvbus-map"), post)
        copiers = Copiers(
            new_threads(configure.copy_threads, "kvbus-copy"),
            configure.copy_threads,
            clock=clock,
            to_error=self._replies.to_error,
        )
        self._gpu_copiers = GpuCopiers(self._end_with)
        self._definitions = Definitions(self._begin)
        self._jobs = Jobs(
            self._definitions,
            copiers,
            self._background,
            self._replies,
            slice_bytes=configure.slice_bytes,
            clock=clock,
        )
        self._reads: NixlReads | None = None
        self._is_driven = False
        self._leaving: dict[str, wire.RemovePeer] = {}
        self._kept: deque[SegmentMapping] = deque(maxlen=MAX_KEPT)
        self._handlers: dict[type[Any], Callable[[Any], object]] = {
            wire.CheckBackends: self._check_backends,
            wire.OpenNixl: self._open_nixl,
            wire.OpenSlots: self._open_slots,
            wire.AddRemote: self._add_remote,
            wire.DiscardMemory: self._discard_memory,
            wire.RemoveMemory: self._remove_memory,
            wire.AddPeer: self._add_peer,
            wire.RemovePeer: self._remove_peer,
            wire.AddPlan: self._add_plan,
            wire.RemovePlan: self._remove_plan,
            wire.Metadata: self._metadata,
            wire.DriveProgress: self._drive_progress,
            wire.Barrier: self._replies.done,
            wire.ListListening: self._list_listening,
            wire.AbortJob: self._abort,
        }
        self._replies.done(configure)

    def handle(self, message: wire.ToData, fds: Iterable[int] = ()) -> None:
        """Owns ``fds``."""
        try:
            if isinstance(message, wire.Job):
                self._jobs.accept(message)
        except KVBusError as error:
            self._replies.fail(message, error)
        else:
            self._begin(message, list(fds))

    def pause_s(self) -> float | None:
        return None if self._reads is None else self._reads.pause_s()

    def step(self) -> None:
        """Its errors end the process."""
        if self._reads is None:
            return
        self._reads.step()
        for peer in [one for one in self._leaving if not self._reads.reads_from(one)]:
            self._finish_removal(self._leaving.pop(peer), self._reads)

    def _begin(self, message: wire.ToData, fds: list[int]) -> None:
        if self._definitions.waits(message, fds):
            return
        try:
            if isinstance(message, wire.Job):
                self._jobs.start(message)
            elif isinstance(message, wire.AddMemory):
                self._add_memory(message, fds)
            else:
                self._handlers[type(message)](message)
        except Exception as error:
            if isinstance(message, wire.Job):
                self._jobs.fail(message, error)
            else:
                self._replies.fail(message, error)
                self._definitions.withdraw(message)

    def _abort(self, message: wire.AbortJob) -> None:
        self._jobs.abort(message.job)
        self._replies.done(message)

    def _list_listening(self, message: wire.ListListening) -> None:
        def then(found: tuple[tuple[str, int], ...] | Exception) -> None:
            if isinstance(found, Exception):
                self._replies.fail(message, found)
            else:
                self._replies.done(message, wire.Listening(found))

        self._background.start(lambda: tuple(listening_sockets()), then)

    # NIXL.

    def _check_backends(self, message: wire.CheckBackends) -> None:
        def then(loaded: OpenNixlAgent | Exception) -> None:
            self._end_request(message, loaded if isinstance(loaded, Exception) else None)

        self._background.start(self._load, then)

    def _load(self) -> OpenNixlAgent:
        return self._load_nixl(self._configure.nixl_backends)

    def _open_nixl(self, message: wire.OpenNixl) -> None:
        if self._reads is not None:
            self._replies.done(message)
            return

        def then(loaded: OpenNixlAgent | Exception) -> None:
            try:
                if isinstance(loaded, Exception):
                    raise loaded
                self._reads = self._new_reads(loaded)
            except Exception as error:
                self._refuse(message, NIXL, error)
            else:
                self._replies.done(message)
                self._definitions.settle(NIXL, self._reads)

        self._definitions.pend(NIXL)
        self._background.start(self._load, then)

    def _new_reads(self, open_agent: OpenNixlAgent) -> NixlReads:
        agent = open_agent(self._configure.nixl_name)
        reads = NixlReads(agent, PostLimits(slice_bytes=self._configure.slice_bytes), self._clock)
        reads.is_driven = self._is_driven
        for value in self._definitions.values():
            if isinstance(value, LocalMemory | Slots):
                try:
                    _register(value, reads)
                except SegmentError as error:
                    value.refused = error.without_frames()
        return reads

    def _drive_progress(self, message: wire.DriveProgress) -> None:
        self._is_driven = message.on
        if self._reads is not None:
            self._reads.is_driven = message.on
        self._replies.done(message)

    def _metadata(self, message: wire.Metadata) -> None:
        reads: NixlReads = self._definitions.find(NIXL)
        found: list[Registration] = []
        names = *map(named.memory, message.memories), *map(named.slots, message.devices)
        for value in map(self._definitions.find, names):
            if value.refused is not None:
                raise value.refused
            found += (
                [value.registration] if isinstance(value, Slots) else value.registrations.values()
            )
        blobs = [
            reads.agent.metadata([one for one in found if one.memory == kind], message.backend)
            for kind in sorted({one.memory for one in found})
        ]
        self._replies.done(message, wire.MetadataBlobs(tuple(blobs)))

    # Metadata that is rejected before NIXL gets it leaves a known peer unchanged. If NIXL itself
    # rejects metadata it drops the known peer, and READs from there fail.
    def _add_peer(self, message: wire.AddPeer) -> None:
        name = named.peer(message.peer)
        definition = self._definitions.get(name)
        known: PeerMetadata | None = None if definition is None else definition.value
        try:
            reads: NixlReads = self._definitions.find(NIXL)
            read = [read_metadata(blob) for blob in message.metadata]
            if not (known or read):
                raise LocalError("a peer without metadata", code=ErrorCode.INTERNAL)
            for peer in read:
                _check_peer(peer, known or read[0], message.peer)
        except KVBusError as error:
            if known is None:
                self._definitions.fail(name, error)
            raise
        try:
            for peer in read:
                reads.agent.add_peer(peer)
        except KVBusError as error:
            self._refuse(message, name, error)
        else:
            self._definitions.settle(name, known or read[0])
            self._replies.done(message)

    def _remove_peer(self, message: wire.RemovePeer) -> None:
        name = named.peer(message.peer)
        if self._reads is None or self._definitions.get(name) is None:
            self._definitions.remove(name)
            self._replies.done(message)
        else:
            self._definitions.pend(name)
            self._leaving[message.peer] = message

    def _finish_removal(self, message: wire.RemovePeer, reads: NixlReads) -> None:
        name = named.peer(message.peer)
        try:
            if self._definitions.find(name):
                reads.agent.remove_peer(message.peer)
        except KVBusError as error:  # it was not added, or NIXL has dropped it
            self._replies.log("info", "peer.unknown", nixl_agent=message.peer, reason=str(error))
        self._replies.done(message)
        self._definitions.remove(name)

    # Memories, slots and plans.

    def _add_memory(self, message: wire.AddMemory, fds: list[int]) -> None:
        name = named.memory(message.memory)
        try:
            self._definitions.check_new(name)
        except KVBusError:
            close_fds(fds)
            raise
        on_cut = OnTruncated(message.memory, self._replies.send)

        def then(mapped: LocalMemory | Exception) -> None:
            try:
                if isinstance(mapped, Exception):
                    raise mapped
                on_cut.watch(mapped)
                _register(mapped, self._reads)
            except Exception as error:
                close_fds(fds)
                if isinstance(mapped, LocalMemory):
                    self._background.start(mapped.close, lambda _: None)
                self._refuse(message, name, error)
            else:
                self._replies.done(message, wire.MemoryAdded(mapped.addresses))
                self._definitions.settle(name, mapped)
                self._background.start(mapped.populate, lambda _: None)

        self._definitions.pend(name)
        mapped = partial(
            map_rank,
            message,
            fds,
            self._bus_errors,
            on_cut=on_cut,
            copiers=self._gpu_copiers,
        )
        self._background.start(mapped, then)

    # After a GPU fault all CUDA calls of this process fail. The next data process works.
    def _end_with(self, error: Exception) -> None:
        def fail() -> NoReturn:
            raise error

        self._post(fail)

    def _add_remote(self, message: wire.AddRemote) -> None:
        name = named.memory(message.memory)
        self._definitions.check_new(name)
        placed = PlacedRank(message.engine, message.rank, message.addresses)
        self._replies.done(message)
        self._definitions.settle(name, RemoteMemory(message.peer, placed))

    def _discard_memory(self, message: wire.DiscardMemory) -> None:
        name = named.memory(message.memory)
        definition = self._definitions.get(name)
        if definition is None or not isinstance(definition.value, LocalMemory):
            self._replies.done(message)
            return
        memory = definition.value
        memory.gone = memory.gone or "was discarded, as its engine has ended"

        def then(outcome: Exception | None) -> None:
            self._end_request(message, outcome)
            self._definitions.settle(name, memory)

        self._definitions.pend(name)
        self._background.start(memory.discard, then)

    # A reader that was stopped beyond all timeouts has READs at UCX here, which continue when it
    # does. Over TCP UCX copies in this process, by address alone: an unmapped address would crash
    # the process, and another engine's memory there would be sent. So the addresses that NIXL knew
    # stay mapped to zeros, which take no memory. Beyond `MAX_KEPT`, the oldest are unmapped.
    def _remove_memory(self, message: wire.RemoveMemory) -> None:
        name = named.memory(message.memory)
        definition = self._definitions.get(name)
        memory = None if definition is None else definition.value
        if not isinstance(memory, LocalMemory):
            self._replies.done(message)
            self._definitions.remove(name)
            return
        if self._reads is not None:
            self._reads.deregister(memory.registrations.values())
        registered = [memory.mappings[name] for name in memory.registrations]
        memory.gone = memory.gone or "was removed"

        def then(outcome: Exception | None) -> None:
            self._kept.extend(one for one in registered if isinstance(one, SegmentMapping))
            self._end_request(message, outcome)
            self._definitions.remove(name)

        self._definitions.pend(name)
        self._background.start(memory.close, then)

    def _open_slots(self, message: wire.OpenSlots) -> None:
        name = named.slots(message.device)
        self._definitions.check_new(name)
        kinds = list(kinds_of_slots(message.device, nic_reads_gpu=message.nic_reads_gpu))

        def allocate() -> None:
            num_slots, slot_bytes = message.num_slots, message.slot_bytes
            work = partial(allocate_slots, message.device, kinds[0], num_slots, slot_bytes)
            self._background.start(work, then)

        def then(made: Slots | Exception) -> None:
            kind = kinds.pop(0)
            try:
                if isinstance(made, Exception):
                    raise made
                _register(made, self._reads)
            except Exception as error:
                if message.device != wire.HOST:
                    fields = {"gpu": message.device, "memory": kind, "reason": str(error)}
                    self._replies.log("warning", "staging.refused", **fields)
                if isinstance(error, SegmentError) and kinds:
                    allocate()
                else:
                    self._refuse(message, name, error)
            else:
                placed = made.storage.address, made.memory, made.device
                opened = wire.SlotsOpened(*placed, made.gpu_bytes)
                self._replies.done(message, opened)
                self._definitions.settle(name, made)

        self._definitions.pend(name)
        allocate()

    def _add_plan(self, message: wire.AddPlan) -> None:
        name, find = named.plan(message.plan), self._definitions.find
        self._definitions.check_new(name)
        try:
            sources, targets = (
                {rank: find(named.memory(number)) for rank, number in side.items()}
                for side in (message.sources, message.targets)
            )
        except KVBusError as error:
            self._refuse(message, name, error)
            return

        def then(made: PreparedPlan | Exception) -> None:
            if isinstance(made, Exception):
                self._refuse(message, name, made)
            else:
                self._replies.done(message)
                self._definitions.settle(name, made)

        self._definitions.pend(name)
        self._background.start(partial(make_plan, message, sources, targets), then)

    def _remove_plan(self, message: wire.RemovePlan) -> None:
        self._definitions.remove(named.plan(message.plan))
        self._replies.done(message)

    def _refuse(self, message: wire.DataRequest, name: named.Name, caught: Exception) -> None:
        error = self._replies.to_error(caught)
        self._replies.fail(message, error)
        self._definitions.fail(name, error)

    def _end_request(self, message: wire.DataRequest, outcome: Exception | None) -> None:
        if outcome is None:
            self._replies.done(message)
        else:
            self._replies.fail(message, outcome)


class OnTruncated:
    """Called in the thread that touched a truncated segment, before the first zero."""

    def __init__(self, memory: int, send: Callable[[wire.FromData], object]) -> None:
        self._number, self._send = memory, send
        self._cut: dict[str, object] = {}
        self._memory: LocalMemory | None = None

    def watch(self, memory: LocalMemory) -> None:
        self._memory = memory
        if self._cut:
            memory.gone = CUT

    def __call__(self, segment_id: str) -> None:
        if self._memory is not None:
            self._memory.gone = self._memory.gone or CUT
        mine = object()
        if self._cut.setdefault(segment_id, mine) is mine:  # another thread may touch it as well
            self._send(wire.Cut(self._number, segment_id))


def _check_peer(peer: PeerMetadata, known: PeerMetadata, name: str) -> None:
    if peer.name != name:
        raise LocalError(
            f"metadata of NIXL agent '{peer.name}' came as that of '{name}'",
            code=ErrorCode.INVALID,
        )
    if peer.contact != known.contact:
        raise TransferFailed("another peer has that name", peer=name)


def _register(value: LocalMemory | Slots, reads: NixlReads | None) -> None:
    """Raises `SegmentError`; nothing is registered then."""
    if reads is None:
        return
    if isinstance(value, Slots):
        reads.agent.register(value.registration)
    elif value.direct and not value.gone:
        try:
            for name, registration in host_registrations(value):
                reads.agent.register(registration)
                value.registrations[name] = registration
        except SegmentError:
            reads.deregister(value.registrations.values())
            value.registrations.clear()
            raise
